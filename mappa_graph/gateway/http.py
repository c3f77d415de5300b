"""A small HTTP/1.1 client for one server: kept-alive connections, whole replies and streams, nothing else.

General clients cost more per call than the rest of the gateway together, and far more with many connections open. This one
knows one address; `httptools` reads what comes, so lengths, chunks and the end of a reply are not its own guesses. A request that finds
its kept-alive connection closed before a byte of the answer came is sent once more on a new one; leaving a request early
(cancellation) closes its connection, which is how the server learns of it. What has come of a body is handed on together: a slow
reader gets fewer, larger pieces, and past a bound the server is made to wait.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

_HEAD_LIMIT = 1 << 17
_BODY_HIGH = 1 << 20
"""Bytes of a body that wait for their reader before the connection is read no further."""


class HttpError(Exception):
    """The server can't be reached, broke off, or does not speak HTTP."""


class HttpTimeout(HttpError):
    """The server did not answer in time."""


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection: what comes is parsed at once; `wait` sleeps until there is more of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self.deadline = 0.0
        self.then: Callable[[_Connection], None] | None = None
        """Called at the end of a body that nobody reads any more."""
        self.used = False
        self.closed = False
        self.bounded = False
        """Whether the reader takes the body piece by piece, so that the server can be made to wait."""
        self.reset()

    def reset(self) -> None:
        """Before a request."""
        self.status = 0
        self.bounded = False
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.size = 0
        self.begun = False
        """Whether a byte of the answer has come."""
        self.headed = False
        self.done = False
        self.over = False
        self.then = None
        self.error: HttpError | None = None

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def wait(self) -> None:
        """Until something has come, or the connection has ended. Raises `HttpTimeout` where the client's sweep finds it late."""
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def late(self, error: HttpTimeout) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def take(self) -> bytes:
        """What has come of the body and was not taken yet."""
        parts = self.parts
        if not parts:
            return b""
        self.parts, self.size = [], 0
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def reusable(self) -> bool:
        return self.done and not self.closed and self.error is None and self.headers.get("connection", "").lower() != "close"

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by behaviour, not by class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.error = HttpError(f"the answer is not HTTP: {error}")
            self.close()
        if not self.headed:
            self.size += len(data)
            if self.size > _HEAD_LIMIT:
                self.error = HttpError(f"the answer is not HTTP: its head is over {_HEAD_LIMIT} bytes")
                self.close()
        elif self.bounded and self.size > _BODY_HIGH and not self._paused and self._transport is not None and not self.closed:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            # A body that says neither its length nor its chunks ends with its connection.
            if self.headed and not self.done and not ("content-length" in self.headers or "transfer-encoding" in self.headers):
                self.done = True
        if self.then is not None:
            self.then(self)
        self._wake()

    # -- the parser's side

    def on_message_begin(self) -> None:
        if self.done:
            self.error = HttpError("the answer is not HTTP: more came than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.done:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.headed = True
        self.size = 0

    def on_body(self, data: bytes) -> None:
        if self.then is not None:
            return
        self.parts.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        if self.status < 200:
            # "100 continue" and its like come before the answer.
            self.reset()
        else:
            self.done = True
            if self.then is not None:
                self.then(self)


class HttpStream:
    """A reply whose body is still coming."""

    def __init__(self, client: HttpClient, connection: _Connection) -> None:
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers
        self._client = client
        self._connection = connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, each wait bounded by the timeout; what has come meanwhile is one piece."""
        connection = self._connection
        while True:
            data = connection.take()
            if data:
                yield data
            elif connection.done:
                return
            else:
                await self._client._more(connection)

    def over(self) -> None:
        """What mattered of the body was read: its end, which is on its way, may come when nobody waits for it."""
        self._connection.over = True

    async def read(self) -> bytes:
        connection = self._connection
        if connection.done:
            return connection.take()
        return b"".join([piece async for piece in self.pieces()])


class HttpClient:
    """Requests to one server; belongs to the event loop that it is used on.

    Args:
        base_url: `http://` or `https://` address, a path prefix included.
        headers: sent with every request.
        timeout_s: longest wait for each part of an answer.
        connect_timeout_s: longest wait for a connection.
        max_connections: further requests wait for one to come free.
    """

    def __init__(
        self, base_url: str, headers: Mapping[str, str], *, timeout_s: float, connect_timeout_s: float, max_connections: int
    ) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        fixed = {"host": parts.netloc.rpartition("@")[2], "accept-encoding": "identity", **headers}
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._heads: dict[tuple[str, str], bytes] = {}
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[_Connection] = deque()
        self._free = asyncio.Semaphore(max_connections)
        self._ending: set[_Connection] = set()
        self._stopped = False
        self._waiting: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The whole reply. Raises `HttpError`."""
        await self._free.acquire()
        connection: _Connection | None = None
        try:
            connection = await self._begin(method, path, body)
            while not connection.done:
                await self._more(connection)
            return Reply(connection.status, connection.headers, connection.take())
        finally:
            self._end(connection)

    @asynccontextmanager
    async def stream(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[HttpStream]:
        """The reply once its head is there. Raises `HttpError`."""
        await self._free.acquire()
        connection: _Connection | None = None
        try:
            connection = await self._begin(method, path, body)
            connection.bounded = True
            yield HttpStream(self, connection)
        finally:
            self._end(connection)

    async def close(self) -> None:
        self._stopped = True
        for connection in (*self._idle, *self._ending):
            connection.close()
        self._idle.clear()
        self._ending.clear()
        if self._sweep is not None:
            self._sweep.cancel()

    def _end(self, connection: _Connection | None) -> None:
        self._free.release()
        if connection is None:
            return
        if connection.reusable():
            self._idle.append(connection)
        elif connection.over and not connection.closed and connection.error is None:
            connection.take()
            connection.then = self._ended
            self._ending.add(connection)
        else:
            connection.close()

    def _ended(self, connection: _Connection) -> None:
        """A connection whose last stream came to its end after its reader had left."""
        connection.then = None
        self._ending.discard(connection)
        if connection.reusable() and not self._stopped:
            self._idle.append(connection)
        else:
            connection.close()

    async def _begin(self, method: str, path: str, body: bytes) -> _Connection:
        """A connection on which the request was sent, and whose answer's head is there."""
        key = (method, path)
        if key not in self._heads:
            self._heads[key] = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fixed}content-length: ".encode()
        data = b"%b%d\r\n\r\n%b" % (self._heads[key], len(body), body)
        while True:
            connection = await self._connect()
            reused, connection.used = connection.used, True
            connection.reset()
            try:
                connection.send(data)
                while not connection.headed:
                    await self._more(connection)
                return connection
            except HttpTimeout:
                connection.close()
                raise
            except HttpError:
                connection.close()
                if not reused or connection.begun:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _more(self, connection: _Connection) -> None:
        """Waits for more of an answer that is not all there."""
        if connection.error is not None:
            raise connection.error
        if connection.closed:
            raise HttpError("the connection broke off" + (" in the body" if connection.headed else ""))
        loop = asyncio.get_running_loop()
        connection.deadline = loop.time() + self._timeout_s
        self._waiting.add(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._period(), self._find_late)
        try:
            await connection.wait()
        finally:
            self._waiting.discard(connection)
        if connection.error is not None:
            raise connection.error

    def _period(self) -> float:
        return min(1.0, self._timeout_s / 10)

    def _find_late(self) -> None:
        """One timer looks after all waits: a timer for each would be a good part of what a call costs."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [c for c in self._waiting if now >= c.deadline]:
            connection.late(HttpTimeout(f"nothing came for {self._timeout_s:g} s"))
        self._sweep = loop.call_later(self._period(), self._find_late) if self._waiting else None

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.error is None:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return (await loop.create_connection(lambda: _Connection(loop), self._host, self._port, ssl=self._tls))[1]
        except TimeoutError as error:
            raise HttpTimeout(f"no connection to {self._host}:{self._port} in {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise HttpError(str(error)) from error
