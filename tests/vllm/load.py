"""Sixty-four clients that call a gateway until they are told to stop, and check each reply against what was kept of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from mappa_graph.gateway import Gateway
from mappa_graph.record import Call


@dataclass
class Load:
    """What the clients saw."""

    calls: list[tuple[Call, float, float]] = field(default_factory=list)
    """Each call, when it began and when it had ended, on the loop's clock."""
    refused: list[httpx.Response] = field(default_factory=list)
    """Replies with another status than 200, and streams that ended with an error object."""
    broken: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def clients(gateway: Gateway, policies: Sequence[str], count: int = 64, tokens: int = 12) -> AsyncIterator[Load]:
    """Half of the clients stream. An answer that is not whole, or not what the store has, fails the test."""
    load = Load()
    loop = asyncio.get_running_loop()
    store = gateway.store
    assert store is not None

    async def client(number: int, http: httpx.AsyncClient) -> None:
        turn = 0
        while not load.done.is_set():
            turn += 1
            stream = number % 2 == 0
            body = {
                "model": policies[number % len(policies)],
                "messages": [{"role": "user", "content": "x" * (number % 7)}],
                "max_tokens": tokens, "seed": number * 1000 + turn, "temperature": 0.8, "stream": stream,
            }  # fmt: skip
            begun = loop.time()
            reply = await http.post("/chat/completions", json=body)
            if reply.status_code != 200:
                load.refused.append(reply)
                await asyncio.sleep(0.2)
                continue
            if stream:
                events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
                chunks = [json.loads(event) for event in events if event != "[DONE]"]
                if any("error" in chunk for chunk in chunks):
                    load.refused.append(reply)
                    load.broken += 1
                    continue
                assert events[-1] == "[DONE]", events[-1]
                assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
                text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
                (served,) = {chunk["model"] for chunk in chunks}
                id_ = chunks[0]["id"]
            else:
                whole = reply.json()
                id_, served, text = whole["id"], whole["model"], whole["choices"][0]["message"]["content"]
            call = store.call(id_)
            assert call is not None and call.completion_ids and call.text == text
            assert served == f"{call.policy}@v{call.version}"
            load.calls.append((call, begun, loop.time()))

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=500, limits=limits) as http:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(client(number, http))
            try:
                yield load
            finally:
                load.done.set()
    ids = [call.id for call, *_ in load.calls]
    assert len(set(ids)) == len(ids)
