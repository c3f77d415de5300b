"""Hostile cells that look around, reach out or use things up: each is contained, and the next session works as if nothing had happened."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from mappa_graph.sandboxes import Box, SandboxPool, describe_isolation
from tests.fakes.hostile import SECRET, box, pool, refused, shows

__all__ = ["box", "pool"]

if not describe_isolation()["usable"]:
    pytest.skip("no bubblewrap here", allow_module_level=True)


class TestWhatCanBeSeen:
    def test_environment_holds_nothing_of_the_host(self, box: Box) -> None:
        said = shows(box, "import os; print(sorted(os.environ))")
        assert "MAPPA_TEST_SECRET" not in said
        said = shows(box, "print(open('/proc/self/environ', 'rb').read())")
        assert refused(box, "open('/proc/1/environ', 'rb').read()") == "PermissionError"
        assert SECRET not in said
        assert not any(name in said for name in ("TOKEN", "API_KEY", "SSH_"))

    def test_host_files_are_not_there(self, box: Box, tmp_path: Path) -> None:
        (tmp_path / "trace.db").write_text(SECRET)
        here = Path(__file__).resolve()
        paths = [
            str(tmp_path / "trace.db"),
            str(here),
            "/etc/shadow",
            "/etc/passwd",
            "/root/.bashrc",
            str(Path.home() / ".bashrc"),
            "/var",
            "/home",
        ]
        said = shows(box, f"import os; print([p for p in {paths!r} if os.path.exists(p)])")
        assert said == "[]\n"

    def test_no_file_anywhere_holds_the_secret_or_the_references(self, box: Box, tmp_path: Path) -> None:
        tmp_path.joinpath("reference.csv").write_text(SECRET)
        code = """
import os
found = []
for top in ('/', ):
    for folder, folders, names in os.walk(top):
        if folder.startswith(('/proc', '/usr', '/lib', '/dev')) or 'site-packages' in folder or '/lib/python' in folder:
            folders[:] = []
            continue
        found += [os.path.join(folder, n) for n in names if n.endswith(('.csv', '.db', '.jsonl')) or 'reference' in n or 'score' in n]
print(found)
"""
        assert shows(box, code) == "[]\n"

    def test_own_processes_only(self, box: Box) -> None:
        said = shows(box, "import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()), os.getppid())")
        assert said == "[1, 2] 1\n"

    def test_other_sessions_are_invisible(self, pool: SandboxPool, box: Box) -> None:
        with pool.session(files={"theirs.txt": SECRET}) as other:
            other.run_sync("x = 1")
            code = """
import os, sys
seen = []
for folder, folders, names in os.walk('/'):
    if folder.startswith(('/proc', '/usr', sys.prefix, sys.base_prefix)):  # read-only, and large
        folders[:] = []
        continue
    seen += [n for n in names if n == 'theirs.txt']
print(seen, os.listdir('/sandbox/sessions'), os.listdir('/sandbox/connections'), os.listdir('/sandbox/kernel'))
"""
            assert shows(box, code) == "[] [] [] []\n"
            assert other.run_sync("open('theirs.txt').read()").result == repr(SECRET)

    def test_proc_and_sys_tell_nothing_and_take_nothing(self, box: Box) -> None:
        code = """
import os
out = {}
for path in ('sys/kernel/core_pattern', 'sysrq-trigger', '1/mem', 'sys/user/max_user_namespaces', 'self/oom_score_adj'):
    path = '/proc/' + path
    try:
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, b'-1000' if 'adj' in path else b'0')
        out[path] = 'written'
    except OSError as error:
        out[path] = type(error).__name__
print(out)
masked = [p for p in ('/proc/kcore', '/proc/kallsyms', '/proc/keys', '/proc/timer_list') if os.path.exists(p)]
print(os.path.exists('/sys/kernel'), {open(p, 'rb').read() for p in masked})
try: print(os.listdir('/proc/1/cwd'))
except OSError as error: print(type(error).__name__)
try: print(os.listdir('/proc/1/root'))
except OSError as error: print(type(error).__name__)
"""
        lines = shows(box, code).splitlines()
        assert "written" not in lines[0]
        assert lines[1] == "False {b''}"
        assert lines[2:] == ["PermissionError", "PermissionError"]


class TestNetwork:
    def test_host_loopback_gateway_and_outside_are_out_of_reach(self, box: Box) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                reached.append(self.path)

        reached: list[str] = []
        server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            port = server.server_address[1]
            code = f"""
import socket
def attempt(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return 'connected'
    except OSError as error:
        return 'refused'
print([attempt(h, {port}) for h in ('127.0.0.1', 'localhost', '::1', '0.0.0.0')])
print([attempt(*a) for a in (('1.1.1.1', 53), ('169.254.169.254', 80))])
"""
            assert "connected" not in shows(box, code)
            assert reached == []
        finally:
            server.shutdown()
            server.server_close()

    def test_unix_sockets_of_others_are_out_of_reach(self, pool: SandboxPool, box: Box) -> None:
        folder = tempfile.mkdtemp()
        with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract, pool.session() as other:
            named.bind(f"{folder}/host.sock")
            named.listen()
            abstract.bind("\0mappa-test-abstract")
            abstract.listen()
            other.run_sync(
                "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0theirs'); s.listen(); "
                "t = socket.socket(); t.bind(('127.0.0.1', 5005)); t.listen()"
            )
            code = f"""
import socket
out = []
for address in ({folder + "/host.sock"!r}, '\\0mappa-test-abstract', '\\0theirs'):
    s = socket.socket(socket.AF_UNIX)
    try: s.connect(address); out.append('connected')
    except OSError as error: out.append('refused')
try: socket.create_connection(('127.0.0.1', 5005), timeout=1); out.append('connected')
except OSError: out.append('refused')
print(out)
"""
            assert shows(box, code) == "['refused', 'refused', 'refused', 'refused']\n"
        os.unlink(f"{folder}/host.sock")
        os.rmdir(folder)

    def test_rare_socket_families_are_refused(self, box: Box) -> None:
        code = """
import socket
out = []
stream, raw, packet = socket.SOCK_STREAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET
for family, kind in ((40, stream), (17, raw), (16, raw), (38, packet), (2, raw)):
    try: socket.socket(family, kind, 9 if family == 16 else 0 if family != 2 else 1).close(); out.append('open')
    except OSError: out.append('refused')
print(out)
"""
        assert shows(box, code) == "['refused', 'refused', 'refused', 'refused', 'refused']\n"


class TestPrivileges:
    def test_there_are_none_and_none_can_be_had(self, box: Box) -> None:
        code = """
import os
status = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)
print([status[k] for k in ('CapEff', 'CapPrm', 'CapBnd', 'CapInh', 'CapAmb')], status['NoNewPrivs'].strip(), status['Seccomp'].strip())
"""
        zero = "0" * 16
        assert shows(box, code) == f"{[zero] * 5} 1 2\n"
        code = """
tasks = [open(f'/proc/self/task/{t}/status').read() for t in os.listdir('/proc/self/task')]
print(len(tasks) > 3, all('CapEff:\\t0000000000000000' in t and 'NoNewPrivs:\\t1' in t and 'Seccomp:\\t2' in t for t in tasks))
"""
        assert shows(box, code) == "True True\n"  # threads that started early count too

    def test_namespaces_mounts_and_tracing_are_refused(self, box: Box) -> None:
        code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
out = {}
out['unshare'] = [libc.unshare(f) for f in (0x10000000, 0x20000, 0x40000000)]
out['setns'] = libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0) if os.access('/proc/1/ns/mnt', os.R_OK) else -1
out['clone'] = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
out['mount'] = libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)
out['umount'] = libc.umount2(b'/sandbox/sessions', 2)
out['chroot'] = libc.chroot(b'/tmp')
out['ptrace'] = libc.ptrace(16, 1, 0, 0)
out['bpf'] = libc.syscall(321, 0, 0, 0)
out['keyctl'] = libc.syscall(250, 0, -3, 0)
out['io_uring'] = libc.syscall(425, 4, 0)
out['userfaultfd'] = libc.syscall(323, 0)
print([k for k, v in out.items() if v not in (-1, [-1, -1, -1])])
for call in ('os.setuid(0)', 'os.setgid(0)', 'os.setgroups([0])', 'os.chroot("/")'):
    try: eval(call); print(call)
    except OSError: pass
"""
        assert shows(box, code) == "[]\n"

    def test_set_uid_programs_and_device_files_are_useless(self, box: Box) -> None:
        code = """
import os, stat
out = []
for kind, number in ((stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFCHR, os.makedev(1, 1))):
    try: os.mknod('dev', kind | 0o666, number); out.append('made')
    except OSError: out.append('refused')
print(out, [d for d in os.listdir('/dev') if d.startswith(('sd', 'vd', 'nvme', 'mem', 'kmem', 'kvm', 'fuse'))])
"""
        assert shows(box, code) == "['refused', 'refused'] []\n"

    def test_the_system_is_read_only(self, box: Box) -> None:
        code = """
import os, sys
out = []
own = [sys.prefix + '/x', sys.base_prefix + '/lib/x', os.__file__, '/sandbox/x', '/sandbox/code/inside/kernel.py']
for path in ['/x', '/usr/x', '/etc/x', '/dev/x', '/run/x', *own]:
    try: open(path, 'a').close(); out.append(path)
    except OSError: pass
print(out)
"""
        assert shows(box, code) == "[]\n"


class TestExhaustion:
    def test_fork_bomb(self, box: Box) -> None:
        ran = box.run_sync(
            "import os, time\ntry:\n  while True:\n    if os.fork() == 0:\n      time.sleep(60); os._exit(0)\n"
            "except OSError as e: print(type(e).__name__)"
        )
        assert ran.stdout == "BlockingIOError\n", ran

    def test_fork_bomb_whose_children_fork(self, box: Box) -> None:
        ran = box.run_sync("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", timeout_s=2)
        assert ran.status in ("timeout", "killed", "error"), ran

    def test_thread_bomb(self, box: Box) -> None:
        code = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
        assert refused(box, code) == "RuntimeError"

    def test_memory_bomb(self, box: Box) -> None:
        assert refused(box, "x = []\nwhile True: x.append(bytearray(1 << 20))") == "MemoryError"

    def test_memory_bomb_by_many_processes_does_not_take_the_host(self, pool: SandboxPool, box: Box) -> None:
        ran = box.run_sync(
            "import os, time\nfor _ in range(20):\n  if os.fork() == 0:\n    x = bytearray(200 << 20); time.sleep(30); os._exit(0)\n"
            "time.sleep(3)",
            timeout_s=10,
        )
        if "memory" in pool.describe()["control_groups"]:
            assert ran.status in ("ok", "killed"), ran
        assert ran.status != "lost"

    def test_file_larger_than_allowed_and_sparse_file(self, box: Box) -> None:
        assert refused(box, "open('big', 'wb').write(bytes(20 << 20))") == "OSError"
        assert refused(box, "open('sparse', 'wb').truncate(1 << 40)") == "OSError"

    def test_disk_fill(self, box: Box) -> None:
        code = "import time\nfor i in range(100):\n  open(f'f{i}', 'wb').write(bytes(4 << 20)); time.sleep(0.05)"
        ran = box.run_sync(code)
        assert (ran.status, "past 16 MiB" in ran.note) == ("killed", True), ran

    def test_disk_fill_by_files_that_were_deleted_and_are_still_open(self, box: Box) -> None:
        code = """
import os, time
held = []
for i in range(100):
    held.append(open('hidden', 'wb')); os.unlink('hidden'); held[-1].write(bytes(4 << 20)); held[-1].flush(); time.sleep(0.1)
"""
        ran = box.run_sync(code)
        assert (ran.status, "deleted but kept open" in ran.note) == ("killed", True), ran

    def test_disk_fill_between_cells(self, box: Box) -> None:
        code = """
import os, time
if os.fork() == 0:
    for i in range(100): open(f'late{i}', 'wb').write(bytes(4 << 20)); time.sleep(0.1)
    os._exit(0)
"""
        assert box.run_sync(code).status == "ok"
        for _ in range(100):
            if box.killed:
                break
            time.sleep(0.1)
        ran = box.run_sync("1 + 1")
        assert "past 16 MiB" in ran.note and "lost" in ran.note, ran
        assert sum(box.files_sync().values()) < 150 << 20

    def test_a_million_small_files(self, box: Box) -> None:
        ran = box.run_sync("for i in range(1_000_000): open(f's{i}', 'w').close()")
        assert (ran.status, "past 300 files" in ran.note) == ("killed", True), ran
        assert len(ran.files) <= 1000
        assert "over its limits" in box.run_sync("1").note

    def test_files_hidden_in_endless_folders(self, box: Box) -> None:
        code = """
import os, time
for i in range(3000):
    os.mkdir('d'); os.chdir('d')
    if i > 100 and i % 20 == 0: open('big', 'wb').write(bytes(4 << 20)); time.sleep(0.02)
"""
        ran = box.run_sync(code)
        assert (ran.status, "nested deeper" in ran.note) == ("killed", True), ran

    def test_tmp_and_shm_are_bounded(self, box: Box) -> None:
        for folder in ("/tmp", "/dev/shm"):
            ran = box.run_sync(f"for i in range(100): open(f'{folder}/{{i}}', 'wb').write(bytes(4 << 20))")
            assert ran.error is not None and "No space left" in ran.error.message, ran

    def test_open_files_are_bounded(self, box: Box) -> None:
        assert refused(box, "x = []\nwhile True: x.append(open('/dev/null'))") == "OSError"

    def test_cpu_time_is_bounded(self, pool: SandboxPool) -> None:
        with pool.session() as box:
            limit = box.run_sync("import resource; resource.getrlimit(resource.RLIMIT_CPU)[1]").result
            assert limit == "20"
            assert box.run_sync("resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))").status == "error"

    @pytest.mark.parametrize("what", ["print('x' * 1000)", "sys.stdout.write('x' * 1000)", "os.write(1, b'\\xff\\x00' * 500)"])
    def test_endless_output(self, box: Box, what: str) -> None:
        ran = box.run_sync(f"import os, sys\nwhile True: {what}")
        assert ran.status in ("error", "killed", "timeout"), ran
        assert len(ran.stdout) < 5000
        assert "MiB of output" in ran.note or ran.status in ("timeout", "killed")

    def test_binary_and_escape_output_is_text_in_the_record(self, box: Box) -> None:
        ran = box.run_sync(
            "import sys\nprint('\\x1b[2J\\x1b]0;owned\\x07hi\\x00\\udc80')\nclass R:\n  def __repr__(self): return '\\x1b[31mr'\nR()"
        )
        assert "\x1b" not in ran.stdout + (ran.result or "")
        assert ran.result == "r"
        ran.stdout.encode()


class TestEscapesThroughFiles:
    def test_links_out_of_the_workspace_lead_nowhere(self, box: Box, tmp_path: Path) -> None:
        target = tmp_path / "host.txt"
        target.write_text(SECRET)
        ran = box.run_sync(f"import os\nos.symlink({str(target)!r}, 'link'); os.symlink('/', 'root'); open('real', 'w').write('1')")
        assert [f.path for f in ran.files] == ["real"]
        for name in ("link", "root/etc/ld.so.cache"):
            with pytest.raises(Exception, match="workspace"):
                box.get_sync(name)
        box.put_sync("link", b"replaced")
        assert target.read_text() == SECRET

    def test_hard_links_to_what_lies_outside_are_refused(self, box: Box) -> None:
        code = """
import os, sys
out = []
for source in (os.__file__, '/usr/bin/env', '/proc/self/mem', '/sandbox/code/inside/kernel.py'):
    try: os.link(source, 'hard'); out.append(source)
    except OSError: pass
print(out)
"""
        assert shows(box, code) == "[]\n"

    def test_pipes_and_sockets_in_the_workspace_do_not_block_the_host(self, box: Box) -> None:
        ran = box.run_sync(
            "import os, socket\nos.mkfifo('pipe'); s = socket.socket(socket.AF_UNIX); s.bind('sock'); os.makedirs('d/' * 30 + 'x')"
        )
        assert ran.status == "ok", ran
        assert box.files_sync() == {}

    def test_a_pickle_with_a_payload_runs_only_inside(self, box: Box, tmp_path: Path) -> None:
        mark = Path(tempfile.gettempdir()) / f"payload-{os.getpid()}"
        code = f"""
import pickle
class Payload:
    def __reduce__(self):
        return (exec, ("open({str(mark)!r}, 'w').write('ran'); open('planted', 'w').write('x')",))
pickle.dump(Payload(), open('model.pkl', 'wb'))
"""
        assert box.run_sync(code).status == "ok"
        seen = box.preview_sync("model.pkl")
        assert seen.error or seen.type
        assert not mark.exists()
        assert "planted" not in box.files_sync()  # the look sees the workspace read-only
        box.run_sync("import pickle; pickle.load(open('model.pkl', 'rb'))")
        assert not mark.exists()

    def test_a_pickle_can_not_end_or_stall_the_host(self, box: Box) -> None:
        code = """
import pickle
class Exit:
    def __reduce__(self): return (exec, ("import os; os._exit(1)",))
class Stall:
    def __reduce__(self): return (exec, ("while True: pass",))
pickle.dump(Exit(), open('exit.pkl', 'wb')); pickle.dump(Stall(), open('stall.pkl', 'wb'))
x = 5
"""
        box.run_sync(code)
        assert "ended the kernel" in box.preview_sync("exit.pkl").error
        assert "took more than" in box.preview_sync("stall.pkl", timeout_s=1).error
        assert box.run_sync("x").result == "5"


async def test_a_hidden_folder_is_empty_inside_and_the_package_around_it_still_imports():
    import sklearn

    data = Path(sklearn.__file__).parent / "datasets" / "data"
    assert any(data.iterdir())
    async with SandboxPool(size=0, preload=(), hide=[data, "/nowhere/at/all"]) as pool, pool.session() as box:
        done = await box.run(
            "import os, sklearn.datasets\n"
            f"print(os.listdir({str(data)!r}))\n"
            "try:\n    sklearn.datasets.load_iris()\nexcept FileNotFoundError:\n    print('no iris')\n"
            f"try:\n    open({str(data / 'x')!r}, 'w')\nexcept OSError:\n    print('not writable')\n"
        )
    assert done.error is None and done.stdout.splitlines() == ["[]", "no iris", "not writable"], done
