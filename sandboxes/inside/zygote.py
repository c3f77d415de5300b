"""The fork server: imports the kernel once, then makes a walled kernel out of a fork in a few hundredths of a second.

It has one thread, no event loop, no zmq context and no secrets, so that a fork of it is a clean start. The host talks to it over an
inherited socket in lines of JSON; control-group descriptors ride along as ancillary data. When the socket closes, everything ends.

Host to server: `{"op": "fork", "id", "connection", "workspace", "work", "wall", "uid", "limits", "tmp_bytes", "read_only", "keep",
"fds"}`, `{"op": "signal", "id", "signal"}` (to the kernel's process group), `{"op": "kill", "id"}`. Server to host: `{"event": "up", ...}`
once, then per kernel `ready` or `failed`, and always `exit`.

`wall` is "full" (namespaces of its own, made here), "process" (the server is alone in its bubblewrap with this one kernel: limits and
filter only) or "none" (resource limits only).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from . import kernel, wall

HIDDEN = 122
"""Exit code of a session that was ended for what it kept in deleted files."""


class Server:
    """Serves one host over the socket `fd` until it closes."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.buffer = b""
        self.descriptors: list[int] = []
        self.pids: dict[str, int] = {}  # session -> its init (or kernel, without a full wall)
        self.pipes: dict[int, tuple[str, bytes]] = {}  # read end -> session, unread bytes
        self.walls: dict[str, str] = {}

    def serve(self, preload: list[str], limits: dict[str, Any]) -> None:
        failed = kernel.prepare(preload)
        wall.limit(limits)
        with contextlib.suppress(OSError):
            wall.become_subreaper()
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()  # a collection in a fork would touch, and so copy, every page
        self.tell(event="up", failed=failed, threads=_threads(), seccomp=wall.seccomp.supported())
        while True:
            poll = select.poll()
            for fd in (self.socket.fileno(), wake, *self.pipes):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                elif fd == self.socket.fileno():
                    if not self.listen():
                        self.end()
                        return
                elif fd in self.pipes:
                    self.hear(fd)
            self.reap()

    def tell(self, **message: Any) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the host is gone
            self.end()
            os._exit(0)

    def listen(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 16)
        self.descriptors += descriptors
        if not data:
            return False
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            match message["op"]:
                case "fork":
                    count = message.get("fds", 0)
                    groups, self.descriptors = self.descriptors[:count], self.descriptors[count:]
                    self.fork(message, groups)
                    for fd in groups:
                        os.close(fd)
                case "signal":
                    self.signal(message["id"], message["signal"])
                case "kill":
                    self.signal(message["id"], signal.SIGKILL)
        return True

    def signal(self, session: str, number: int) -> None:
        pid = self.pids.get(session)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.walls[session] != "full":
                if number != signal.SIGUSR2:
                    os.killpg(pid, number)
            elif number == signal.SIGKILL:
                os.kill(pid, number)  # the end of pid 1 is the end of its namespace
            else:
                os.kill(pid, signal.SIGUSR1 if number == signal.SIGINT else number)  # SIGUSR2 has it look for hidden files

    def fork(self, spec: dict[str, Any], groups: list[int]) -> None:
        read, write = os.pipe()
        self.pipes[read] = (spec["id"], b"")
        self.walls[spec["id"]] = spec["wall"]
        try:
            pid = wall.fork_into_new_pids() if spec["wall"] == "full" else os.fork()
        except OSError as error:
            os.write(write, b"E" + json.dumps(str(error)).encode() + b"\n")
            os.close(write)
            return
        if pid == 0:
            _child(lambda: _start(spec, groups, write), write, {write, *groups})
        os.close(write)
        self.pids[spec["id"]] = pid

    def hear(self, fd: int) -> None:
        session, unread = self.pipes[fd]
        data = os.read(fd, 65536)
        *lines, unread = (unread + data).split(b"\n")
        self.pipes[fd] = (session, unread)
        for line in lines:
            kind, rest = line[:1], line[1:]
            if kind == b"R":
                self.tell(event="ready", id=session)
            elif kind == b"E":
                self.tell(event="failed", id=session, error=json.loads(rest))
        if not data:
            os.close(fd)
            del self.pipes[fd]
            if session not in self.pids:  # it could not be forked
                self.forget(session, -1)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            session = next((s for s, p in self.pids.items() if p == pid), None)
            if session is not None:
                self.forget(session, code)

    def forget(self, session: str, code: int) -> None:
        if self.walls.pop(session, None) is None:
            return
        self.pids.pop(session, None)
        self.tell(event="exit", id=session, code=code)

    def end(self) -> None:
        for session in list(self.pids):
            self.signal(session, signal.SIGKILL)


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _child(work: Callable[[], None], report: int, keep: set[int]) -> None:
    """Run `work` in a fresh fork and never return; what it raises is written to `report`."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else range(256)):
            if fd > 2 and fd not in keep:
                with contextlib.suppress(OSError):
                    os.close(fd)
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001
        with contextlib.suppress(OSError):
            os.write(report, b"E" + json.dumps(traceback.format_exc()[-4000:]).encode() + b"\n")
        os._exit(71)


def _start(spec: dict[str, Any], groups: list[int], report: int) -> None:
    if spec["wall"] != "full":
        os.setsid()
        with contextlib.suppress(OSError):
            wall.die_with_parent()
        wall.join(groups)
        wall.limit(spec["limits"])
        if spec["wall"] == "process":
            wall.restrict()
        _become_kernel(spec, lambda: _say(report, b"R"))
        return
    wall.join(groups)
    os.setsid()
    wall.enter()
    _init(spec, report)


def _init(spec: dict[str, Any], report: int) -> None:
    """Pid 1 of a session: builds its view, starts the kernel, passes signals on, reaps orphans, ends with the kernel."""
    wall.build(
        spec["workspace"], spec["id"], read_only=spec.get("read_only", False), tmp_bytes=spec["tmp_bytes"], keep=spec.get("keep", ())
    )
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.close(report)
        _child(lambda: _walled(spec, write), write, {write})
    os.close(write)
    signal.signal(signal.SIGUSR1, lambda *_: _interrupt(pid))
    signal.signal(signal.SIGUSR2, lambda *_: _audit(spec["workspace_bytes"]))
    with open(read, "rb") as pipe:
        line = pipe.readline()
    if line == b"R\n":
        wall.seal()
    os.write(report, line)
    os.close(report)
    while True:
        ended, status = os.wait()
        if ended == pid:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _interrupt(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGINT)


def _audit(most: int) -> None:
    if wall.hidden_bytes() > most:
        os._exit(HIDDEN)


def _walled(spec: dict[str, Any], report: int) -> None:
    os.setsid()
    wall.drop(spec["uid"], spec["limits"])
    _become_kernel(spec, lambda: _say(report, b"R"))


def _say(report: int, line: bytes) -> None:
    os.write(report, line + b"\n")
    os.close(report)


def _become_kernel(spec: dict[str, Any], ready: Callable[[], None]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.chdir(spec["work"])
    sys.argv[:] = ["kernel"]
    kernel.run(spec["connection"], ready)


def main() -> None:
    """`sys.argv[1]` is JSON: fd, preload, limits (of the server and all it starts)."""
    options = json.loads(sys.argv[1])
    Server(options["fd"]).serve(options["preload"], options["limits"])


if __name__ == "__main__":
    main()
