"""The inner wall: what separates one kernel from the host and from all other kernels of its fork server.

The fork server runs inside bubblewrap, which already took away the network, the home directory and everything writable. Each kernel gets on
top: mount, pid, ipc, uts, network and cgroup namespaces of its own, owned by the *server's* user namespace, and then a user namespace of
its own, in which it starts out with nothing. So a kernel that somehow regained all capabilities of its own namespace still couldn't touch
a mount.

Order matters: mounts are made by the session's init (pid 1), which keeps its capabilities and never runs agent code; the kernel process
drops everything before its first thread starts, because capabilities, `no_new_privs` and filters are per thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from . import seccomp

WORK = "/sandbox/work"
KERNEL = "/sandbox/kernel"
SESSIONS = "/sandbox/sessions"
CONNECTIONS = "/sandbox/connections"

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _SECUREBITS, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 24, 28, 36, 38
_MASKED = (
    "kcore",
    "keys",
    "timer_list",
    "sched_debug",
    "sysrq-trigger",
    "kallsyms",
    "config.gz",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
)
_MASKED_FOLDERS = ("acpi", "scsi", "bus", "irq", "driver")

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if v is None else v.encode() for v in (source, target, kind, data)]
    _check(libc.mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]), f"mount {source} on {target}")


def _bind(source: str, target: str, flags: int) -> None:
    _mount(source, target, None, _BIND)
    kept = os.statvfs(target).f_flag & (_RDONLY | _NOSUID | _NODEV | _NOEXEC)  # a locked flag may not be dropped
    _mount("none", target, None, _BIND | _REMOUNT | flags | kept)


def prctl(option: int, value: int = 0) -> None:
    """`prctl(2)`; raises OSError."""
    _check(libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def become_subreaper() -> None:
    """Orphans of this process's children become its own children."""
    prctl(_SUBREAPER, 1)


def die_with_parent() -> None:
    """SIGKILL when the parent ends."""
    prctl(_PDEATHSIG, 9)


def fork_into_new_pids() -> int:
    """`os.fork`, whose child is pid 1 of a pid namespace of its own. The caller's later children are not in it."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(libc.unshare(_NEWPID), "unshare pids")
        try:
            pid = os.fork()
        except BaseException:
            _check(libc.setns(own, _NEWPID), "setns")
            raise
        if pid:
            _check(libc.setns(own, _NEWPID), "setns")
        return pid
    finally:
        os.close(own)


def enter() -> None:
    """As pid 1: new namespaces for all else but users."""
    _check(libc.unshare(_NEWNS | _NEWIPC | _NEWNET | _NEWUTS | _NEWCGROUP), "unshare")


def build(workspace: str, connection: str, *, read_only: bool, tmp_bytes: int, keep: Sequence[str] = ()) -> None:
    """As pid 1: the session's own view of the file system.

    `workspace` and `connection` name folders below SESSIONS and CONNECTIONS; `keep` are paths below /tmp that the interpreter needs.
    """
    prctl(_DUMPABLE, 0)
    _mount("none", "/", None, _REC | _PRIVATE)
    _bind(f"{SESSIONS}/{workspace}", WORK, _NOSUID | _NODEV | (_RDONLY if read_only else 0))
    _bind(f"{CONNECTIONS}/{connection}", KERNEL, _NOSUID | _NODEV | _NOEXEC)
    for folder in (SESSIONS, CONNECTIONS):
        _mount("none", folder, "tmpfs", _RDONLY | _NOSUID | _NODEV | _NOEXEC, "size=4k,nr_inodes=2,mode=755")
    held = [(path, os.open(path, os.O_PATH)) for path in keep]
    _mount("none", "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={tmp_bytes},nr_inodes=20000,mode=1777")
    for path, fd in held:
        os.makedirs(path)
        _mount(f"/proc/self/fd/{fd}", path, None, _BIND | _REC)
        os.close(fd)
    _mount("none", "/dev/shm", "tmpfs", _NOSUID | _NODEV, f"size={tmp_bytes},nr_inodes=10000,mode=1777")
    _mount("none", "/dev/pts", "devpts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for name in _MASKED:
        if os.path.exists(f"/proc/{name}"):
            _mount("/dev/null", f"/proc/{name}", None, _BIND)
    for name in _MASKED_FOLDERS:
        if os.path.isdir(f"/proc/{name}"):
            _mount("none", f"/proc/{name}", "tmpfs", _RDONLY | _NOSUID | _NODEV | _NOEXEC, "size=4k,nr_inodes=2")
    _check(libc.sethostname(b"sandbox", 7), "sethostname")
    _raise_loopback()


def _raise_loopback() -> None:
    """The session's own loopback, which reaches nothing but the session."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        up = 1
        fcntl.ioctl(probe, 0x8914, struct.pack("16sH14x", b"lo", up))  # SIOCSIFFLAGS


def seal() -> None:
    """As pid 1, once the kernel has bound its sockets: their folder leaves the session's view."""
    _check(libc.umount2(KERNEL.encode(), 2), "umount")


def hidden_bytes() -> int:
    """As pid 1: what files of the workspace take that were deleted and are still open or mapped, which no listing shows."""
    device = os.stat(WORK).st_dev
    seen: dict[int, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{fd}")
                    if info.st_nlink == 0 and info.st_dev == device:
                        seen[info.st_ino] = info.st_blocks * 512
            with open(f"/proc/{pid}/maps", errors="replace") as maps:
                for line in maps:
                    if not line.endswith(" (deleted)\n"):
                        continue
                    span, _, _, place, inode, *_ = line.split(None, 5)
                    major, minor = (int(part, 16) for part in place.split(":"))
                    if os.makedev(major, minor) == device:
                        start, end = (int(part, 16) for part in span.split("-"))
                        seen[int(inode)] = max(seen.get(int(inode), 0), end - start)
    return sum(seen.values())


def limit(limits: Mapping[str, Any]) -> None:
    """Resource limits for this process and all it starts. Keys are names of `resource` constants without RLIMIT_."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None or value is None:
            continue
        if name == "AS":
            value += _virtual_size()
        _, hard = resource.getrlimit(kind)
        value = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(kind, (value, value))


def _virtual_size() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def drop(uid: int, limits: Mapping[str, Any]) -> None:
    """As the process that becomes the kernel: a user namespace with one user, then no privilege of any kind, for good.

    `uid`, where not 0, is a user id of the host that belongs to this session alone (possible only when the host runs as root).
    """
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        prctl(_DUMPABLE, 1)  # else /proc/self, where the maps are written, belongs to root
    _check(libc.unshare(_NEWUSER), "unshare user")
    for name, line in (("setgroups", "deny"), ("gid_map", f"1000 {uid} 1"), ("uid_map", f"1000 {uid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    limit(limits)  # after the user namespace: processes are then counted for this session alone
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        prctl(_CAPBSET_DROP, capability)
    prctl(_SECUREBITS, 0b101111)  # no root magic, keep-caps locked off
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(libc.capset(header, nothing), "capset")
    restrict()


def restrict() -> None:
    """No new privileges and, where there is one for this machine, the system-call filter."""
    prctl(_NO_NEW_PRIVS, 1)
    if seccomp.supported():
        seccomp.install(libc)


def join(descriptors: list[int]) -> None:
    """Move this process into the control groups whose `cgroup.procs` are open as `descriptors`, and close them."""
    for fd in descriptors:
        with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as file:
            file.write(b"0")
