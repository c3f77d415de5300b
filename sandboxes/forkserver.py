"""The host's side of the fork server: starts it, asks it for kernels, hears of their end, and starts it anew when it dies.

Belongs to one event loop, whose thread must live as long as the server: bubblewrap is told to die with the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mappa_graph.errors import SandboxError

from .inside import wall
from .isolation import Isolation, code_command, environment, kept_below_tmp, outer_command
from .limits import Limits

log = logging.getLogger(__name__)
PORTS = {"shell_port": 1, "iopub_port": 2, "stdin_port": 3, "hb_port": 4, "control_port": 5}


@dataclass(eq=False)
class Process:
    """A kernel process as the host knows it."""

    id: str
    server: ForkServer
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    exited: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The exit code; a negative one is a signal's number."""
    lost: bool = False
    """Whether it ended because its fork server did."""

    def signal(self, number: int) -> None:
        if not self.exited.done():
            self.server.send({"op": "signal", "id": self.id, "signal": int(number)})

    async def kill(self) -> None:
        """SIGKILL to all of the session's processes; returns when they are gone."""
        if not self.exited.done():
            self.server.send({"op": "kill", "id": self.id})
            await asyncio.wait([self.exited], timeout=10)


class ForkServer:
    """One fork server inside one bubblewrap (or bare, for `none`)."""

    def __init__(
        self,
        isolation: Isolation,
        limits: Limits,
        preload: Sequence[str],
        sessions: Path,
        connections: Path,
        hide: Sequence[Path] = (),
    ) -> None:
        self.isolation, self.limits, self.preload, self.hide = isolation, limits, tuple(preload), tuple(hide)
        self.sessions, self.connections = sessions, connections
        self.processes: dict[str, Process] = {}
        self.info: dict[str, Any] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stderr: IO[bytes] | None = None
        self._buffer = b""
        self._up: asyncio.Future[None] | None = None
        self._keep = kept_below_tmp()

    def copy(self) -> ForkServer:
        """A server of the same make, not started."""
        return ForkServer(self.isolation, self.limits, self.preload, self.sessions, self.connections, self.hide)

    @property
    def alive(self) -> bool:
        return self._socket is not None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self, binds: Sequence[tuple[str, str, bool]] | None = None) -> None:
        """Start the server and wait until it has imported everything. Raises `SandboxError`."""
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        none = self.isolation.wall == "none"
        if binds is None:
            binds = [(str(self.sessions), wall.SESSIONS, True), (str(self.connections), wall.CONNECTIONS, True)]
        limits: dict[str, Any] = {"CORE": 0}
        command = [] if none else outer_command(self.isolation, self.limits, binds, self.hide)
        command += code_command(theirs.fileno(), self.preload, limits, str(Path(wall.__file__).parent.parent) if none else "/sandbox/code")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        variables = (
            {**os.environ, **environment(self.limits), "HOME": os.environ.get("HOME", "/")}
            if none
            else {"PATH": os.environ.get("PATH", "")}
        )
        try:
            self._child = subprocess.Popen(  # noqa: ASYNC220
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env=variables,
                cwd="/",
            )
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        self._socket, self._buffer, self._up = ours, b"", loop.create_future()
        loop.add_reader(ours.fileno(), self._readable)
        try:
            async with asyncio.timeout(max(60.0, self.limits.start_s)):
                await self._up
        except (TimeoutError, SandboxError) as error:
            said = self._said()
            await self.stop()
            raise SandboxError(f"the sandbox's fork server did not start: {error or 'timeout'}\n{said}".rstrip()) from error
        for name, problem in self.info.get("failed", {}).items():
            log.warning("sandbox preload %r failed and is left out: %s", name, problem)
        if self.info.get("threads", 1) > 1:
            log.info("a preloaded module started threads in the fork server; they don't exist in its forks")

    def fork(
        self, identifier: str, *, workspace: Path, key: str, uid: int = 0, read_only: bool = False, groups: Sequence[int] = ()
    ) -> Process:
        """Ask for a kernel that works in `workspace`, a folder of `sessions`, on sockets in folder `identifier` of `connections`."""
        walls = self.isolation.wall
        connection = self.connections / identifier
        spec: dict[str, Any] = {
            "op": "fork",
            "id": identifier,
            "workspace": workspace.name,
            "work": str(workspace) if walls == "none" else wall.WORK,
            "wall": walls,
            "uid": uid,
            "limits": self._rlimits(),
            "workspace_bytes": self.limits.workspace_mb * 1024 * 1024,
            "tmp_bytes": self.limits.tmp_mb * 1024 * 1024,
            "read_only": read_only,
            "keep": self._keep,
            "fds": len(groups),
            "connection": {"ip": f"{connection if walls == 'none' else wall.KERNEL}/k", "key": key, **PORTS},
        }
        if walls == "none":
            spec["connection"]["scratch"] = str(connection)  # goes with the kernel; behind a wall its own /tmp does
        process = self.processes[identifier] = Process(identifier, self)
        self.send(spec, groups)
        return process

    def _rlimits(self) -> dict[str, int]:
        limits = self.limits.rlimits()
        if self.isolation.wall != "full":
            limits.pop("NPROC")  # would count every process of this user
        return limits

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        if self._socket is None:
            raise SandboxError("the sandbox's fork server has ended")
        data = json.dumps(message).encode() + b"\n"
        try:
            self._socket.setblocking(True)
            self._socket.settimeout(5)
            if descriptors:
                sent = socket.send_fds(self._socket, [data], list(descriptors))
                data = data[sent:]
            self._socket.sendall(data)
            self._socket.setblocking(False)
        except OSError as error:
            self._lost()
            raise SandboxError("the sandbox's fork server has ended") from error

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))

    def _heard(self, message: dict[str, Any]) -> None:
        process = self.processes.get(message.get("id", ""))
        match message["event"]:
            case "up":
                self.info = message
                if self._up is not None and not self._up.done():
                    self._up.set_result(None)
            case "ready" if process is not None and not process.ready.done():
                process.ready.set_result(None)
            case "failed" if process is not None and not process.ready.done():
                process.ready.set_exception(SandboxError(f"a kernel did not start: {message['error']}"))
            case "exit" if process is not None:
                code = message["code"]
                self._ended(process, code - 256 if code > 192 else code)

    def _ended(self, process: Process, code: int) -> None:
        self.processes.pop(process.id, None)
        if not process.ready.done():
            process.ready.set_exception(SandboxError(f"a kernel ended before it was ready, with code {code}"))
        process.ready.exception()  # looked at: a kernel nobody waits for may fail
        if not process.exited.done():
            process.exited.set_result(code)

    def _lost(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._up is not None and not self._up.done():
            self._up.set_exception(SandboxError("it ended"))
        for process in list(self.processes.values()):
            process.lost = True
            self._ended(process, -signal.SIGKILL)

    def _said(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        return self._stderr.read()[-2000:].decode(errors="replace")

    async def stop(self) -> None:
        """End the server and with it every kernel; returns when its processes are gone."""
        child, self._child = self._child, None
        self._lost()
        if child is not None:
            # With its socket closed the server ends its kernels and itself; whatever is left goes with bubblewrap.
            for _ in range(100):
                if child.poll() is not None:
                    break
                await asyncio.sleep(0.01)
            else:
                child.kill()
            await asyncio.to_thread(child.wait)
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None
