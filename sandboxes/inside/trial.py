"""Tries whether the wall can be built: run once per machine by the host before the first session. Prints "walled"."""

from __future__ import annotations

import os
import socket
import sys

from . import wall


def main(arguments: list[str]) -> None:
    """`arguments`: the wall's name, the session's user id, then paths below /tmp to keep."""
    kind, uid, *keep = arguments
    if kind == "full":
        pid = wall.fork_into_new_pids()
        if pid:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        wall.enter()
        for folder in (wall.SESSIONS, wall.CONNECTIONS):
            wall._mount("none", folder, "tmpfs", 0)
            os.mkdir(f"{folder}/trial", 0o777)
        wall.build("trial", "trial", read_only=False, tmp_bytes=1 << 20, keep=keep)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            wall.seal()
            os._exit(os.waitstatus_to_exitcode(status))
        wall.drop(int(uid), {"NPROC": 64, "CORE": 0})
    else:
        wall.restrict()
    socket.socketpair()
    for path in sys.path:
        if path.endswith("site-packages"):
            os.listdir(path)
    print("walled", flush=True)  # noqa: T201
    os._exit(0)
