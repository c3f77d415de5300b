"""What a client's or a server's pace does to the other side: leaving, silence, and reading slowly, through a gateway and its own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mappa_graph.gateway import Gateway
from mappa_graph.gateway.http import HttpClient
from mappa_graph.gateway.upstream import UpstreamEngine

ASK: dict[str, Any] = {"model": "solver", "messages": [{"role": "user", "content": "hi"}]}
MODELS = b'HTTP/1.1 200 OK\r\ncontent-length: 26\r\n\r\n{"data":[{"id":"served"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id": "u", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\n\n'


class Quiet:
    """A server that lists its models, and answers chats with the start of a stream at most. It knows when it was left."""

    def __init__(self, started: bool) -> None:
        self.started = started
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.address = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(1 << 16):
            if head.startswith(b"GET"):
                writer.write(MODELS)
                continue
            self.asked.set()
            if self.started:
                writer.write(HEAD + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            if not await reader.read(1 << 16):
                self.left.set()
                break
        writer.close()


@asynccontextmanager
async def quiet(started: bool = False) -> AsyncIterator[Quiet]:
    made = Quiet(started)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield made
    finally:
        server.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_has_its_request_upstream_closed(stream: bool) -> None:
    async with quiet(started=stream) as upstream:
        async with Gateway(UpstreamEngine(upstream.address, {"solver": "served"})) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                asking = asyncio.ensure_future(client.post("/chat/completions", json={**ASK, "stream": stream}))
                await asyncio.wait_for(upstream.asked.wait(), 20)
                assert not upstream.left.is_set()
                asking.cancel()
                await asyncio.wait([asking])
            await asyncio.wait_for(upstream.left.wait(), 20)
            while any(gateway.inflight().values()):  # noqa: ASYNC110  the gateway's loop is another
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_goes_quiet_is_an_error_that_can_be_tried_again(stream: bool) -> None:
    async with quiet(started=stream) as upstream:
        async with Gateway(UpstreamEngine(upstream.address, {"solver": "served"}, timeout_s=0.2)) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
                answer = await client.post("/chat/completions", json={**ASK, "stream": stream})
            assert "did not answer in time" in answer.text
            # The first chunk was passed on at once: then the status line is out, and the error is the stream's last event.
            assert answer.status_code == (200 if stream else 503)
            assert ('"content":"x"' in answer.text) is stream and "[DONE]" not in answer.text
            await asyncio.wait_for(upstream.left.wait(), 20)


async def test_a_connection_serves_again_though_the_end_of_a_stream_comes_late() -> None:
    connections = 0
    told = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.read(1 << 16):
            if head.startswith(b"GET"):
                writer.write(MODELS)
                continue
            end = EVENT.replace(b"null", b'"stop"') + b"data: [DONE]\n\n"
            writer.write(HEAD + b"%x\r\n%b\r\n" % (len(end), end))
            await writer.drain()
            # The client has its answer before the stream's last chunk.
            await told.wait()
            told.clear()
            writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    engine = UpstreamEngine(address, {"solver": "served"})
    async with Gateway(engine) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            for _ in range(3):
                answer = await client.post("/chat/completions", json={**ASK, "stream": True})
                assert answer.text.endswith("data: [DONE]\n\n")
                told.set()
                while engine._client is None or not engine._client._idle:  # noqa: ASYNC110  its loop is another
                    await asyncio.sleep(0.005)
    assert connections == 1
    server.close()


async def test_a_slow_reader_makes_the_server_wait_instead_of_filling_memory() -> None:
    piece, pieces = b"x" * (1 << 16), 1024
    sent = 0
    moved = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(pieces):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            sent += len(piece)
            moved.set()
        writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    http = HttpClient(address, {}, timeout_s=30, connect_timeout_s=5, max_connections=2)
    async with http.stream("GET", "/") as reply:
        # Until the server has stood still for a while: its and our socket buffers are full, and so is what the client holds.
        while True:
            moved.clear()
            try:
                await asyncio.wait_for(moved.wait(), 0.5)
            except TimeoutError:
                break
        assert sent < len(piece) * pieces / 2, f"{sent >> 20} MiB were taken from the server while nobody read"
        held = sum(map(len, reply._connection.parts))
        assert held < 3 << 20, f"{held >> 20} MiB wait in memory"
        got = 0
        async for part in reply.pieces():
            got += len(part)
    assert got == len(piece) * pieces
    # A whole reply is as large as it is: nothing is held back that its reader waits for.
    assert len((await http.request("GET", "/")).body) == len(piece) * pieces
    await http.close()
    server.close()
