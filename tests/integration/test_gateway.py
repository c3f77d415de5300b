"""The gateway over HTTP: what it keeps, what it sends, what it refuses, and how it swaps."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI

from mappa_graph.errors import EngineError, GatewayError, StoreError
from mappa_graph.gateway import Canary, Gateway, RequestRefused
from mappa_graph.store import TraceStore
from tests.fakes.engine import ScriptedEngine

ASK: dict[str, Any] = {"model": "solver", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine("solver", "critic")


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with TraceStore(tmp_path / "t.db") as opened:
        yield opened


@pytest.fixture
async def gateway(engine: ScriptedEngine, store: TraceStore) -> AsyncIterator[Gateway]:
    async with Gateway(engine, store, max_body_bytes=10_000, max_inflight=3) as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as opened:
        yield opened


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_call_is_kept_exactly_and_the_reply_holds_only_what_was_asked_for(client: httpx.AsyncClient, store: TraceStore) -> None:
    headers = {"x-mappa-agent": "planner", "x-mappa-episode": "e7"}
    reply = (await client.post("/chat/completions", json={**ASK, "seed": 3, "temperature": 0.5}, headers=headers)).json()
    call = store.call(reply["id"])
    assert call is not None
    assert (call.prompt_ids, call.completion_ids, call.logprobs) == ((1, 2, 3), (4, 5), (-0.5, -0.25))
    assert (call.policy, call.version, call.agent, call.episode, call.text) == ("solver", 0, "planner", "e7", "hello there")
    assert call.sampling["seed"] == 3 and call.sampling["temperature"] == 0.5 and call.messages == tuple(ASK["messages"])
    assert 0 < call.started <= call.ended
    assert reply == {
        "id": call.id,
        "object": "chat.completion",
        "created": int(call.started),
        "model": "solver@v0",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello there"}, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


async def test_several_completions_are_calls_of_one_id(client: httpx.AsyncClient, store: TraceStore) -> None:
    reply = (await client.post("/chat/completions", json={**ASK, "n": 3, "return_token_ids": True})).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert all(store.call(reply["id"], i) is not None for i in range(3))
    assert reply["choices"][1]["token_ids"] == [4, 5] and reply["prompt_token_ids"] == [1, 2, 3]


async def test_a_call_is_in_the_store_before_the_reply_goes_out(gateway: Gateway, engine: ScriptedEngine, store: TraceStore) -> None:
    kept: list[int] = []
    add = store.aadd_calls

    async def slow(calls: Any) -> None:
        await asyncio.sleep(0.05)
        await add(calls)
        kept.append(len(calls))

    store.aadd_calls = slow  # type: ignore[method-assign]
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        await client.post("/chat/completions", json=ASK)
        assert kept == [1]
        async with client.stream("POST", "/chat/completions", json={**ASK, "stream": True}) as response:
            async for line in response.aiter_lines():
                if '"finish_reason":"stop"' in line:
                    assert kept == [1, 1]
                    break
            else:
                raise AssertionError("no final chunk")


async def test_a_stream_is_marked_for_the_join_and_ends_in_usage(client: httpx.AsyncClient, store: TraceStore) -> None:
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/chat/completions", json=body)
    first, last, usage, done = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert first["choices"][0]["delta"] == {"role": "assistant", "id": first["id"], "content": "hello"}
    assert last["choices"][0]["delta"] == {"content": " there"} and last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 5 and done == "[DONE]"
    assert {chunk["model"] for chunk in (first, last, usage)} == {"solver@v0"}
    call = store.call(first["id"])
    assert call is not None and call.completion_ids == (4, 5) and call.text == "hello there"
    assert "token_ids" not in response.text


async def test_the_first_chunk_goes_out_while_the_rest_is_awaited(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with client.stream("POST", "/chat/completions", json={**ASK, "stream": True}) as response:
        lines = response.aiter_lines()
        assert '"content":"hello"' in await asyncio.wait_for(anext(lines), 10)
        engine.release()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_the_engines_work(
    gateway: Gateway, engine: ScriptedEngine, store: TraceStore, stream: bool
) -> None:
    engine.hold = True
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        task = asyncio.ensure_future(client.post("/chat/completions", json={**ASK, "stream": stream}))
        await until(lambda: engine._gates)
        assert gateway.inflight()["solver"] == 1
        task.cancel()
        await asyncio.wait([task])
    await until(lambda: engine.cancelled == 1 and gateway.inflight()["solver"] == 0)
    # What a stream had sampled was seen by the app, and stays.
    await until(lambda: store.counts()["calls"] == stream)
    if stream:
        (call,) = store.orphan_calls()
        assert call.finish_reason == "abort" and call.completion_ids == (4,)


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "not an object"),
        (b"[" * 5000, 400, "not JSON"),
        ({"messages": ASK["messages"]}, 400, "model is None"),
        ({**ASK, "messages": []}, 400, "messages must be"),
        ({**ASK, "messages": ["x"]}, 400, "messages must be"),
        ({**ASK, "n": 0}, 400, "n is 0"),
        ({**ASK, "n": "many"}, 400, "n is 'many'"),
        ({**ASK, "temperature": -1}, 400, "temperature is -1"),
        ({**ASK, "top_p": 0}, 400, "top_p is 0"),
        ({**ASK, "max_tokens": 0}, 400, "max_tokens is 0"),
        ({**ASK, "stop": [1]}, 400, "stop is [1]"),
        ({**ASK, "tools": ["x"]}, 400, "tools must be"),
        ({**ASK, "model": "sovler"}, 404, "There are: critic, critic@v0, solver, solver@v0"),
        ({**ASK, "model": "solver@v7"}, 404, "solver@v7"),
        ({**ASK, "pad": "x" * 20_000}, 413, "10000 bytes"),
    ],
)
async def test_a_bad_request_gets_openais_error_shape(
    client: httpx.AsyncClient, engine: ScriptedEngine, body: Any, status: int, part: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post("/chat/completions", content=content)
    assert response.status_code == status
    assert part in response.json()["error"]["message"]
    assert engine.requests == []


async def test_unknown_paths_and_methods_are_errors_in_the_same_shape(client: httpx.AsyncClient) -> None:
    assert "this gateway serves" in (await client.post("/embeddings", json={})).json()["error"]["message"]
    assert (await client.get("/chat/completions")).status_code == 405


async def test_an_upstreams_refusal_is_passed_on_with_status_body_and_headers(gateway: Gateway, engine: ScriptedEngine) -> None:
    def refuse(_: Any) -> Any:
        raise RequestRefused("no", status=418, body=b'{"error": {"message": "teapot"}}', headers={"retry-after": "7"})

    engine.answer = refuse
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for stream in (False, True):
            response = await client.post("/chat/completions", json={**ASK, "stream": stream})
            assert (response.status_code, response.content) == (418, b'{"error": {"message": "teapot"}}')
            assert response.headers["retry-after"] == "7"


async def test_an_engines_failure_is_a_retryable_error_and_tells_no_internals(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    def fail(_: Any) -> Any:
        raise EngineError("the model failed")

    engine.answer = fail
    response = await client.post("/chat/completions", json=ASK)
    assert response.status_code == 503 and response.json()["error"]["message"] == "the model failed"

    def break_(_: Any) -> Any:
        raise KeyError("secret-path")

    engine.answer = break_
    response = await client.post("/chat/completions", json=ASK)
    assert response.status_code == 500 and "secret-path" not in response.text


async def test_a_call_that_can_not_be_kept_is_not_answered(client: httpx.AsyncClient, store: TraceStore) -> None:
    async def full(calls: Any) -> None:
        raise StoreError("the disk is full")

    store.aadd_calls = full  # type: ignore[method-assign]
    response = await client.post("/chat/completions", json=ASK)
    assert response.status_code == 500 and "the disk is full" in response.json()["error"]["message"]
    response = await client.post("/chat/completions", json={**ASK, "stream": True})
    *_, last = events(response.text)
    assert "the disk is full" in last["error"]["message"]
    with pytest.raises(openai.APIError, match="disk is full"):
        async for _ in await openai.AsyncOpenAI(base_url=str(client.base_url), api_key="x").chat.completions.create(**ASK, stream=True):
            pass


async def test_more_requests_than_allowed_are_told_to_come_back(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.hold = True
    held = [asyncio.ensure_future(client.post("/chat/completions", json=ASK)) for _ in range(3)]
    await until(lambda: len(engine._gates) == 3)
    refused = await client.post("/chat/completions", json=ASK)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    engine.release()
    assert [r.status_code for r in await asyncio.gather(*held)] == [200] * 3


async def test_a_key_is_asked_for_where_one_is_set(engine: ScriptedEngine) -> None:
    async with Gateway(engine, api_key="s3cret") as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert (await client.post("/chat/completions", json=ASK, headers=headers)).status_code == 401
                assert (await client.get("/models", headers=headers)).json()["error"]["code"] == "invalid_api_key"
        reply = await openai.AsyncOpenAI(base_url=gateway.url, api_key="s3cret").chat.completions.create(**ASK)
        assert reply.choices[0].message.content == "hello there"


async def test_models_health_and_metrics_show_what_is_served(gateway: Gateway, client: httpx.AsyncClient) -> None:
    await gateway.publish("solver", "new")
    await client.post("/chat/completions", json=ASK)
    await client.post("/chat/completions", json={**ASK, "model": "nobody"})
    assert [m["id"] for m in (await client.get("/models")).json()["data"]] == ["critic", "critic@v0", "solver", "solver@v1"]
    root = gateway.url.removesuffix("/v1")
    assert (await client.get(f"{root}/health")).json() == {"status": "ok", "versions": {"solver": 1, "critic": 0}}
    text = (await client.get(f"{root}/metrics")).text
    for line in (
        'mappa_calls_total{policy="solver",version="1",finish_reason="stop"} 1',
        'mappa_tokens_total{policy="solver",kind="completion"} 2',
        'mappa_errors_total{status="404"} 1',
        'mappa_version{policy="solver"} 1',
        'mappa_inflight{policy="solver"} 0',
        'mappa_publishes_total{policy="solver",result="done"} 1',
    ):
        assert line in text.splitlines()


async def test_a_taken_port_is_an_error_with_a_way_out(engine: ScriptedEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(GatewayError, match="port=0"):
            Gateway(engine, port=taken.getsockname()[1]).start()
    with pytest.raises(GatewayError, match="no such address"):
        Gateway(engine, host="203.0.113.7").start()
    with pytest.raises(GatewayError, match=r"0\.\.65535"):
        Gateway(engine, port=99_999).start()
    assert engine.events == []


async def test_an_engine_that_does_not_start_fails_the_start(engine: ScriptedEngine) -> None:
    async def fail() -> None:
        raise EngineError("no such model")

    engine.start = fail  # type: ignore[method-assign]
    gateway = Gateway(engine)
    with pytest.raises(EngineError, match="no such model"):
        gateway.start()
    with pytest.raises(GatewayError, match="not running"):
        gateway.versions()


def test_a_gateway_starts_and_stops_without_a_loop_and_again(engine: ScriptedEngine) -> None:
    gateway = Gateway(engine)
    with gateway:
        first = gateway.url
        assert httpx.post(f"{first}/chat/completions", json=ASK).status_code == 200
        with pytest.raises(GatewayError, match="running already"):
            gateway.start()
    gateway.stop()
    assert engine.events == ["start", "stop"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first}/models")


async def test_stopping_lets_calls_in_flight_end(engine: ScriptedEngine) -> None:
    gateway = Gateway(engine)
    await asyncio.to_thread(gateway.start)
    engine.hold = True
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        held = asyncio.ensure_future(client.post("/chat/completions", json=ASK))
        await until(lambda: engine._gates)
        stopping = asyncio.ensure_future(asyncio.to_thread(gateway.stop))
        await asyncio.sleep(0.2)
        assert not stopping.done()
        engine.release()
        assert (await held).status_code == 200
        await stopping


# -- versions


async def test_a_publish_turns_the_name_and_keeps_the_old_version_until_its_calls_ended(
    gateway: Gateway, client: httpx.AsyncClient, engine: ScriptedEngine, store: TraceStore
) -> None:
    engine.hold = True
    old = asyncio.ensure_future(client.post("/chat/completions", json=ASK))
    await until(lambda: engine._gates)
    assert await gateway.publish("solver", "weights") == 1
    assert gateway.versions() == {"solver": 1, "critic": 0} and engine.loaded["solver"] == [0, 1]
    engine.hold = False
    assert (await client.post("/chat/completions", json=ASK)).json()["model"] == "solver@v1"
    assert (await client.post("/chat/completions", json={**ASK, "model": "solver@v0"})).json()["model"] == "solver@v0"
    engine.release()
    assert (await old).json()["model"] == "solver@v0"
    await until(lambda: engine.loaded["solver"] == [1])
    assert (await client.post("/chat/completions", json={**ASK, "model": "solver@v0"})).status_code == 404
    assert [r.version for r in engine.requests] == [0, 1, 0]


async def test_a_canary_guards_the_name(gateway: Gateway, engine: ScriptedEngine) -> None:
    good = Canary([1], [2, 3], [-1.0, -1.005])
    assert await gateway.publish("solver", "a", canary=good) == 1
    for offset, canary in ((0.5, good), (float("nan"), good), (0.0, Canary([1], [2, 3], [-1.0])), (0.0, Canary([1], [], []))):
        engine.score_offset = offset
        with pytest.raises(EngineError, match="canary"):
            await gateway.publish("solver", "b", canary=canary)
        assert gateway.versions()["solver"] == 1 and engine.loaded["solver"] == [1]


async def test_weights_that_do_not_load_leave_all_as_it_was(gateway: Gateway, engine: ScriptedEngine) -> None:
    with pytest.raises(EngineError, match="can't be loaded"):
        await gateway.publish("solver", "broken")
    assert gateway.versions()["solver"] == 0 and engine.loaded["solver"] == [0]
    assert await gateway.publish("solver", "fine") == 2, "the number of a failed publish is not used again"


async def test_version_numbers_only_grow(gateway: Gateway) -> None:
    assert await gateway.publish("solver", "a", version=12) == 12
    assert await gateway.publish("solver", "b") == 13
    for used in (0, 5, 12, 13):
        with pytest.raises(GatewayError, match="never used again"):
            await gateway.publish("solver", "c", version=used)
    with pytest.raises(GatewayError, match="no policy 'sovler'"):
        await gateway.publish("sovler", "c")


async def test_publishes_of_one_policy_do_not_overlap(gateway: Gateway, engine: ScriptedEngine) -> None:
    numbers = await asyncio.gather(*(gateway.publish("solver", "w") for _ in range(10)))
    assert sorted(numbers) == list(range(1, 11)) and gateway.versions()["solver"] == 10
    await until(lambda: engine.loaded["solver"] == [10])


# -- a stock client


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_stock_chat_model_carries_the_calls_id(gateway: Gateway, store: TraceStore, streaming: bool) -> None:
    model = ChatOpenAI(model="solver", base_url=gateway.url, api_key="x", streaming=streaming, stream_usage=True)
    message = await model.ainvoke("hi")
    id = message.id if streaming else message.response_metadata["id"]
    call = store.call(str(id))
    assert call is not None and call.completion_ids == (4, 5)
    assert message.content == "hello there" and message.response_metadata["model_name"] == "solver@v0"
    assert message.usage_metadata is not None and message.usage_metadata["total_tokens"] == 5


@pytest.mark.parametrize("streaming", [False, True])
async def test_tools_and_tool_calls_pass_through(gateway: Gateway, engine: ScriptedEngine, store: TraceStore, streaming: bool) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    if streaming:
        original = engine.stream

        async def stream(request: Any) -> Any:
            async for chunk in original(request):
                if chunk.finish_reason:
                    yield type(chunk)(0, {"tool_calls": [{"index": 0, **call}]}, (5,), (-0.25,), finish_reason="tool_calls")
                else:
                    yield chunk

        engine.stream = stream  # type: ignore[method-assign]
    else:
        engine.answer = lambda _: {"text": "", "tool_calls": (call,), "finish_reason": "tool_calls"}

    def add(a: int) -> int:
        """Adds."""
        return a

    model = ChatOpenAI(model="solver", base_url=gateway.url, api_key="x", streaming=streaming).bind_tools([add], tool_choice="add")
    message = await model.ainvoke("hi")
    assert message.tool_calls == [{"name": "add", "args": {"a": 1}, "id": "call_1", "type": "tool_call"}]
    (request,) = engine.requests
    assert request.tools[0]["function"]["name"] == "add" and request.extra["tool_choice"]["function"]["name"] == "add"
    kept = store.call(str(message.id if streaming else message.response_metadata["id"]))
    assert kept is not None and kept.tool_calls == (call,) and kept.finish_reason == "tool_calls"
