"""Hostile cells that turn on their own kernel, its messages and its time limit, and what they leave behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mappa_graph.record import Execution
from mappa_graph.sandboxes import Box, SandboxPool, describe_isolation
from tests.fakes.hostile import box, pool

__all__ = ["box", "pool"]

if not describe_isolation()["usable"]:
    pytest.skip("no bubblewrap here", allow_module_level=True)


class TestKernelTricks:
    def test_suicide(self, box: Box) -> None:
        for code in (
            "import os; os._exit(0)",
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "import ctypes; ctypes.string_at(0)",
        ):
            ran = box.run_sync(code)
            assert ran.status == "killed", ran
            assert "lost" in ran.note

    def test_killing_its_parent_and_everything_it_sees(self, box: Box) -> None:
        ran = box.run_sync(
            "import os, signal\nfor pid in (os.getppid(), 1):\n  try: os.kill(pid, signal.SIGKILL)\n"
            "  except OSError as e: print(e.errno)\nos.getpid()"
        )
        assert ran.status in ("ok", "killed"), ran
        ran = box.run_sync("import os, signal\nos.kill(-1, signal.SIGKILL)")
        assert ran.status in ("error", "killed"), ran
        assert box.run_sync("1 + 1").result == "2"

    def test_exit_calls(self, box: Box) -> None:
        box.run_sync("x = 2")
        for code in ("exit()", "quit()", "raise SystemExit(3)", "import sys; sys.exit()"):
            ran = box.run_sync(f"{code}\nx = 3")
            assert ran.error is not None and ran.error.type == "SystemExit", ran
            assert box.run_sync("x").result == "2"

    def test_replacing_stdout_builtins_and_the_shell(self, box: Box) -> None:
        for code in (
            "import sys; sys.stdout = sys.stderr = None",
            "import builtins\nfor n in list(vars(builtins)):\n  if n not in ('setattr', 'None'): setattr(builtins, n, None)",
            "get_ipython().run_cell = lambda *a, **k: None; get_ipython().run_cell_async = None",
            "import json, zmq; json.dumps = None; zmq.Socket.send_multipart = lambda *a, **k: None",
            "import threading; threading.Thread.start = None",
        ):
            ran = box.run_sync(code, timeout_s=1)
            assert ran.status in ("ok", "error", "timeout", "killed"), ran
            box.run_sync("1", timeout_s=1)
            box.restart_sync()
            assert box.run_sync("1 + 1").result == "2"

    def test_forged_replies_change_nothing_outside_their_own_session(self, pool: SandboxPool, box: Box) -> None:
        code = """
import os, time
kernel = get_ipython().kernel
parent = kernel.get_parent('shell')
for i in range(50):
    forged = {'data': {'text/plain': 'forged'}, 'metadata': {}, 'execution_count': 1}
    kernel.session.send(kernel.iopub_socket, 'execute_result', forged, parent=parent)
    kernel.session.send(kernel.iopub_socket, 'stream', {'name': 'stdout', 'text': 5}, parent=parent)
    kernel.session.send(kernel.iopub_socket, 'stream', {'name': 'stdout', 'text': 'other'}, parent={'header': {'msg_id': 'x'}})
    kernel.iopub_socket.send_multipart([b'junk', os.urandom(20)])
    kernel.iopub_socket.send_multipart([b'<IDS|MSG>', b'', b'{', b'', b'', b''])
kernel.session.send(kernel.iopub_socket, 'status', {'execution_state': 'idle'}, parent=parent)
time.sleep(0.3)
"""
        with pool.session() as other:
            other.run_sync("x = 7")
            ran = box.run_sync(code)
            assert ran.status in ("ok", "error"), ran
            assert "other" not in ran.stdout
            assert other.run_sync("x").result == "7"
        assert box.run_sync("2 + 2").result == "4"

    def test_a_forged_reply_ends_no_cell_but_its_own(self, pool: SandboxPool, box: Box) -> None:
        code = """
import time, zmq
kernel = get_ipython().kernel
parent = kernel.get_parent('shell')
forged = {'status': 'ok', 'execution_count': 99, 'payload': [], 'user_expressions': {}}
for ident in (kernel._get_shell_context_var(kernel._shell_parent_ident), b'', b'someone'):
    for request in (parent, {'header': {'msg_id': 'another'}}, {}):
        message = kernel.session.serialize(kernel.session.msg('execute_reply', forged, parent=request))
        socket = getattr(kernel.shell_stream, 'socket', kernel.shell_stream)
        for frames in (message, [b'', *message], message[:3]):
            try: zmq.Socket.shadow(socket.underlying).send_multipart([*(ident if isinstance(ident, list) else [ident]), *frames])
            except Exception as error: print(type(error).__name__)
print('sent')
time.sleep(0.3)
1 / 0
"""
        with pool.session() as other:
            other.run_sync("x = 7")
            ran = box.run_sync(code)
            assert "sent" in ran.stdout and ran.status in ("ok", "error"), ran
            assert other.run_sync("x").result == "7"
        assert box.run_sync("2 + 2").result == "4"

    def test_a_message_too_large_is_not_taken_in(self, box: Box) -> None:
        ran = box.run_sync("print('x' * (200 << 20))", timeout_s=5)
        assert ran.status in ("error", "timeout", "killed"), ran
        assert len(ran.stdout) < 5000
        box.restart_sync()
        assert box.run_sync("1").result == "1"

    def test_a_result_whose_repr_is_hostile(self, box: Box) -> None:
        ran = box.run_sync("class R:\n  def __repr__(self): raise SystemExit\n  _repr_html_ = 5\nR()")
        assert ran.status in ("ok", "error", "killed"), ran
        ran = box.run_sync("class H:\n  def __repr__(self): return 'x' * 10_000_000\nH()")
        assert len(ran.result or "") < 5000

    @pytest.mark.parametrize(
        "code",
        [
            "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: pass",
            "sum(range(10 ** 13))",
            "import numpy as np\na = np.ones((2500, 2500))\nwhile True: a @ a",
            "'x' * 10 ** 9 in ('y' * 5,) or __import__('re').match('(a+)+$', 'a' * 40 + 'b')",
            "import os\npid = os.fork()\nwhile True: pass",
        ],
    )
    def test_time_out_evasion(self, box: Box, code: str) -> None:
        started = time.monotonic()
        ran = box.run_sync(code, timeout_s=1)
        assert ran.status in ("timeout", "killed", "error"), ran
        assert time.monotonic() - started < 60  # and not for ever
        assert box.run_sync("1 + 1", timeout_s=30).result == "2"


class TestLeftovers:
    def test_processes_and_threads_end_with_the_session(self, pool: SandboxPool) -> None:
        before = alive()
        with pool.session() as box:
            code = """
import os, subprocess, threading, time, sys
subprocess.Popen(['sleep', '7777'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    time.sleep(7777)
threading.Thread(target=lambda: time.sleep(7777), daemon=False).start()
"""
            box.run_sync(code, timeout_s=5)
            assert any("7777" in line for line in alive() - before)
        for _ in range(100):
            if not any("7777" in line for line in alive() - before):
                break
            time.sleep(0.05)
        assert not any("7777" in line for line in alive() - before)

    def test_output_of_an_old_thread_is_not_put_on_a_later_cell(self, box: Box) -> None:
        box.run_sync("import threading, time\ndef late():\n  time.sleep(0.3); print('late')\nthreading.Thread(target=late).start()")
        ran: Execution = box.run_sync("time.sleep(0.8); print('mine')")
        assert "mine" in ran.stdout

    def test_a_forged_score_or_reference_stays_in_its_session(self, pool: SandboxPool, box: Box) -> None:
        ran = box.run_sync("for n in ('score.json', 'reference.csv', 'trace.db'): open(n, 'w').write('{\"score\": 10}')")
        assert ran.status == "ok", ran
        with pool.session() as after:
            assert after.files_sync() == {}
        assert sorted(box.files_sync()) == ["reference.csv", "score.json", "trace.db"]


def alive() -> set[str]:
    lines = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.add(f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}")
            except OSError:
                continue
    return lines
