"""The gateway's HTTP side: the endpoints over one engine, one table of versions and, mostly, one store.

A reply goes out after its call is in the store: the whole reply, or the last chunk of a stream. Streams are passed on chunk by
chunk. The one thing to know: a client that goes away cancels its request's task, wherever that waits, and thereby the engine's
work; what a stream had sampled until then is kept as a call that ended with "abort".
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send

from ..codec import encode
from ..errors import EngineError, MappaError, StoreError
from ..record import Call, FinishReason
from ..store import TraceStore
from . import wire
from .engine import Completion, Engine, RequestRefused
from .metrics import Metrics
from .versions import Versions

log = logging.getLogger("mappa_graph.gateway")
_JSON = (b"content-type", b"application/json")
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_MOMENT_S = 0.02


class Disconnected(Exception):
    """The client went away."""


class Service:
    """What the routes work on."""

    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        store: TraceStore | None,
        *,
        api_key: str | None,
        max_body_bytes: int,
        max_inflight: int,
    ) -> None:
        self.engine = engine
        self.versions = versions
        self.store = store
        self.metrics = Metrics()
        self.max_body_bytes = max_body_bytes
        self.max_inflight = max_inflight
        self.inflight = 0
        self._serving = getattr(engine, "serving", None)
        self._token = None if api_key is None else f"Bearer {api_key}".encode()

    def authorize(self, scope: Scope) -> None:
        """Raises `RequestRefused` (401) where a key is set and the request has another."""
        if self._token is not None and not hmac.compare_digest(header(scope, b"authorization") or b"", self._token):
            raise RequestRefused(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                type="authentication_error",
            )

    def enter(self) -> None:
        """Counts a request in; who enters leaves by counting `inflight` down. Raises `RequestRefused` (429)."""
        if self.inflight >= self.max_inflight:
            raise RequestRefused(
                f"{self.inflight} requests are in flight, which is this gateway's limit; try again soon",
                status=429,
                code="rate_limit_exceeded",
                type="rate_limit_error",
                headers={"retry-after": "1"},
            )
        self.inflight += 1

    async def keep(self, exchange: wire.Exchange, completions: Sequence[Completion]) -> None:
        """Records completions; they are on disk on return. Raises `StoreError`."""
        if self.store is not None:
            calls = exchange.calls(completions)
            await self.store.aadd_calls(calls if self._serving is None else [self._spanned(call) for call in calls])
        self.metrics.served(exchange.request.policy, exchange.request.version, completions)

    def _spanned(self, call: Call) -> Call:
        """The call, with the version that serves at its end, where an engine swaps in place and it is another one."""
        last = call.version if self._serving is None else self._serving(call.policy)
        return call if last == call.version else replace(call, last_version=last)

    async def keep_call(self, call: Call) -> None:
        """The same for a call that another server made and numbered."""
        if self.store is not None:
            await self.store.aadd_calls((self._spanned(call),))
        self.metrics.served(call.policy, call.version, (call,))


class Endpoint:
    """`POST` of one path, as a plain ASGI app: admission and errors; `answer` does the rest."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self.service
        reply = Reply(send)
        try:
            service.authorize(scope)
            service.enter()
            try:
                await self.answer(scope, receive, reply)
            finally:
                service.inflight -= 1
        except Disconnected:
            service.metrics.disconnects += 1
        except RequestRefused as error:
            service.metrics.errors[error.status] += 1
            headers = [(k.encode(), v.encode()) for k, v in error.headers.items()]
            await reply.fail(error.status, error.body or encode({"error": error.error}), headers)
        except Exception as error:
            # what this package raises on purpose says what it is; a traceback helps with the rest only
            log.error("a request failed: %s", error, exc_info=not isinstance(error, MappaError))
            status, kind = _classify(error)
            service.metrics.errors[status] += 1
            told = str(error) if isinstance(error, MappaError) else f"{type(error).__name__} inside the gateway; its log has the details"
            await reply.fail(status, wire.error_body(told, type=kind, code=kind))


class Completions(Endpoint):
    """`/v1/chat/completions`, and `/v1/completions` as `kind` text."""

    def __init__(self, service: Service, kind: wire.Kind = "chat") -> None:
        super().__init__(service)
        self.kind = kind

    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        service = self.service
        body, asked = wire.parse(await read(scope, receive, service.max_body_bytes), self.kind)
        agent, episode = text(scope, b"x-mappa-agent"), text(scope, b"x-mappa-episode")
        if service.versions.held:
            await service.versions.open(asked.model)
        policy, version = service.versions.resolve(asked.model, episode or "")
        exchange = wire.Exchange(asked, wire.request(body, policy, version, self.kind), agent=agent, episode=episode)
        with service.versions.lease(policy, version):
            if asked.stream:
                await self._stream(exchange, receive, reply)
            else:
                with watched(receive):
                    completions = await service.engine.complete(exchange.request)
                    await service.keep(exchange, completions)
                await reply.whole(200, exchange.reply(completions))

    async def _stream(self, exchange: wire.Exchange, receive: Receive, reply: Reply) -> None:
        service, asked = self.service, exchange.asked
        collected: dict[int, wire.Collected] = {}
        kept: dict[int, Completion] = {}
        usage: Mapping[str, Any] | None = None
        unfinished: FinishReason = "error"
        try:
            with watched(receive):
                # Engines write `stream` as an async generator; closing it is what stops the work.
                chunks = cast("AsyncIterator[Any]", service.engine.stream(exchange.request))
                async with aclosing(chunks):  # type: ignore[type-var]
                    async for chunk in chunks:
                        if chunk.usage is not None:
                            usage = chunk.usage
                            continue
                        first = chunk.index not in collected
                        choice = collected.setdefault(chunk.index, wire.Collected(chunk.index))
                        choice.add(chunk)
                        if chunk.finish_reason is not None:
                            kept[chunk.index] = choice.completion("stop")
                            await service.keep(exchange, [kept[chunk.index]])
                        elif not (first or chunk.delta or asked.logprobs or asked.token_ids):
                            continue
                        await reply.piece(exchange.event(chunk, first=first))
            told = exchange.usage_event([kept[i] for i in sorted(kept)], usage) if asked.usage else b""
            await reply.end(told + b"data: [DONE]\n\n")
        except Disconnected:
            unfinished = "abort"
            raise
        finally:
            rest = [choice.completion(unfinished) for i, choice in collected.items() if i not in kept and choice.ids]
            if rest:
                try:
                    await service.keep(exchange, rest)
                except StoreError:
                    log.exception("the unfinished call %s could not be kept", exchange.id)


class Reply:
    """Sends one response: whole, in pieces, or as an error wherever it has got to."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def whole(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """A body that is all there."""
        self._started = True
        made = [_JSON, (b"content-length", str(len(body)).encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": made})
        await self._send({"type": "http.response.body", "body": body})

    async def piece(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _SSE})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        if not self._started:
            await self.piece(b"")
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        if self._started:
            # The status line is out; an error object as the last event is what OpenAI clients raise on.
            await self._send({"type": "http.response.body", "body": b"data: " + body.replace(b"\n", b" ") + b"\n\n"})
        else:
            await self.whole(status, body, headers)


class watched:
    """Cancels what is inside when the client goes away, and raises `Disconnected` then.

    It looks for that after a moment only: most calls of a quick engine are over by then, and a task for each would cost them more than
    their record.
    """

    __slots__ = ("_gone", "_over", "_receive", "_task", "_timer")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = False
        self._gone: asyncio.Future[None] | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = task.get_loop().call_later(_MOMENT_S, self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        self._over = True
        gone = self._gone
        if gone is None:
            return
        if gone.done() and kind is asyncio.CancelledError and self._task.uncancel() == 0:
            raise Disconnected from None
        gone.cancel()

    def _look(self) -> None:
        self._gone = asyncio.ensure_future(_disconnect(self._receive))
        self._gone.add_done_callback(self._leave)

    def _leave(self, _: asyncio.Future[None]) -> None:
        # It may run when the context is over: nothing outside of it is cancelled.
        if not self._over:
            self._task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request body. Raises `RequestRefused` (413) as soon as it is known to be too long."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_long(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_long(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_long(limit: int) -> RequestRefused:
    return RequestRefused(f"the request body is over {limit} bytes, which is this gateway's limit (max_body_bytes)", status=413)


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return cast("bytes", value)
    return None


def text(scope: Scope, name: bytes) -> str | None:
    value = header(scope, name)
    return value.decode("utf-8", "replace")[:256] if value else None


def _classify(error: Exception) -> tuple[int, str]:
    if isinstance(error, EngineError):
        return 503, "engine_error"
    return 500, "store_error" if isinstance(error, StoreError) else "internal_error"
