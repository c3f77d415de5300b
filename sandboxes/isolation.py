"""How a kernel is walled off on this machine, found out by trying, and the bubblewrap command that does it.

Three walls, from strong to none:

- `full`: one bubblewrap holds the fork server, and every kernel forked from it gets namespaces of its own inside. Fast.
- `process`: one bubblewrap per kernel, where the machine doesn't allow namespaces inside namespaces. The same walls, a slower start.
- `none`: no bubblewrap. Only when asked for by name; code in the sandbox can then do all that this user can.

When the host runs as root, bubblewrap is used without a user namespace and every session gets a host user id of its own that owns nothing
else; otherwise all sessions are this user in a user namespace.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mappa_graph.errors import SandboxError

from . import cgroups
from .inside import seccomp, wall
from .limits import Limits

Wall = Literal["full", "process", "none"]
INSTALL = (
    "install it (Debian, Ubuntu: `sudo apt-get install bubblewrap`; Fedora: `sudo dnf install bubblewrap`; "
    'Arch: `sudo pacman -S bubblewrap`), or set isolation="none" to run agent code with all the rights of this user'
)
_CODE = Path(wall.__file__).parent
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "fonts", "nsswitch.conf")


@dataclass(frozen=True, slots=True)
class Isolation:
    """The wall in use, and what it rests on."""

    wall: Wall
    bubblewrap: str | None = None
    version: str = ""
    as_root: bool = False
    first_uid: int = 0
    """First of 10,000 host user ids for sessions; 0 = sessions run as this process's user."""
    reason: str = ""
    """Why the wall isn't a stronger one."""

    @property
    def sessions_have_own_uid(self) -> bool:
        return self.first_uid > 0


def code_command(fd: int, preload: Sequence[str], limits: Mapping[str, Any], folder: str) -> list[str]:
    """The interpreter's command line for the fork server, whose code lies in `folder`/inside."""
    import json

    options = json.dumps({"fd": fd, "preload": list(preload), "limits": dict(limits)})
    start = f"import sys; sys.path.insert(0, {folder!r}); from inside.zygote import main; del sys.path[0]; main()"
    return [sys.executable, "-I", "-c", start, options]


def environment(limits: Limits) -> dict[str, str]:
    """Every environment variable that code in a sandbox sees, ipykernel's own few aside."""
    threads = str(limits.threads)
    return {
        "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "IPYTHONDIR": "/tmp/.ipython",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "LOKY_MAX_CPU_COUNT": threads,
    }


def interpreter_binds() -> list[Path]:
    """What of this interpreter's installation must be visible inside:

    parts of `sys.prefix` and `sys.base_prefix`, never a folder around them.
    """
    out: list[Path] = []
    for prefix in dict.fromkeys((Path(sys.base_prefix).resolve(), Path(sys.base_prefix), Path(sys.prefix))):
        if prefix.is_relative_to("/usr"):
            continue
        if prefix.is_relative_to("/sandbox") or prefix == Path("/"):
            raise SandboxError(f"the interpreter lies in {prefix}, which the sandbox needs for itself", hint="use an interpreter elsewhere")
        out += [prefix / part for part in ("bin", "lib", "lib64", "include", "share", "pyvenv.cfg") if (prefix / part).exists()]
    return out


def outer_command(isolation: Isolation, limits: Limits, binds: Sequence[tuple[str, str, bool]], hide: Sequence[Path] = ()) -> list[str]:
    """The bubblewrap command up to the program it runs. `binds` are (host path, inside path, writable); `hide` are host folders."""
    command = [str(isolation.bubblewrap), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if isolation.wall == "full":
        command += ["--cap-add", "ALL"]  # the fork server builds walls; its kernels drop everything
        if not isolation.as_root:
            command += ["--unshare-user", "--uid", "0", "--gid", "0"]
    else:
        command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run", "--dir", "/etc", "--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    for name in _ETC:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    folders: dict[Path, None] = {}
    for bound in interpreter_binds():
        folders.update(dict.fromkeys(reversed(bound.parents)))
    for folder in sorted(folders):
        if str(folder) not in ("/", "/tmp"):
            command += ["--perms", "0755", "--dir", str(folder)]
    for bound in interpreter_binds():
        command += ["--ro-bind", str(bound), str(bound)]
    for folder in hide:
        # what is not bound is not there anyway, and bubblewrap could not mount on it
        if any(folder.is_relative_to(seen) for seen in (*interpreter_binds(), Path("/usr"))):
            command += ["--tmpfs", str(folder)]
    for place in ("/sandbox", "/sandbox/code", wall.WORK, wall.KERNEL, wall.SESSIONS, wall.CONNECTIONS):
        command += ["--perms", "0755", "--dir", place]
    command += ["--ro-bind", str(_CODE), "/sandbox/code/inside"]
    for source, target, writable in binds:
        command += ["--bind" if writable else "--ro-bind", source, target]
    for name, value in environment(limits).items():
        command += ["--setenv", name, value]
    return [*command, "--remount-ro", "/", "--chdir", "/"]


def kept_below_tmp() -> list[str]:
    """Paths of the interpreter that a fresh /tmp would hide."""
    return [str(path) for path in interpreter_binds() if path.is_relative_to("/tmp")]


@functools.cache
def _find() -> tuple[str | None, str]:
    path = shutil.which("bwrap")
    if path is None:
        return None, ""
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return path, shown.stdout.strip().rpartition(" ")[2]


def choose(wanted: str) -> Isolation:
    """The strongest wall this machine allows for `wanted` ("bubblewrap" or "none"). Raises `SandboxError` where there is none."""
    if wanted not in ("bubblewrap", "none"):
        raise SandboxError(f"isolation is {wanted!r}", hint='give "bubblewrap" or "none"')
    if wanted == "none":
        return Isolation("none", reason="asked for")
    path, version = _find()
    if path is None:
        raise SandboxError("bubblewrap (bwrap) is not installed, and the sandbox does not run agent code without it", hint=INSTALL)
    return _choose(path, version)


@functools.cache
def _choose(path: str, version: str) -> Isolation:
    tried: list[str] = []
    candidates = [Isolation("full", path, version)]
    if os.geteuid() == 0:
        first = _session_uids()
        candidates.insert(0, Isolation("full", path, version, as_root=True, first_uid=first))
    for candidate in candidates:
        error = _trial(candidate)
        if error is None:
            return candidate
        tried.append(error)
    single = Isolation("process", path, version, reason=f"no namespaces inside namespaces here: {tried[0]}")
    error = _trial(single)
    if error is None:
        return single
    raise SandboxError(
        f"bubblewrap {version} does not work here: {error}",
        hint="unprivileged user namespaces may be switched off (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces, "
        'kernel.apparmor_restrict_unprivileged_userns) or this is a container without them; or set isolation="none"',
    )


def _trial(isolation: Isolation) -> str | None:
    """None if the wall can be built, else why not."""
    probe = "import sys; sys.path.insert(0, '/sandbox/code'); from inside import trial; trial.main(sys.argv[1:])"
    command = outer_command(isolation, Limits(), ())
    command += [sys.executable, "-I", "-c", probe, isolation.wall, str(isolation.first_uid), *kept_below_tmp()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return "the trial did not end within 30 s"
    return None if done.returncode == 0 and done.stdout.strip() == "walled" else (done.stderr.strip() or f"exit {done.returncode}")[-500:]


def _session_uids() -> int:
    """The first host user id for sessions:

    far from those of people, services and containers; 0 where the interpreter isn't readable to others.
    """
    if not all(os.stat(path).st_mode & 0o005 == 0o005 for path in interpreter_binds() if path.is_dir()):
        return 0
    try:
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            start, _, count = map(int, line.split())
            if start <= 1_900_000_000 and start + count > 2_000_000_000:
                return 1_900_000_000 + (os.getpid() % 9_000) * 10_000
            if start == 0 and count >= 60_000:
                return 50_000
    except OSError:
        return 0
    return 0


def describe_isolation(isolation: str = "bubblewrap", limits: Limits | None = None) -> dict[str, Any]:
    """What holds on this machine, as a `doctor` shows it: the wall, and how every limit is enforced."""
    limits = limits or Limits()
    try:
        chosen = choose(isolation)
    except SandboxError as error:
        return {"usable": False, "isolation": isolation, "error": str(error)}
    groups = cgroups.probe().describe()
    own_users = chosen.wall == "full" and (not chosen.as_root or chosen.sessions_have_own_uid)
    counted = own_users and (os.geteuid() != 0 or chosen.sessions_have_own_uid)
    pids = "enforced" if chosen.wall != "none" and counted else "not enforced for root"
    return {
        "usable": True,
        "isolation": isolation,
        "wall": chosen.wall,
        "reason": chosen.reason,
        "bubblewrap": chosen.version or None,
        "own_user_per_session": chosen.sessions_have_own_uid,
        "system_call_filter": chosen.wall != "none" and seccomp.supported(),
        "limits": {
            "memory": f"cgroup {groups['memory']} and RLIMIT_AS per process" if "memory" in groups else "RLIMIT_AS per process",
            "processes": f"cgroup {groups['pids']}" if "pids" in groups else f"RLIMIT_NPROC, {pids}",
            "cpus": f"cgroup {groups['cpu']}" if "cpu" in groups else "not enforced",
            "cpu_time": "RLIMIT_CPU per process",
            "file_size": "RLIMIT_FSIZE",
            "open_files": "RLIMIT_NOFILE",
            "workspace": "watched while code runs",
            "tmp": "tmpfs size" if chosen.wall != "none" else "not enforced",
            "output": "cut by the reader",
        },
    }
