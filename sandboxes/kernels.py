"""A running kernel with all that belongs to it, so that ending it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq.asyncio

from mappa_graph.errors import SandboxError

from .cgroups import ControlGroups, Group
from .forkserver import PORTS, ForkServer, Process
from .inside import wall
from .wire import Channels
from .workspace import Workspace, remove_tree


@dataclass(eq=False)
class Kernel:
    """A kernel that answers: its process, channels, workspace, control group and server."""

    process: Process
    channels: Channels
    workspace: Workspace
    group: Group
    own_server: bool = False

    async def end(self) -> None:
        """Kill everything that runs in the session. The workspace stays."""
        await _end(self.process.server, self.process, self.own_server, self.group, self.process.server.connections / self.process.id)
        self.channels.close()  # last: a cell that waits on them is to see the end of the process first


async def launch(
    server: ForkServer,
    workspace: Workspace,
    context: zmq.asyncio.Context,
    groups: ControlGroups,
    label: str,
    *,
    read_only: bool = False,
) -> Kernel:
    """Start a kernel in `workspace` and wait until it answers.

    A server whose wall is "process" is a pattern: a server of its own is started for the kernel. Raises `SandboxError`; leaves nothing
    behind when it fails or is cancelled.
    """
    identifier, key = secrets.token_hex(6), secrets.token_hex(32)
    folder = server.connections / identifier
    own_server = server.isolation.wall == "process"
    if own_server:
        server = server.copy()
    process: Process | None = None
    channels: Channels | None = None
    group = Group()
    try:
        Workspace(folder, workspace.uid).create()
        group = await asyncio.to_thread(groups.make, f"{label}-{identifier}", server.limits)
        async with asyncio.timeout(server.limits.start_s):
            if own_server:
                await server.start([(str(workspace.path), wall.WORK, not read_only), (str(folder), wall.KERNEL, True)])
            process = _fork(server, identifier, workspace, key, read_only, group)
            await asyncio.shield(process.ready)
            channels = Channels.open(context, str(folder / "k"), key.encode(), PORTS)
            await _handshake(channels, process)
        _unlink(folder)
        return Kernel(process, channels, workspace, group, own_server)
    except BaseException as error:
        if channels is not None:
            channels.close()
        await asyncio.shield(_end(server, process, own_server, group, folder))
        if isinstance(error, TimeoutError):
            raise SandboxError(f"a kernel did not start within {server.limits.start_s:g} s", hint="raise Limits.start_s") from error
        raise


def _fork(server: ForkServer, identifier: str, workspace: Workspace, key: str, read_only: bool, group: Group) -> Process:
    with group.joined() as descriptors:
        return server.fork(identifier, workspace=workspace.path, key=key, uid=workspace.uid, read_only=read_only, groups=descriptors)


async def _handshake(channels: Channels, process: Process) -> None:
    answered: asyncio.Future[None] = asyncio.ensure_future(channels.handshake())
    try:
        waited: set[asyncio.Future[Any]] = {answered, process.exited}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        answered.cancel()
    if process.exited.done():
        raise SandboxError(f"a kernel ended before it was ready, with code {process.exited.result()}")


def _unlink(folder: Path) -> None:
    """The channels are connected: their names are needed no more, and can't be made to lead elsewhere."""
    for path in folder.iterdir():
        if path.is_socket():
            path.unlink(missing_ok=True)


async def _end(server: ForkServer, process: Process | None, own_server: bool, group: Group, folder: Path) -> None:
    if process is not None:
        with contextlib.suppress(SandboxError):  # its fork server is gone, and so is the kernel
            await process.kill()
    if own_server:
        await server.stop()

    def clear() -> None:
        group.remove()
        remove_tree(folder)

    await asyncio.to_thread(clear)
