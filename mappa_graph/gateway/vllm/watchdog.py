"""Runs a server and sees to it that all of it ends: `python watchdog.py GRACE_S COMMAND...`, on Linux.

A script of its own, which imports nothing but the standard library. It lives between us and the server: its standard input is a
pipe that we hold open, so that our death, of whatever kind, is an end of file here. The one thing to know: it is the
"subreaper" of all that the server starts, so that workers whose parent was killed become its children, and are ended with the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: Sequence[str]) -> int:
    """Exit status: the server's, or 0 where it was told to end."""
    grace_s, command = float(argv[0]), list(argv[1:])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)

    def die_with_the_watchdog() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_the_watchdog)
    status = None
    while status is None:
        ready, _, _ = select.select([0, woken], [], [])
        numbers = os.read(woken, 4096) if woken in ready else b""
        status = _reap(server.pid)
        if 0 in ready and not os.read(0, 4096):
            grace_s = 0.0  # nobody is there to wait for a graceful end
            break
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            break
    if status is None:
        if grace_s:
            os.kill(server.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while status is None and time.monotonic() < deadline:
                select.select([woken], [], [], 0.05)
                status = _reap(server.pid)
        status = 0
    _end_all()
    return status


def _reap(server: int) -> int | None:
    """Buries what has ended; the server's exit status if it is among it."""
    found = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == server:
            code = os.waitstatus_to_exitcode(raw)
            found = code if code >= 0 else 128 - code


def _end_all() -> None:
    """Kills every descendant, as often as new ones turn up."""
    for _ in range(200):
        below = _descendants(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _reap(0)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
