"""A kernel provisioner for other Jupyter tools: any kernel manager that uses it gets its `ipykernel` behind the wall.

Name it in a kernel spec (`"metadata": {"kernel_provisioner": {"provisioner_name": "mappa-bubblewrap"}}`) or as
`KernelProvisionerFactory.default_provisioner_name`. The kernel's channels are ipc sockets, whatever transport the manager was set to,
because there is no network behind the wall; client and kernel must be on one machine. Command and environment of the kernel spec are not
used: what runs is this interpreter's `ipykernel`. The pool doesn't go through here; both use the same fork server and the same wall.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from jupyter_client.provisioning import KernelProvisionerBase
from traitlets import Bool, Dict, List, Unicode

from mappa_graph.errors import SandboxError

from . import cgroups
from .cgroups import Group
from .forkserver import PORTS, ForkServer, Process
from .isolation import choose
from .limits import Limits
from .loop import LoopThread
from .root import Root
from .workspace import Workspace, remove_tree


class BubblewrapProvisioner(KernelProvisionerBase):
    """Starts one kernel behind a wall; a restart reuses the fork server and the workspace, and takes about a tenth of a second."""

    isolation = Unicode("bubblewrap", help='"bubblewrap", or "none" to run without any').tag(config=True)
    preload = List(Unicode(), help="modules to import before the kernel starts").tag(config=True)
    limits = Dict(help="fields of mappa_graph.sandboxes.Limits").tag(config=True)
    keep_workspace = Bool(False, help="leave the workspace in place when the kernel is shut down").tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._thread = LoopThread("sandbox provisioner", "the kernel was not started")
        self._root: Root | None = None
        self._server: ForkServer | None = None
        self._process: Process | None = None
        self._group = Group()
        self._workspace: Workspace | None = None
        self._count = 0

    @property
    def workspace(self) -> str:
        """The kernel's working folder on the host, "" before it is started."""
        return "" if self._workspace is None else str(self._workspace.path)

    @property
    def has_process(self) -> bool:
        return self._process is not None

    async def poll(self) -> int | None:
        if self._process is None:
            return 0
        return self._process.exited.result() if self._process.exited.done() else None

    async def wait(self) -> int | None:
        process = self._process
        if process is None:
            return 0
        self._process = None
        return await self._thread.call(_wait(process))

    async def send_signal(self, signum: int) -> None:
        process = self._process
        if process is not None and self._thread.running:
            await self._thread.call(_signal(process, signum))

    async def kill(self, restart: bool = False) -> None:
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        await self.send_signal(signal.SIGKILL)  # a kernel in the sandbox has nothing to save

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Point the manager at ipc sockets in a folder of this kernel's own."""
        if self._root is None:
            self._thread.start()
            self._root = await asyncio.to_thread(Root)
        self._count += 1
        manager = self.parent
        if manager is not None:
            manager.transport = "ipc"
            manager.ip = str(self._root.connections / f"p{self._count}" / "k")
            for name, port in PORTS.items():
                setattr(manager, name, port)
        kwargs.pop("extra_arguments", None)
        return await super().pre_launch(cmd=["ipykernel"], **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> dict[str, Any]:
        manager = self.parent
        if manager is None:
            raise SandboxError("the provisioner has no kernel manager", hint="use it through jupyter_client's KernelManager")
        key = manager.session.key
        await self._thread.call(self._launch(key.decode()))
        self.connection_info = {"transport": "ipc", "ip": manager.ip, "key": key, "signature_scheme": "hmac-sha256", **PORTS}
        return self.connection_info

    async def _launch(self, key: str) -> None:
        assert self._root is not None
        isolation = choose(self.isolation)
        if isolation.wall == "process":
            raise SandboxError(
                f"the provisioner needs namespaces inside namespaces: {isolation.reason}", hint="use SandboxPool, which does without"
            )
        uid = isolation.first_uid + 1 if isolation.first_uid else 0
        limits = Limits(**self.limits)
        if self._server is None:
            self._server = ForkServer(isolation, limits, self.preload, self._root.sessions, self._root.connections)
            self._workspace = Workspace(self._root.sessions / "work", uid, limits.workspace_files)
            self._workspace.create()
        if not self._server.alive:
            await self._server.stop()
            await self._server.start()
        assert self._workspace is not None
        identifier = f"p{self._count}"
        Workspace(self._root.connections / identifier, uid).create()
        self._group.remove()
        groups = await asyncio.to_thread(cgroups.probe) if isolation.wall != "none" else cgroups.ControlGroups()
        self._group = groups.make(f"{id(self)}-{identifier}", limits)
        with self._group.joined() as descriptors:
            process = self._server.fork(identifier, workspace=self._workspace.path, key=key, uid=uid, groups=descriptors)
        async with asyncio.timeout(limits.start_s):
            await process.ready
        self._process = process

    async def cleanup(self, restart: bool = False) -> None:
        if restart or self._root is None:
            return
        root, self._root = self._root, None
        await asyncio.to_thread(self._thread.stop, self._stop())
        await asyncio.to_thread(self._group.remove)
        if self.keep_workspace:
            remove_tree(root.connections)
        else:
            await asyncio.to_thread(root.remove)
            self._workspace = None

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None
        self._process = None


async def _signal(process: Process, number: int) -> None:
    process.signal(number)


async def _wait(process: Process) -> int:
    return await asyncio.shield(process.exited)
