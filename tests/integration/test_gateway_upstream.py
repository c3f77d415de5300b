"""A gateway in front of another server: what is sent up, what comes back, and what an upstream can do wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from mappa_graph.errors import ConfigError, EngineError
from mappa_graph.gateway import Canary, Gateway
from mappa_graph.gateway.http import HttpClient, HttpError, HttpTimeout
from mappa_graph.gateway.upstream import UpstreamEngine
from mappa_graph.store import TraceStore
from tests.fakes.upstream import Upstream

ASK: dict[str, Any] = {"model": "solver", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def address(upstream: Upstream) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(upstream, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    with TraceStore(tmp_path / "t.db") as opened:
        yield opened


@pytest.fixture
async def gateway(address: str, store: TraceStore) -> AsyncIterator[Gateway]:
    async with Gateway(UpstreamEngine(address, {"solver": "served"}, api_key="up"), store) as running:
        yield running


async def post(gateway: Gateway, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        return await client.post("/chat/completions", json=body)


def said(stream: str) -> str:
    """The text of a stream's events, however they were cut."""
    events = [json.loads(line[5:]) for line in stream.split("\n") if line.startswith("data:") and "[DONE]" not in line]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_asked_for_kept_and_not_passed_on(gateway: Gateway, upstream: Upstream, store: TraceStore, stream: bool) -> None:
    extra = {"response_format": {"type": "json_object"}, "tool_choice": "auto", "custom": 1}
    response = await post(gateway, {**ASK, **extra, "stream": stream, "seed": 0})
    sent = upstream.bodies[-1]
    assert sent["model"] == "served" and sent["return_token_ids"] is True and sent["logprobs"] is True and sent["seed"] == 0
    assert {key: sent[key] for key in extra} == extra
    assert "token_ids" not in response.text and '"logprob"' not in response.text
    (call,) = store.orphan_calls()
    assert call.prompt_ids == tuple(range(16)) and call.completion_ids == (1000, 1001, 1002, 1003) and call.logprobs == (-0.5,) * 4
    assert call.text == "xxxx" and call.id in response.text
    if not stream:
        message = response.json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "xxxx", "reasoning": "because"}
        assert response.json()["usage"] == {"prompt_tokens": 16, "completion_tokens": 4}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_and_ids_that_the_client_wants_are_passed_on(gateway: Gateway, stream: bool) -> None:
    response = await post(gateway, {**ASK, "stream": stream, "logprobs": True, "top_logprobs": 0, "return_token_ids": True})
    assert response.text.count('"logprob":-0.5') == 4 and response.text.count("prompt_token_ids") == 1


@pytest.mark.parametrize("fault", ["drop_ids", "lose"])
async def test_a_call_whose_tokens_are_not_all_there_is_served_and_kept_without_any(
    gateway: Gateway, upstream: Upstream, store: TraceStore, fault: str
) -> None:
    setattr(upstream, fault, True)
    response = await post(gateway, {**ASK, "stream": True})
    assert said(response.text) == "xxxx" and "[DONE]" in response.text
    (call,) = store.orphan_calls()
    assert call.text == "xxxx" and call.completion_ids == () and call.logprobs == ()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_comes_through_with_status_body_and_headers(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    upstream.error = (422, b'{"error": {"message": "bad tool"}}')
    response = await post(gateway, {**ASK, "stream": stream})
    assert (response.status_code, response.content) == upstream.error and response.headers["retry-after"] == "3"


async def test_a_stream_that_breaks_off_is_an_error_event_and_kept_as_such(gateway: Gateway, upstream: Upstream, store: TraceStore) -> None:
    upstream.break_off = True
    response = await post(gateway, {**ASK, "stream": True})
    last = [line for line in response.text.split("\n\n") if line][-1]
    assert "broke off" in json.loads(last[6:])["error"]["message"]
    (call,) = store.orphan_calls()
    assert call.finish_reason == "error" and call.completion_ids == (1000,)


async def test_adapters_are_versions_that_the_server_loads_and_unloads_by_name(
    gateway: Gateway, upstream: Upstream, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    await gateway.publish("solver", tmp_path, canary=Canary([1, 2], [3, 4], [-0.25, -0.25]))
    assert upstream.names == ["served", "solver@v1"]
    assert (await post(gateway, ASK)).json()["model"] == "solver@v1" and upstream.bodies[-1]["model"] == "solver@v1"
    await gateway.publish("solver", tmp_path)
    await post(gateway, ASK)
    assert "served" in upstream.names and "solver@v2" in upstream.names and "solver@v1" not in upstream.names
    for canary in (Canary([1], [2], [-3.0]), Canary([1], [2], [-0.25], temperature=0.5)):
        with pytest.raises(EngineError):
            await gateway.publish("solver", tmp_path, canary=canary)
    with pytest.raises(EngineError, match="not a LoRA adapter"):
        await gateway.publish("solver", tmp_path / "none")
    assert gateway.versions() == {"solver": 2}


async def test_a_server_that_is_not_there_or_serves_something_else_is_said_at_the_start(address: str) -> None:
    with pytest.raises(EngineError, match="does not serve other"):
        await UpstreamEngine(address, {"solver": "other"}).start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(EngineError, match="can't be reached"):
        await UpstreamEngine(f"http://127.0.0.1:{port}/v1", {"solver": "served"}).start()
    with pytest.raises(ConfigError, match="base_url"):
        UpstreamEngine("localhost:8000", {"solver": "served"})


async def test_a_server_that_dies_is_a_retryable_error(upstream: Upstream) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(upstream, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with Gateway(UpstreamEngine(address, {"solver": "served"})) as gateway:
        assert (await post(gateway, ASK)).status_code == 200
        server.should_exit = True
        thread.join()
        listener.close()
        for stream in (False, True):
            response = await post(gateway, {**ASK, "stream": stream})
            assert response.status_code == 503 and "can't be reached" in response.text


async def answering(data: bytes, *, then_hang: bool = False) -> tuple[asyncio.Server, str, list[int]]:
    """A server that gives the same bytes to every connection, and then closes it."""
    connections: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        if then_hang:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


def client(address: str, timeout_s: float = 10.0) -> HttpClient:
    return HttpClient(address, {}, timeout_s=timeout_s, connect_timeout_s=5.0, max_connections=2)


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced_unseen() -> None:
    server, address, connections = await answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    http = client(address)
    for _ in range(3):
        assert (await http.request("GET", "/")).body == b"ok"
    assert len(connections) == 3
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ncut",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 abc\r\n\r\n",
    ],
)
async def test_a_broken_answer_is_an_error_and_no_hang(data: bytes) -> None:
    server, address, _ = await answering(data)
    with pytest.raises(HttpError):
        await client(address).request("GET", "/")
    server.close()


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ncut"])
async def test_a_server_that_goes_quiet_is_a_time_out(data: bytes) -> None:
    server, address, _ = await answering(data, then_hang=True)
    with pytest.raises(HttpTimeout):
        await client(address, timeout_s=0.1).request("GET", "/")
    server.close()


async def test_chunks_trailers_and_bodies_without_a_length_are_read_to_their_end() -> None:
    for data in (
        b"transfer-encoding: chunked\r\n\r\n3;x=1\r\nhel\r\n2\r\nlo\r\n0\r\nx-late: 1\r\n\r\n",
        b"connection: close\r\n\r\nhello",
    ):
        server, address, _ = await answering(b"HTTP/1.1 201 Created\r\nX-Kind: A\r\n" + data)
        reply = await client(address).request("POST", "/x", b"body")
        assert (reply.status, reply.headers["x-kind"], reply.body) == (201, "A", b"hello")
        server.close()
