"""`Server`: one vLLM server that is kept running, or one that runs elsewhere and is spoken to by its address.

A server of ours that dies, or says that it is broken, is started again, and gets back what it served (`restore`) before any call
reaches it. The one thing to know: a call that a crash cut is refused with 503 and `Retry-After`, and never half answered as if it were
whole; a call that comes while the server restarts waits for it, up to a limit, so that a client which tries again is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...errors import EngineError
from ...sections.engine import VllmConfig
from ..engine import RequestRefused
from ..http import HttpError, HttpTimeout
from ..upstream import UpstreamEngine
from .control import Capabilities, Control, ServerDown
from .process import Launch, Process, spawn

log = logging.getLogger("mappa_graph.gateway.vllm")
_POLL_S = 0.2
_HEALTH_S = 5.0
_SILENT = 24
"""Health checks in a row that may go unanswered."""
_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server that we did not start is."""

    url: str
    """Without `/v1`."""
    key: str | None


class Server:
    """A vLLM server.

    Args:
        what: names it in messages.
        where: what to start (asked anew for each start), or the address of one that runs.
        policies: the names that calls use for what it serves first.
        options: settings.
        check: raises `EngineError` where the server can't do what is needed of it.
        restore: gives a server that was started again what it is to serve.

    Belongs to the event loop that it was started on.
    """

    def __init__(
        self,
        what: str,
        where: Callable[[], Launch] | Address,
        policies: tuple[str, ...],
        options: VllmConfig,
        *,
        check: Callable[[Server], Awaitable[None]],
        restore: Callable[[Server], Awaitable[None]],
    ) -> None:
        self.what = what
        self.restarts = 0
        self.name = ""
        """What the server calls its base model."""
        self.process: Process | None = None
        self._where = where
        self._policies = policies
        self._options = options
        self._check = check
        self._restore = restore
        self._upstream: UpstreamEngine | None = None
        self._control: Control | None = None
        self._capabilities: Capabilities | None = None
        self._ready = asyncio.Event()
        self._suspect = asyncio.Event()
        self._failed: EngineError | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def control(self) -> Control:
        if self._control is None:
            raise EngineError("the vLLM engine is not running", hint="await engine.start() first")
        return self._control

    @property
    def upstream(self) -> UpstreamEngine:
        if self._upstream is None:
            raise EngineError("the vLLM engine is not running", hint="await engine.start() first")
        return self._upstream

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the vLLM engine is not running", hint="await engine.start() first")
        return self._capabilities

    @property
    def health(self) -> str:
        if self._failed is not None:
            return f"failed: {self._failed}"
        if self._control is None and self._watch is None:
            return "stopped"
        return "ok" if self._ready.is_set() else "restarting" if self._watch is not None else "starting"

    async def start(self) -> None:
        """Returns once it serves. Raises `EngineError` with the end of its log where it does not come up in time."""
        self._failed = None
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        self._ready.set()
        if not isinstance(self._where, Address):
            self._watch = asyncio.ensure_future(self._keep())

    async def stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        self._ready.clear()
        await self._close()

    async def up(self) -> UpstreamEngine:
        """Waits while the server restarts. Raises `RequestRefused` (503) where that takes long, `EngineError` where it won't come back."""
        if not self._ready.is_set() and self._watch is not None:
            try:
                async with asyncio.timeout(self._options.restart_wait_s):
                    await self._ready.wait()
            except TimeoutError:
                raise _later(f"{self.what} is being restarted; try again") from None
        if self._failed is not None:
            raise self._failed
        return self.upstream

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[UpstreamEngine]:
        """Around what is asked of the server: what a crash does to it becomes a 503 that says so."""
        upstream = await self.up()
        try:
            yield upstream
        except EngineError as error:
            if await self._is_down(error):
                raise _later(f"{self.what} broke off while it worked on this; try again") from error
            raise

    def broken(self) -> None:
        """Has a server of ours replaced, as if it had died."""
        self._ready.clear()
        self._suspect.set()

    def fail(self, error: EngineError) -> None:
        """For a server that is not ours to replace: it's not used until something else is published."""
        self._failed = error

    def recovered(self) -> None:
        self._failed = None

    @property
    def ours(self) -> bool:
        return not isinstance(self._where, Address)

    # -- inside

    async def _is_down(self, error: EngineError) -> bool:
        unreachable = isinstance(error, ServerDown) or (
            isinstance(error.__cause__, HttpError) and not isinstance(error.__cause__, HttpTimeout)
        )
        if not self.ours:
            return unreachable
        if isinstance(error, RequestRefused) and error.status < 500:
            return False
        if isinstance(error.__cause__, HttpTimeout):
            return False
        process = self.process
        # The API server says that something is wrong a moment before it knows that its engine is dead.
        for _ in range(20 if unreachable else 6):
            if process is None or process is not self.process or not self._ready.is_set():
                return True
            if process.exited.is_set() or await self.control.healthy(2.0) is False:
                if process is self.process:
                    self.broken()
                return True
            await asyncio.sleep(0.1)
        return unreachable

    async def _open(self) -> None:
        if isinstance(self._where, Address):
            await self._connect(self._where.url, self._where.key, None)
            return
        launch = self._where()
        for attempt in range(3):
            self.process = process = spawn(launch)
            try:
                await self._come_up(process)
                await self._connect(process.url, process.key, process.name)
            except EngineError as error:
                taken = "address already in use" in process.tail().lower()
                await self._close()
                if taken and attempt < 2:
                    continue
                raise error from None
            return

    async def _come_up(self, process: Process) -> None:
        """Until our own server answers on its port. One that answers and isn't ours is never spoken to."""
        limit = self._options.start_timeout_s
        control = Control(process.url, process.key, 10.0)
        try:
            async with asyncio.timeout(limit):
                while not process.exited.is_set():
                    try:
                        if any(card["id"] == process.name for card in await control.models()):
                            return
                    except EngineError:
                        pass  # not yet, or somebody else's
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await process.exited.wait()
        except TimeoutError:
            told = f"{self.what} did not come up in {limit:g} s (engine.vllm.start_timeout_s)"
            raise EngineError(f"{told}; the end of {process.log}:\n{process.tail()}") from None
        finally:
            await control.close()
        raise EngineError(
            f"{self.what} ended while it started, with status {process.popen.poll()}; the end of {process.log}:\n{process.tail()}"
        )

    async def _connect(self, url: str, key: str | None, name: str | None) -> None:
        self._control = control = Control(url, key, self._options.timeout_s)
        cards = await control.models()
        if not cards:
            raise EngineError(f"{url} serves no model")
        card = next((card for card in cards if card["id"] == name), None) if name else cards[0]
        if card is None:
            raise EngineError(f"{url} does not serve {name}: it is another server")
        self.name = str(card["id"])
        self._capabilities = await control.probe(self.name, int(card.get("max_model_len") or 0))
        upstream = UpstreamEngine(f"{url}/v1", dict.fromkeys(self._policies, self.name), api_key=key, timeout_s=self._options.timeout_s)
        await upstream.start()
        self._upstream = upstream
        await self._check(self)
        await self._restore(self)

    async def _close(self) -> None:
        upstream, self._upstream = self._upstream, None
        control, self._control = self._control, None
        process, self.process = self.process, None
        if upstream is not None:
            await upstream.stop()
        if control is not None:
            await control.close()
        if process is not None:
            await process.stop(self._options.stop_timeout_s)

    async def _keep(self) -> None:
        """Starts the server again whenever it is gone, unless that happens too often."""
        recent: deque[float] = deque()
        while True:
            assert self.process is not None
            await self._gone(self.process)
            self._ready.clear()
            tail = self.process.tail()
            log.error("%s is gone; the end of its log:\n%s", self.what, tail)
            while True:
                now = time.monotonic()
                while recent and now - recent[0] > _WINDOW_S:
                    recent.popleft()
                if len(recent) >= self._options.max_restarts:
                    self._failed = EngineError(
                        f"{self.what} ended {len(recent) + 1} times in ten minutes (engine.vllm.max_restarts is "
                        f"{self._options.max_restarts}); the end of its log:\n{tail}"
                    )
                    self._ready.set()
                    await self._close()
                    return
                recent.append(now)
                self.restarts += 1
                try:
                    await self._close()
                    await self._open()
                    break
                except EngineError as error:
                    tail = str(error)
                    log.error("%s could not be started again: %s", self.what, error)
            log.warning("%s serves again, after restart %d", self.what, self.restarts)
            self._suspect.clear()
            self._ready.set()

    async def _gone(self, process: Process) -> None:
        silent = 0
        while silent < _SILENT:
            ends = {asyncio.ensure_future(process.exited.wait()), asyncio.ensure_future(self._suspect.wait())}
            try:
                done, _ = await asyncio.wait(ends, timeout=_HEALTH_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
            if done:
                return
            healthy = await self.control.healthy()
            if healthy is False:
                return
            silent = silent + 1 if healthy is None else 0


def _later(message: str) -> RequestRefused:
    return RequestRefused(message, status=503, code="engine_restarting", type="engine_error", headers={"retry-after": "1"})
