"""A session: one workspace and, from the first cell on, one kernel, for one episode.

State and files persist from cell to cell and from agent to agent; nothing persists beyond the session. All work happens on the pool's own
thread and event loop, so a session may be used from any loop and any thread; its cells run one after the other in the order they were
asked for.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mappa_graph.errors import SandboxError
from mappa_graph.record import Execution, ExecutionStatus, FileChange

from .limits import MB
from .preview import Preview, check_rows, look
from .recorder import Recorder
from .workspace import DEPTH, Snapshot

if TYPE_CHECKING:
    from .kernels import Kernel
    from .pool import SandboxPool

STATE_LOST = "All variables and imports are lost; files in the workspace are kept."
_WATCH_S = 0.25
HIDDEN = 122
"""Exit code with which the inside ends a session that hid files; see `inside/zygote.py`."""


class Box:
    """A sandbox session, made by `SandboxPool.session`. An async context manager (and a plain one, for synchronous code)."""

    def __init__(self, pool: SandboxPool, files: Mapping[str, bytes | str | Path]) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.limits = pool.limits
        self._pool = pool
        self._files = dict(files)
        self._workspace = pool.new_workspace()
        self._kernel: Kernel | None = None
        self._adopted = False
        self._lock: asyncio.Lock | None = None
        self._settling: asyncio.Task[None] | None = None
        self._state = "new"
        self._cells = 0
        self._untold = ""
        self._known: Snapshot | None = None  # after the last cell; what changes from then on is put down to the next one

    @property
    def killed(self) -> bool:
        """Whether the kernel was ended between two cells; the next cell's record says why."""
        return bool(self._untold) or (self._kernel is not None and self._kernel.process.exited.done())

    async def __aenter__(self) -> Self:
        try:
            await self._pool.call(self._open())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __enter__(self) -> Self:
        try:
            self._pool.call_sync(self._open())
        except BaseException:
            self.close_sync()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close_sync()

    async def run(self, code: str, timeout_s: float | None = None, *, name: str = "python", tool_call_id: str | None = None) -> Execution:
        """Run a cell.

        Args:
            code: IPython code.
            timeout_s: wall limit in seconds; default `limits.cell_s`. Past it the cell is interrupted, and killed if it doesn't stop.
            name: what the record calls the tool.
            tool_call_id: the tool call that asked for it, kept in the record.

        Returns an `Execution` whatever the code does: `ok`, `error` (it raised), `timeout` (interrupted; the state is kept), `killed` (the
        kernel had to be killed or died; the state is lost), `lost` (the sandbox itself failed). Raises `SandboxError` only where no kernel
        can be had.
        """
        return await self._pool.call(self._run(code, timeout_s, name, tool_call_id))

    def run_sync(self, code: str, timeout_s: float | None = None, *, name: str = "python", tool_call_id: str | None = None) -> Execution:
        """`run` for synchronous code."""
        return self._pool.call_sync(self._run(code, timeout_s, name, tool_call_id))

    async def put(self, name: str, data: bytes | str | Path) -> None:
        """Write a file into the workspace: bytes, text (UTF-8), or a copy of a file of the host. Raises `SandboxError`."""
        await self._pool.call(self._put(name, data))

    async def get(self, name: str, limit: int | None = None) -> bytes:
        """A file of the workspace. Raises `SandboxError` if there is none, it is a link, or it has more than `limit` bytes."""
        return await self._pool.call(self._in_thread(lambda: self._workspace.get(name, limit)))

    async def files(self) -> dict[str, int]:
        """Names and sizes in bytes of the regular files in the workspace."""
        snapshot: Snapshot = await self._pool.call(self._in_thread(self._workspace.snapshot))
        return {name: stamp.size for name, stamp in sorted(snapshot.files.items())}

    async def preview(self, name: str, rows: int = 5, timeout_s: float = 20.0) -> Preview:
        """What a table, array or pickle in the workspace holds, found out by a fresh kernel inside the sandbox."""
        return await self._pool.call(self._preview(name, check_rows(rows), timeout_s))

    async def restart(self) -> None:
        """End the kernel; files stay, and the next cell starts with a fresh one."""
        await self._pool.call(self._locked(self._drop_kernel))

    async def interrupt(self) -> None:
        """Interrupt the running cell, if any; its `run` returns with KeyboardInterrupt as its error."""
        await self._pool.call(self._interrupt())

    async def close(self) -> None:
        """End the session: kernel, processes and workspace are gone afterwards. Also done when a cancelled task leaves the context."""
        if self._pool.running:
            await asyncio.shield(asyncio.ensure_future(self._pool.call(self.end())))

    def put_sync(self, name: str, data: bytes | str | Path) -> None:
        """`put` for synchronous code; so are the others that end in `_sync`."""
        self._pool.call_sync(self.put(name, data))

    def get_sync(self, name: str, limit: int | None = None) -> bytes:
        return self._pool.call_sync(self.get(name, limit))

    def files_sync(self) -> dict[str, int]:
        return self._pool.call_sync(self.files())

    def preview_sync(self, name: str, rows: int = 5, timeout_s: float = 20.0) -> Preview:
        return self._pool.call_sync(self.preview(name, rows, timeout_s))

    def restart_sync(self) -> None:
        self._pool.call_sync(self.restart())

    def close_sync(self) -> None:
        if self._pool.running:
            self._pool.call_sync(self.end())

    async def end(self) -> None:
        """`close`, on the pool's loop; finishes even if its caller is cancelled."""
        await asyncio.shield(self._pool.spawn(self._close()))

    async def _open(self) -> None:
        if self._state != "new":
            raise SandboxError(f"session {self.id} is {self._state}", hint="a session is entered once: ask the pool for another")
        self._lock = asyncio.Lock()
        self._pool.register(self)
        self._state = "open"
        async with self._lock:
            if self._files:
                await _unbroken(self._fill)
            else:
                self._workspace.create()

    def _fill(self) -> None:
        self._workspace.create()
        for name, data in self._files.items():
            self._workspace.put(name, data)
        self._files.clear()

    def _check(self) -> asyncio.Lock:
        if self._state != "open" or self._lock is None:
            raise SandboxError(f"session {self.id} is {self._state}, not open", hint="use it inside `async with pool.session() as box:`")
        return self._lock

    async def _in_thread(self, work: Any) -> Any:
        async with self._check():
            return await asyncio.to_thread(work)

    async def _put(self, name: str, data: bytes | str | Path) -> None:
        async with self._check():
            self._known = None  # the host's files are no cell's doing
            await asyncio.to_thread(self._workspace.put, name, data)

    async def _locked(self, work: Any) -> None:
        async with self._check():
            await work()

    async def _preview(self, name: str, rows: int, timeout_s: float) -> Preview:
        async with self._check():
            return await look(self._pool, self._workspace, name, rows, timeout_s)

    async def _interrupt(self) -> None:
        if self._kernel is not None:
            self._kernel.process.signal(signal.SIGINT)

    async def _run(self, code: str, timeout_s: float | None, name: str, tool_call_id: str | None) -> Execution:
        async with self._check():
            self._check()
            kernel = await self._ready()
            before = self._known or await self._look()
            recorder = Recorder(self.limits)
            started = time.monotonic()
            status, note = await self._execute(kernel, code, self.limits.cell_s if timeout_s is None else timeout_s, recorder, before)
            duration = time.monotonic() - started
            self._cells += 1
            untold, self._untold = self._untold, ""
            files, extra = await self._after(before, recorder)
            return Execution(
                id=uuid.uuid4().hex,
                status=status,
                name=name,
                code=code,
                stdout=recorder.streams["stdout"].text(),
                stderr=recorder.streams["stderr"].text(),
                result=recorder.result,
                error=recorder.error,
                duration_s=duration,
                files=files,
                tool_call_id=tool_call_id,
                note=" ".join(part for part in (untold, note, *extra) if part),
                truncated=recorder.truncated,
            )

    async def _ready(self) -> Kernel:
        if self._settling is not None:
            await asyncio.wait([self._settling])
            self._settling = None
        if self._kernel is not None and self._kernel.process.exited.done():
            _, why = await self._died(self._kernel)
            self._untold = self._untold or f"Between two cells: {why}"
        if self._kernel is None:
            if self._adopted:
                self._kernel = await self._pool.start_kernel(self._workspace)
            else:
                kernel = await self._pool.take_kernel()
                if self._state != "open":
                    await self._pool.discard(kernel)
                    self._check()
                given, self._workspace, self._kernel, self._adopted = self._workspace, kernel.workspace, kernel, True
                await _unbroken(lambda: kernel.workspace.adopt(given))
        return self._kernel

    async def _execute(
        self, kernel: Kernel, code: str, timeout_s: float, recorder: Recorder, before: Snapshot
    ) -> tuple[ExecutionStatus, str]:
        flooded = asyncio.get_running_loop().create_future()

        def feed(message: Any) -> None:
            recorder.feed(message)
            if recorder.flooded and not flooded.done():
                flooded.set_result(None)

        cell = asyncio.ensure_future(kernel.channels.execute(code, feed))
        full = asyncio.ensure_future(self._watch(kernel, before))
        try:
            await asyncio.wait({cell, full, flooded, kernel.process.exited}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if cell.done() and not cell.cancelled() and cell.exception() is None:
                reply = cell.result()
                if reply.get("status") != "ok" and recorder.error is None:
                    recorder.fail(reply.get("ename", "Aborted"), reply.get("evalue", "the cell was aborted"))
                return ("ok" if reply.get("status") == "ok" else "error"), ""
            if kernel.process.exited.done():
                return await self._died(kernel)
            if cell.done():
                await self._drop_kernel()
                return "lost", f"The channels of the kernel broke. {STATE_LOST}"
            if full.done():
                await self._drop_kernel()
                return "killed", f"{full.result()} {STATE_LOST}"
            if flooded.done():
                why = f"The cell wrote more than {self.limits.output_mb} MiB of output and was stopped."
                if await self._stop(kernel, cell):
                    recorder.fail("OutputLimitExceeded", why)
                    return "error", why
                return "killed", f"{why} {STATE_LOST}"
            why = f"The cell ran past its limit of {timeout_s:g} s"
            if await self._stop(kernel, cell):
                return "timeout", f"{why} and was interrupted; variables and files are kept."
            if kernel.process.lost:
                return await self._died(kernel)
            return "killed", f"{why} and did not stop when interrupted. {STATE_LOST}"
        except asyncio.CancelledError:
            self._settling = self._pool.spawn(self._settle(kernel, cell))
            raise
        finally:
            full.cancel()
            if self._settling is None:
                cell.cancel()

    async def _stop(self, kernel: Kernel, cell: asyncio.Future[Any]) -> bool:
        """Interrupt the cell; True if it stopped within the grace time, else the kernel is killed."""
        deadline = time.monotonic() + self.limits.grace_s
        while not cell.done() and not kernel.process.exited.done() and time.monotonic() < deadline:
            kernel.process.signal(signal.SIGINT)  # again and again: code that catches one seldom catches all
            await asyncio.wait({cell, kernel.process.exited}, timeout=self.limits.grace_s / 4, return_when=asyncio.FIRST_COMPLETED)
        if cell.done() and not cell.cancelled() and cell.exception() is None:
            return True
        if self._kernel is kernel:
            await self._drop_kernel()
        return False

    async def _settle(self, kernel: Kernel, cell: asyncio.Future[Any]) -> None:
        await self._stop(kernel, cell)
        cell.cancel()

    async def _died(self, kernel: Kernel) -> tuple[ExecutionStatus, str]:
        code = kernel.process.exited.result()
        memory = kernel.group.ran_out()
        lost = kernel.process.lost
        await self._drop_kernel()
        if lost:
            return "lost", f"The sandbox itself failed while the cell ran. {STATE_LOST}"
        if code == HIDDEN:
            return "killed", f"Files that were deleted but kept open grew past {self.limits.workspace_mb} MiB. {STATE_LOST}"
        if memory:
            return "killed", f"The session ran out of memory ({self.limits.memory_mb} MiB). {STATE_LOST}"
        how = f"signal {signal.Signals(-code).name}" if code < 0 and -code in set(signal.Signals) else f"exit code {code}"
        return "killed", f"The kernel ended ({how}). {STATE_LOST}"

    async def _drop_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await self._pool.end_kernel(kernel)

    async def _watch(self, kernel: Kernel, before: Snapshot) -> str:
        """Returns, with the reason, once the workspace grew past its limits."""
        while True:
            await asyncio.sleep(_WATCH_S)
            why = await self._over(kernel, before)
            if why:
                return why

    async def _over(self, kernel: Kernel, before: Snapshot) -> str:
        kernel.process.signal(signal.SIGUSR2)
        now = await asyncio.to_thread(self._workspace.snapshot)
        if now.cut and now.entries <= self.limits.workspace_files:
            return f"The workspace holds folders that can't be listed, or that are nested deeper than {DEPTH}."
        if now.size > max(self.limits.workspace_mb * MB, before.size):
            return f"The workspace grew past {self.limits.workspace_mb} MiB."
        if now.entries > max(self.limits.workspace_files, before.entries):
            return f"The workspace grew past {self.limits.workspace_files} files."
        return ""

    async def patrol(self) -> None:
        """A look between cells, for what processes do that outlived theirs. The pool calls it every other second."""
        if self._lock is None or self._lock.locked() or self._kernel is None or self._known is None or self._state != "open":
            return
        async with self._lock:
            kernel = self._kernel
            if kernel is None or kernel.process.exited.done():
                return
            why = await self._over(kernel, self._known)
            if why:
                self._untold = f"Between two cells: {why} {STATE_LOST}"
                await self._drop_kernel()

    async def _look(self) -> Snapshot:
        """The workspace as it is; a small one is listed right here, which is quicker than a thread."""
        if self._known is not None and self._known.entries < 200:
            return self._workspace.snapshot()
        return await asyncio.to_thread(self._workspace.snapshot)

    async def _after(self, before: Snapshot, recorder: Recorder) -> tuple[tuple[FileChange, ...], list[str]]:
        notes: list[str] = []
        for index, (extension, content) in enumerate(recorder.displays, 1):
            name = f"display/{self._cells}-{index}.{extension}"
            try:
                await asyncio.to_thread(self._workspace.put, name, content)
            except SandboxError:
                notes.append(f"{name} could not be written.")
        after = self._known = await self._look()
        changes: tuple[FileChange, ...] = ()
        if after.files != before.files:
            changes = await asyncio.to_thread(self._workspace.changes, before.files, after.files)
        if after.cut:
            notes.append("The workspace holds too many or too deeply nested files to list them all.")
        if after.size > self.limits.workspace_mb * MB or after.entries > self.limits.workspace_files:
            notes.append("The workspace is over its limits: delete files.")
        return changes, notes

    async def _close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        try:
            await self._drop_kernel()  # ends a running cell, whose caller holds the lock
            if self._lock is not None:
                async with self._lock:
                    if self._settling is not None:
                        await asyncio.wait([self._settling])
                    await self._drop_kernel()
                    await asyncio.to_thread(self._workspace.remove)
        finally:
            self._pool.unregister(self)


async def _unbroken(work: Callable[[], None]) -> None:
    """Run `work` in a thread to its end, even if the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
