"""The gateway's other endpoints, where the engine has them: plain completions and responses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from langchain_openai import ChatOpenAI, OpenAI

from mappa_graph.gateway import Gateway
from mappa_graph.gateway.upstream import UpstreamEngine
from mappa_graph.store import TraceStore
from tests.fakes.engine import ScriptedEngine
from tests.fakes.upstream import Upstream

IDS, PROMPT = (1000, 1001, 1002, 1003), tuple(range(16))


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    with TraceStore(tmp_path / "t.db") as store:
        yield store


@pytest.fixture
async def gateway(upstream: Upstream, store: TraceStore) -> AsyncIterator[Gateway]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(upstream, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    engine = UpstreamEngine(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", {"solver": "served"})
    async with Gateway(engine, store) as running:
        yield running
    server.should_exit = True
    thread.join()


async def post(gateway: Gateway, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        return await client.post(path, json={"model": "solver", **body}, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_completion_is_kept_with_its_tokens_and_marked(
    gateway: Gateway, upstream: Upstream, store: TraceStore, stream: bool
) -> None:
    body = {"prompt": "once", "stream": stream, "max_tokens": 4, "stop": ["z"], "seed": 0, "echo_back": 1}
    response = await post(gateway, "/completions", body, **{"x-mappa-agent": "teller", "x-mappa-episode": "e1"})
    sent = upstream.bodies[-1]
    assert (sent["model"], sent["prompt"], sent["logprobs"], sent["return_token_ids"]) == ("served", "once", 0, True)
    assert (sent["max_tokens"], sent["stop"], sent["seed"], sent["echo_back"]) == (4, ["z"], 0, 1) and "messages" not in sent
    assert "token_ids" not in response.text and "token_logprobs" not in response.text
    (call,) = store.orphan_calls()
    assert (call.prompt_ids, call.completion_ids, call.logprobs) == ((0, *PROMPT), IDS, (-0.5,) * 4)
    assert (call.text, call.agent, call.episode, call.policy, call.version) == ("xxxx", "teller", "e1", "solver", 0)
    assert call.messages == ({"role": "user", "content": "once"},) and call.sampling["endpoint"] == "/completions"
    assert call.id in response.text and '"model":"solver@v0"' in response.text
    if not stream:
        (choice,) = response.json()["choices"]
        assert choice == {"index": 0, "text": "xxxx", "logprobs": None, "finish_reason": "stop"}


@pytest.mark.parametrize("stream", [False, True])
async def test_stock_clients_read_plain_completions(gateway: Gateway, store: TraceStore, stream: bool) -> None:
    client = openai.AsyncOpenAI(base_url=gateway.url, api_key="x")
    asked: dict[str, Any] = {"model": "solver", "prompt": ["a", "b"], "logprobs": 1}
    if stream:
        pieces = [c async for event in await client.completions.create(**asked, stream=True) for c in event.choices]
        assert ["".join(c.text for c in pieces if c.index == i) for i in (0, 1)] == ["xxxx", "xxxx"]
        assert all(c.logprobs is not None and c.logprobs.token_logprobs == [-0.5] for c in pieces)
    else:
        reply = await client.completions.create(**asked)
        assert [c.text for c in reply.choices] == ["xxxx", "xxxx"]
        assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.token_logprobs == [-0.5] * 4
    assert await OpenAI(model="solver", base_url=gateway.url, api_key="x", streaming=stream).ainvoke("once") == "xxxx"
    kept = [(c.index, c.prompt_ids[0]) for c in store.orphan_calls()]
    assert sorted(kept) == [(0, 0), (0, 0), (1, 1)], "each prompt of a request has its own ids"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [False, True])
async def test_a_response_passes_unchanged_and_is_kept_with_tokens_where_there_are_any(
    gateway: Gateway, upstream: Upstream, store: TraceStore, stream: bool, ids: bool
) -> None:
    upstream.responses_have_ids = ids
    model = ChatOpenAI(model="solver", base_url=gateway.url, api_key="x", use_responses_api=True, streaming=stream)
    message = await model.ainvoke("hi", extra_headers={"x-mappa-agent": "a"})
    assert message.text == "xxxx" and upstream.bodies[-1]["model"] == "served"
    call = store.call(str(message.response_metadata["id"]))
    assert call is not None and call.id == "resp_up" and call.text == "xxxx" and call.agent == "a"
    assert call.messages[0]["content"] == "hi" and call.finish_reason == "stop"
    assert (call.prompt_ids, call.completion_ids) == ((PROMPT, IDS) if ids else ((), ()))
    raw = await post(gateway, "/responses", {"input": "hi", "stream": stream})
    assert ('"token_ids"' in raw.text) is ids


async def test_a_response_stream_that_breaks_off_is_an_error_and_kept_without_tokens(
    gateway: Gateway, upstream: Upstream, store: TraceStore
) -> None:
    upstream.break_off = True
    response = await post(gateway, "/responses", {"input": "hi", "stream": True})
    assert response.text.count("output_text.delta") >= 4 and "broke off" in response.text
    (call,) = store.orphan_calls()
    assert call.id == "resp_up" and call.finish_reason == "abort" and call.completion_ids == ()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/completions", {"prompt": "x"}), ("/responses", {"input": "x"})])
async def test_an_upstream_or_engine_without_the_endpoint_says_so_in_openais_shape(
    gateway: Gateway, upstream: Upstream, store: TraceStore, path: str, body: dict[str, Any], stream: bool
) -> None:
    upstream.lacks = ("/completions", "/responses")
    response = await post(gateway, path, {**body, "stream": stream})
    assert response.status_code == 404 and f"has no {path}" in response.json()["error"]["message"]
    async with Gateway(ScriptedEngine("solver"), store) as other:
        error = (await post(other, path, {**body, "stream": stream})).json()["error"]
    assert f"the scripted engine has no /v1{path}" in error["message"] and error["code"] == "not_found"
    assert store.counts()["calls"] == 0


@pytest.mark.parametrize("path", ["/completions", "/responses"])
async def test_bad_bodies_and_upstream_errors_keep_their_status(gateway: Gateway, upstream: Upstream, path: str) -> None:
    ask = {"prompt": "x", "input": "x"}
    assert (await post(gateway, path, {**ask, "model": "nobody"})).status_code == 404
    assert (await post(gateway, path, {**ask, "model": 3})).status_code == 400
    if path == "/completions":
        for wrong in ({"prompt": []}, {"prompt": None}, {"prompt": "x", "logprobs": 99}, {"prompt": "x", "n": 0}):
            assert (await post(gateway, path, wrong)).status_code == 400
    upstream.error = (422, json.dumps({"error": {"message": "no"}}).encode())
    for stream in (False, True):
        response = await post(gateway, path, {**ask, "stream": stream})
        assert (response.status_code, response.content) == upstream.error
