"""A small HTTP/1.1 client for one server: kept-alive connections, whole replies and streams, nothing else.

General clients cost more per call than the rest of the gateway together, and far more with many connections open. This one
knows one address, content lengths, chunked bodies and TLS. A request that finds its kept-alive connection closed before a byte
of the answer came is sent once more on a new one; leaving a request early (cancellation) closes its connection, which is how the
server learns of it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

_HEAD_LIMIT = 1 << 17


class HttpError(Exception):
    """The server can't be reached, broke off, or does not speak HTTP."""


class HttpTimeout(HttpError):
    """The server did not answer in time."""


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class _Connection:
    __slots__ = ("reader", "used", "writer")

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.used = False

    def close(self) -> None:
        self.writer.transport.abort()


class HttpStream:
    """A reply whose body is still coming."""

    def __init__(self, connection: _Connection, status: int, headers: Mapping[str, str], timeout_s: float) -> None:
        self.status = status
        self.headers = headers
        self.done = False
        """Whether the body was read to its end, so that the connection can serve again."""
        self._reader = connection.reader
        self._timeout_s = timeout_s

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, each wait bounded by the timeout."""
        reader = self._reader
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _size(await self._wait(reader.readuntil(b"\r\n"))):
                data = await self._wait(reader.readexactly(size + 2))
                yield data[:-2]
            while await self._wait(reader.readuntil(b"\r\n")) != b"\r\n":
                pass
            self.done = True
        elif "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left:
                data = await self._wait(reader.read(min(left, 1 << 16)))
                if not data:
                    raise HttpError("the connection broke off in the body")
                left -= len(data)
                yield data
            self.done = True
        else:
            while data := await self._wait(reader.read(1 << 16)):
                yield data

    async def read(self) -> bytes:
        if "content-length" in self.headers:
            data = await self._wait(self._reader.readexactly(int(self.headers["content-length"])))
            self.done = True
            return data
        return b"".join([piece async for piece in self.pieces()])

    async def _wait(self, reading: Awaitable[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await reading
        except TimeoutError as error:
            raise HttpTimeout(f"nothing came for {self._timeout_s:g} s") from error
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"the connection broke off in the body: {type(error).__name__}") from error


def _size(line: bytes) -> int:
    try:
        return int(line.split(b";")[0], 16)
    except ValueError as error:
        raise HttpError(f"a chunk of the body begins with {line[:40]!r}") from error


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
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[_Connection] = deque()
        self._free = asyncio.Semaphore(max_connections)

    async def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        async with self.stream(method, path, body) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    @asynccontextmanager
    async def stream(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[HttpStream]:
        """The reply once its head is there. Raises `HttpError`."""
        async with self._free:
            connection, reply = await self._begin(method, path, body)
            try:
                yield reply
            finally:
                if reply.done and reply.headers.get("connection", "").lower() != "close":
                    self._idle.append(connection)
                else:
                    connection.close()

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _begin(self, method: str, path: str, body: bytes) -> tuple[_Connection, HttpStream]:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fixed}content-length: {len(body)}\r\n\r\n".encode()
        while True:
            connection = await self._connect()
            reused, connection.used = connection.used, True
            try:
                connection.writer.write(head + body)
                async with asyncio.timeout(self._timeout_s):
                    status, headers = _head(await connection.reader.readuntil(b"\r\n\r\n"))
                return connection, HttpStream(connection, status, headers, self._timeout_s)
            except TimeoutError as error:
                connection.close()
                raise HttpTimeout(f"no answer in {self._timeout_s:g} s") from error
            except (OSError, asyncio.IncompleteReadError) as error:
                connection.close()
                if reused and not getattr(error, "partial", b""):
                    continue
                raise HttpError(f"the connection broke off: {type(error).__name__}") from error
            except (ValueError, asyncio.LimitOverrunError) as error:
                connection.close()
                raise HttpError(f"the answer is not HTTP: {error}") from error
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not (connection.reader.at_eof() or connection.writer.is_closing()):
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_HEAD_LIMIT))
        except TimeoutError as error:
            raise HttpTimeout(f"no connection to {self._host}:{self._port} in {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise HttpError(str(error)) from error


def _head(raw: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"it begins with {first[:40]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers
