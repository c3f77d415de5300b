"""`Gateway`: the server that an app's `base_url` points at, in a thread of its own with an event loop of its own.

It serves OpenAI's chat completions from an engine, keeps every call's exact tokens in the store before the reply goes out, and swaps
versions while calls run. The one thing to know: a publish changes what a name means for calls that come after it. The new
weights are loaded beside the old, checked, and only then does the name turn to them, in one step; a publish that fails leaves
everything as it was.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import math
import socket
import threading
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from starlette.routing import BaseRoute

from ..errors import EngineError, GatewayError
from ..store import TraceStore
from .app import Service
from .engine import Canary, Engine
from .metrics import Metrics
from .routes import build
from .versions import Trial, Versions

log = logging.getLogger("mappa_graph.gateway")


class Gateway:
    """An OpenAI-compatible server over an engine.

    Use it as `async with Gateway(...) as gateway`, `with Gateway(...)`, or `start()` and `stop()`; the engine is started and
    stopped with it, the store is not closed. `gateway.url` is the `base_url` for clients.

    Args:
        engine: serves the policies.
        store: keeps the calls; None = nothing is recorded.
        host, port: where to listen; port 0 takes a free one.
        api_key: what clients must send as bearer token; None = none.
        max_body_bytes: longer requests are refused (413).
        max_inflight: more requests at once are told to come back (429).
        drain_s: how long `stop` waits for calls in flight.
        routes: more paths that the server answers (see `admin.py`).
    """

    def __init__(
        self,
        engine: Engine,
        store: TraceStore | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        max_body_bytes: int = 32 * 1024 * 1024,
        max_inflight: int = 1024,
        drain_s: float = 5.0,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        self.engine = engine
        self.store = store
        self.host = host
        self.port = port
        self.drain_s = drain_s
        self._limits = {"max_body_bytes": max_body_bytes, "max_inflight": max_inflight}
        self._api_key = api_key
        self._routes = routes
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._service: Service | None = None
        self._unloads: set[asyncio.Task[None]] = set()
        self._publishing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def url(self) -> str:
        """`http://HOST:PORT/v1`, once started."""
        self._running()
        host = "127.0.0.1" if self.host in ("", "0.0.0.0") else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def start(self) -> None:
        """Starts engine and server. Raises `GatewayError` where the address can't be had, `EngineError` from the engine."""
        if self._thread is not None:
            raise GatewayError("the gateway is running already", hint="make another Gateway, or stop this one first")
        listener = _listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        if self._api_key is None and not _loopback(self.host):
            log.warning("the gateway listens on %s without an API key: whoever reaches it can use it", self.host)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name="mappa-gateway", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self._thread.join()
            self._thread = None
            raise

    def stop(self) -> None:
        """Takes no more calls, lets those in flight end, stops the engine. A second stop does nothing."""
        thread, server = self._thread, self._server
        if thread is None:
            return
        if server is not None:
            server.should_exit = True
        thread.join()
        self._thread = self._loop = self._server = None

    async def __aenter__(self) -> Gateway:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.stop)

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def versions(self) -> dict[str, int]:
        """The current version of each policy."""
        return self._running().versions.current

    def inflight(self) -> dict[str, int]:
        """Requests in flight, by policy."""
        return self._running().versions.running

    def loaded(self) -> dict[str, dict[int, int]]:
        """Requests in flight, by policy and version, of every version that is loaded."""
        return self._running().versions.loaded

    def trials(self) -> dict[str, Trial]:
        """The versions that are served to a share of the calls."""
        return self._running().versions.trials

    @property
    def metrics(self) -> Metrics:
        """Counters since the start."""
        return self._running().metrics

    async def publish(
        self, policy: str, weights: Path | str, *, version: int | None = None, canary: Canary | None = None, share: float = 1.0
    ) -> int:
        """Swaps new weights in, and returns their version. May be awaited on any event loop.

        The weights (a folder) are loaded beside the serving ones and, with a canary, must answer it; then the policy's name
        turns to them. Calls in flight end on the version they began on, and the old version is unloaded after the last of them.

        Args:
            share: below 1, the new version is on trial: it gets this share of the calls, until `promote`, `withdraw` or another publish.

        Raises:
            EngineError: the weights can't be loaded or fail the canary; the old version goes on serving.
            GatewayError: the policy is unknown, the version's number was used before, or the share is not in 0..1.
        """
        if not 0.0 < share <= 1.0:
            raise GatewayError(f"share is {share}", hint="give a number above 0, such as 0.1, and at most 1")
        return await self._on_loop(self._publish(policy, Path(weights), version, canary, share))

    async def verify(self, policy: str, canary: Canary) -> int:
        """Checks that the current version of a policy answers a canary, and returns it. Raises `EngineError` where it does not."""

        async def verify() -> int:
            version = self._running().versions.current[policy]
            await self._check(policy, version, canary)
            return version

        return await self._on_loop(verify())

    async def promote(self, policy: str) -> int:
        """Gives all calls to the version on trial, and returns it. Raises `GatewayError` where none is."""

        async def promote() -> int:
            versions = self._running().versions
            async with self._publishing[policy]:
                trial = versions.trials.get(policy)
                if trial is None:
                    raise GatewayError(f"no version of {policy!r} is on trial", hint="one is after a publish with a share below 1")
                versions.flip(policy, trial.version)
                return trial.version

        return await self._on_loop(promote())

    async def withdraw(self, policy: str) -> int:
        """Ends a trial, and returns the version that was on it. Raises `GatewayError` where none is."""

        async def withdraw() -> int:
            async with self._publishing[policy]:
                return self._running().versions.withdraw(policy).version

        return await self._on_loop(withdraw())

    async def _on_loop(self, work: Coroutine[Any, Any, int]) -> int:
        try:
            self._running()
        except GatewayError:
            work.close()
            raise
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _publish(self, policy: str, weights: Path, version: int | None, canary: Canary | None, share: float) -> int:
        service = self._running()
        if share < 1.0 and self._in_place:
            raise GatewayError(
                f"a share of {share:g} needs both versions loaded; the {self.engine.name} engine in this mode holds one a policy",
                hint="serve LoRA adapters (engine.vllm.mode: lora), or publish to all calls",
            )
        async with self._publishing[policy]:
            number = service.versions.reserve(policy, version)
            held = service.versions.hold(policy) if self._in_place else nullcontext()
            with held:
                return await self._swap(service, policy, number, weights, canary, share)

    async def _swap(self, service: Service, policy: str, number: int, weights: Path, canary: Canary | None, share: float) -> int:
        try:
            await self.engine.load(policy, number, weights)
            try:
                if canary is not None:
                    await self._check(policy, number, canary)
            except BaseException:
                await self.engine.unload(policy, number)
                raise
        except BaseException:
            service.metrics.publishes[policy, "refused"] += 1
            raise
        if share < 1.0:
            service.versions.try_out(policy, number, share)
        else:
            service.versions.flip(policy, number)
        service.metrics.publishes[policy, "done"] += 1
        return number

    @property
    def _in_place(self) -> bool:
        """Whether the engine holds one version of a policy at a time."""
        return bool(getattr(self.engine, "swaps_in_place", False))

    async def _check(self, policy: str, version: int, canary: Canary) -> None:
        given = list(canary.logprobs)
        got = await self.engine.score(policy, version, canary.prompt_ids, canary.completion_ids, canary.temperature)
        if len(got) != len(given) or not got:
            raise EngineError(f"the canary of {policy}@v{version} has {len(given)} log-probs, the engine gave {len(got)}")
        worst = max(abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in zip(got, given, strict=True))
        if not worst <= min(canary.tolerance, 1.0):
            raise EngineError(
                f"{policy}@v{version} failed its canary: log-probs differ by up to {worst:.3g} nats, {canary.tolerance:g} is allowed",
                hint="the engine does not have the weights that the trainer has; a version that served before goes on serving",
            )

    def _running(self) -> Service:
        if self._thread is None or self._service is None:
            raise GatewayError("the gateway is not running", hint="use it inside `async with Gateway(...)`, or call start()")
        return self._service

    # -- the server's thread

    def _run(self, listener: socket.socket, ready: Future[None]) -> None:
        config = uvicorn.Config(
            _not_ready,
            log_level="warning",
            access_log=False,
            lifespan="off",
            backlog=2048,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, math.ceil(self.drain_s)),
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(self._serve(config, listener, ready))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            else:
                log.exception("the gateway's server ended")
                raise
        finally:
            listener.close()

    async def _serve(self, config: uvicorn.Config, listener: socket.socket, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self.engine.start()
            versions = Versions(self.engine.models(), self._unload, in_place=self._in_place)
            self._service = Service(self.engine, versions, self.store, api_key=self._api_key, **self._limits)
            config.app = build(self._service, self._routes)
            self._server = _Server(config, ready)
            await self._server.serve(sockets=[listener])
        finally:
            if self._unloads:
                await asyncio.wait(self._unloads)
            await self.engine.stop()

    def _unload(self, policy: str, version: int) -> None:
        async def unload() -> None:
            try:
                await self.engine.unload(policy, version)
            except EngineError:
                log.exception("%s@v%d could not be unloaded", policy, version)

        task = asyncio.ensure_future(unload())
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)


class _Server(uvicorn.Server):
    """Says when it takes connections."""

    def __init__(self, config: uvicorn.Config, ready: Future[None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set_result(None)


async def _not_ready(scope: object, receive: object, send: object) -> None:
    raise GatewayError("the gateway has not started")


def keep_collector_away() -> None:
    """For a process that does nothing but serve: its garbage collector leaves alone what is there now, and looks for cycles seldom.

    A call makes no cycles, and hundreds of objects; by default the collector would walk through them several times a call.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        hints = {
            errno.EADDRINUSE: "another process listens there; end it, give another port, or port=0 for a free one",
            errno.EACCES: "ports under 1024 need rights; give a higher one, or port=0 for a free one",
            errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 serves this machine, 0.0.0.0 all networks",
        }
        raise GatewayError(f"can't listen on {host}:{port}: {error}", hint=hints.get(error.errno or 0)) from error
    except OverflowError as error:
        listener.close()
        raise GatewayError(f"can't listen on {host}:{port}: {error}", hint="give a port in 0..65535") from error
    return listener


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
