"""The pool: warm kernels made ahead, one episode each, never used twice.

It has a thread with an event loop of its own, where all kernels live, so that sessions work from any loop (LangGraph runs nodes in the
caller's) and from plain synchronous code. A session takes a kernel at its first cell, not before: many episodes never run code.

    async with SandboxPool(size=2) as pool:
        async with pool.session(files={"train.csv": Path("train.csv")}) as box:
            execution = await box.run("import pandas as pd; pd.read_csv('train.csv').shape")
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq.asyncio

from mappa_graph.errors import ConfigError, SandboxError

from . import cgroups
from .forkserver import ForkServer
from .isolation import Isolation, choose
from .kernels import Kernel, launch
from .limits import Limits
from .loop import LoopThread
from .root import Root
from .session import Box
from .workspace import Workspace

log = logging.getLogger(__name__)
T = TypeVar("T")
_FLOOR_MB = 512
_PATROL_S = 2.0


class SandboxPool:
    """A pool of sandboxes; an async context manager, and a plain one.

    Args:
        size: kernels kept warm. 0 = every session waits about 0.1 s for its kernel.
        isolation: "bubblewrap" (default) or "none": agent code then runs with all the rights of this user. Where bubblewrap is not usable
            the former raises `SandboxError` with what to install.
        preload: modules imported once, before the fork, and so there at once in every kernel. One that is missing is logged and left out.
        limits: what each session may use.
        hide: folders of this machine that are empty inside, though they lie in what a sandbox sees (a package's data, answers to tasks).
        root: folder for the sessions' workspaces; default: the system's temporary folder. What is made there is removed at the end.
        max_kernels: kernels at once; a session that needs one more waits for its turn, at most `wait_s` seconds.
    """

    def __init__(
        self,
        size: int = 2,
        isolation: str = "bubblewrap",
        *,
        preload: Sequence[str] = ("numpy",),
        limits: Limits | None = None,
        hide: Sequence[str | Path] = (),
        root: str | Path | None = None,
        max_kernels: int = 64,
        wait_s: float = 600.0,
    ) -> None:
        if size < 0 or max_kernels < 1 or size > max_kernels:
            raise ConfigError(
                f"sandbox pool: size is {size}, max_kernels is {max_kernels}", hint="0 <= size <= max_kernels, max_kernels >= 1"
            )
        self.size, self.preload, self.limits = size, tuple(preload), limits or Limits()
        self.isolation: Isolation = choose(isolation)
        self.hide = tuple(Path(folder).resolve() for folder in hide)
        self.sessions = Path()
        self._root = None if root is None else Path(root)
        self._max_kernels, self._wait_s = max_kernels, wait_s
        self._thread = LoopThread("sandbox pool", "use it inside `async with SandboxPool(...) as pool:`")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._boxes: set[Box] = set()
        self._warm: deque[Kernel] = deque()
        self._serials = itertools.count(1)
        self._closing = False
        self._server: ForkServer | None = None
        self._patrol: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await self.call(self._open())
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.call_sync(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def session(self, files: Mapping[str, bytes | str | Path] | None = None) -> Box:
        """A session, to be entered with `async with` (or `with`).

        `files` are put into its workspace first: bytes, text, or a copy of a host's file.
        """
        return Box(self, files or {})

    @property
    def running(self) -> bool:
        """Whether the pool is open."""
        return self._thread.running

    @property
    def warm(self) -> int:
        """Kernels ready to be taken."""
        return len(self._warm)

    async def warmed(self) -> None:
        """Return once `size` kernels are warm (or as many as `max_kernels` leaves room for)."""
        await self.call(self._warmed())

    def describe(self) -> dict[str, Any]:
        """The wall in use, the controllers of its limits, and what is alive."""
        return {
            "wall": self.isolation.wall,
            "own_user_per_session": self.isolation.sessions_have_own_uid,
            "control_groups": self._groups.describe(),
            "warm": len(self._warm),
            "sessions": len(self._boxes),
        }

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the pool's loop, from any loop; cancelling the caller cancels it."""
        return await self._thread.call(work)

    def call_sync(self, work: Coroutine[Any, Any, T]) -> T:
        """`call` for synchronous code, from any thread but the pool's own."""
        return self._thread.call_sync(work)

    async def aclose(self) -> None:
        """End every session, every kernel, the fork server and the thread; remove all files. May be called twice."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.close))

    def close(self) -> None:
        """`aclose` for synchronous code."""
        self._thread.stop(self._close())

    async def _open(self) -> None:
        if self.isolation.wall == "none":
            log.warning("SANDBOX ISOLATION IS OFF: code written by agents runs with all the rights of this user (isolation='none')")
            if self.hide:
                log.warning("and it can read what was to be hidden from it: %s", ", ".join(map(str, self.hide)))
        elif self.isolation.reason:
            log.warning("the sandbox uses one bubblewrap per kernel, which starts slower: %s", self.isolation.reason)
        self._closing = False
        self._folders = await asyncio.to_thread(Root, self._root)
        self.sessions = self._folders.sessions
        self._groups = await asyncio.to_thread(cgroups.probe) if self.isolation.wall != "none" else cgroups.ControlGroups()
        self._context = zmq.asyncio.Context()
        self._slots = asyncio.Semaphore(self._max_kernels)
        self._starting = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._server_lock = asyncio.Lock()
        self._filled = asyncio.Event()
        self._refilling: asyncio.Task[None] | None = None
        self._server = ForkServer(self.isolation, self.limits, self.preload, self.sessions, self._folders.connections, self.hide)
        await self._ensure_server()
        self._refill()
        self._patrol = asyncio.get_running_loop().create_task(self._walk())

    async def _walk(self) -> None:
        while True:
            await asyncio.sleep(_PATROL_S)
            for box in list(self._boxes):
                try:
                    await box.patrol()
                except SandboxError as error:
                    log.warning("session %s could not be looked after: %s", box.id, error)

    async def _ensure_server(self) -> ForkServer:
        async with self._server_lock:
            if self._closing or self._server is None:
                raise SandboxError("the sandbox pool is closed")
            if self.isolation.wall != "process" and not self._server.alive:
                await self._server.stop()
                await self._server.start()
            return self._server

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task on the pool's loop that the pool waits for when it closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def register(self, box: Box) -> None:
        if self._closing:
            raise SandboxError("the sandbox pool is closed")
        self._boxes.add(box)

    def unregister(self, box: Box) -> None:
        self._boxes.discard(box)

    async def take_kernel(self) -> Kernel:
        """A kernel nobody has used, in an empty workspace of its own."""
        while self._warm:
            kernel = self._warm.popleft()
            self._refill()
            if kernel.process.exited.done():
                await self.discard(kernel)
                continue
            return kernel
        kernel = await self._whole(self._new_kernel(), self.discard)
        self._refill()
        return kernel

    async def start_kernel(self, workspace: Workspace) -> Kernel:
        """A fresh kernel in a workspace that exists."""
        return await self._whole(self._start(workspace), self.end_kernel)

    async def _whole(self, work: Coroutine[Any, Any, Kernel], undo: Callable[[Kernel], Coroutine[Any, Any, None]]) -> Kernel:
        """The start of a kernel is never cut short: if its caller is cancelled, it is finished and undone in the background."""
        task = self.spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.spawn(self._undo(task, undo))
            raise

    async def _undo(self, task: asyncio.Task[Kernel], undo: Callable[[Kernel], Coroutine[Any, Any, None]]) -> None:
        try:
            kernel = await task
        except SandboxError as error:
            log.info("a kernel whose session was cancelled did not start: %s", error)
            return
        await undo(kernel)

    async def _start(self, workspace: Workspace) -> Kernel:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise SandboxError(
                f"no kernel became free within {self._wait_s:g} s: {self._max_kernels} are in use",
                hint="raise max_kernels, or close sessions earlier",
            ) from None
        try:
            return await self._launch(workspace)
        except BaseException:
            self._slots.release()
            raise

    async def _launch(self, workspace: Workspace, *, read_only: bool = False) -> Kernel:
        await self._memory()
        async with self._starting:
            server = await self._ensure_server()
            return await launch(server, workspace, self._context, self._groups, str(os.getpid()), read_only=read_only)

    async def helper_kernel(self, workspace: Workspace) -> Kernel:
        """A kernel beside a session's own that may only read its workspace; takes no slot, and is ended with `end_helper`."""
        return await self._whole(self._launch(workspace, read_only=True), self.end_helper)

    async def end_helper(self, kernel: Kernel) -> None:
        await asyncio.shield(self.spawn(kernel.end()))

    async def end_kernel(self, kernel: Kernel) -> None:
        """End a kernel for good; its workspace stays."""
        try:
            await asyncio.shield(self.spawn(kernel.end()))
        finally:
            self._slots.release()

    def new_workspace(self) -> Workspace:
        """A workspace, not yet created, with a host user id that no other has, where sessions have their own."""
        serial = next(self._serials)
        uid = self.isolation.first_uid + serial % 10_000 if self.isolation.first_uid else 0
        return Workspace(self.sessions / f"w{serial}", uid, self.limits.workspace_files)

    async def _new_kernel(self) -> Kernel:
        workspace = self.new_workspace()
        await asyncio.to_thread(workspace.create)
        try:
            return await self._start(workspace)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(workspace.remove))
            raise

    async def discard(self, kernel: Kernel) -> None:
        """End a kernel that no session has used, and remove its workspace."""
        await self.end_kernel(kernel)
        await asyncio.to_thread(kernel.workspace.remove)

    async def _memory(self) -> None:
        """Wait for memory before a kernel starts. Raises `SandboxError` after `start_s`."""
        for _ in range(int(self.limits.start_s * 5)):
            free = _available_mb()
            if free is None or free > _FLOOR_MB:
                return
            await asyncio.sleep(0.2)
        raise SandboxError(
            f"less than {_FLOOR_MB} MiB of memory are free: no kernel is started", hint="lower max_kernels or Limits.memory_mb"
        )

    def _refill(self) -> None:
        if not self._closing and (self._refilling is None or self._refilling.done()):
            self._refilling = self.spawn(self._fill())

    async def _fill(self) -> None:
        failures = 0
        while len(self._warm) < self.size and not self._closing and not self._slots.locked():
            free = _available_mb()
            if free is not None and free < 2 * _FLOOR_MB:
                break
            try:
                kernel = await self._new_kernel()
            except SandboxError as error:
                failures += 1
                log.warning("a warm kernel could not be started: %s", error)
                if failures == 3:
                    break
                continue
            if self._closing:
                await self.discard(kernel)
                return
            self._warm.append(kernel)
        self._filled.set()

    async def _warmed(self) -> None:
        while len(self._warm) < self.size and not self._closing:
            self._refill()
            assert self._refilling is not None
            await asyncio.wait([self._refilling])
            if self._slots.locked() or len(self._warm) < self.size:
                return

    async def _close(self) -> None:
        self._closing = True
        if self._server is None:
            return
        if self._patrol is not None:
            self._patrol.cancel()
            await asyncio.wait([self._patrol])
            self._patrol = None
        for box in list(self._boxes):
            with contextlib.suppress(SandboxError):
                await box.end()
        while self._warm:
            await self.discard(self._warm.popleft())
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        while self._warm:
            await self.discard(self._warm.popleft())
        await self._server.stop()
        self._context.destroy(linger=0)
        await asyncio.to_thread(self._folders.remove)
        self._server = None
        await asyncio.get_running_loop().shutdown_default_executor()


def _available_mb() -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 1024
    except OSError:
        return None
    return None
