"""What recording costs: time per event in the handler, in an app, and over a long conversation.

    python tests/benchmarks/callback.py

Prints one JSON object. `handler_us` is the time inside the handler's methods; `app_us` the wall time that an event adds to a graph of
scripted models, the recording thread's included; `conversation_us` the handler's time for one model call with a history of that many
turns; `slow_coach_s` how long a batch of runs takes without a coach, and with one that takes two seconds an action, which should be no
more than 1.1 times as long plus one such latency (`at_most`).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph

sys.path.insert(0, str(Path(__file__).parents[2]))

from mappa_graph import Agent, CoachCallback, Verdict
from mappa_graph.record import Episode

EVENTS = (
    "on_chain_start",
    "on_chain_end",
    "on_chat_model_start",
    "on_llm_end",
    "on_tool_start",
    "on_tool_end",
)


class Scripted(BaseChatModel):
    """Answers at once."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("an answer of some words", response_metadata={"id": uuid4().hex}))])

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return self._generate(messages)


def app(nodes: int) -> Any:
    model = Scripted(metadata={"mappa_agent": "solver"})

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    for i in range(nodes):
        graph.add_node(f"n{i}", node).add_edge(START if i == 0 else f"n{i - 1}", f"n{i}")
    return graph.compile()


def timed(callback: CoachCallback) -> list[float]:
    """Wraps the handler's methods; the list fills with seconds per event."""
    took: list[float] = []
    for name in EVENTS:
        method = getattr(callback, name)

        def run(*args: Any, _method: Any = method, **kwargs: Any) -> None:
            start = time.perf_counter()
            _method(*args, **kwargs)
            took.append(time.perf_counter() - start)

        setattr(callback, name, run)
    return took


async def in_app(graph: Any, runs: int, callbacks: list[Any]) -> float:
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        await graph.ainvoke({"messages": [("user", "hello")]}, {"callbacks": callbacks, "recursion_limit": 1000})
        took.append(time.perf_counter() - start)
    return statistics.median(took)


async def conversation(turns: int) -> float:
    """Median seconds in the handler for the events of one more call, with a history of `turns` turns that was seen before."""
    async with CoachCallback(None, store=None) as callback:
        history: list[BaseMessage] = []
        took: list[float] = []
        model = Scripted(metadata={"mappa_agent": "solver"})
        calls = timed(callback)

        async def node(state: MessagesState) -> Any:
            for _ in range(turns + 50):
                history.append(HumanMessage(f"question {len(history)}", id=str(uuid4())))
                before = len(calls)
                history.append(await model.ainvoke(history))
                took.append(sum(calls[before:]))
            return {"messages": []}

        await (
            StateGraph(MessagesState)
            .add_node("node", node)
            .add_edge(START, "node")
            .compile()
            .ainvoke({"messages": []}, {"callbacks": [callback]})
        )
        return statistics.median(took[-50:])


class Slow:
    """Takes its time over each verdict."""

    name = "slow"

    async def score(self, case: Any) -> Verdict:
        await asyncio.sleep(2)
        return Verdict(5.0)


async def batch(coach: Slow | None) -> float:
    """Seconds that 16 runs of 10 nodes take, 0.3 s a model call, until every verdict is in."""
    model = Scripted(metadata={"mappa_agent": "solver"})

    async def node(state: MessagesState) -> Any:
        await asyncio.sleep(0.3)
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    for i in range(10):
        graph.add_node(f"n{i}", node).add_edge(START if i == 0 else f"n{i - 1}", f"n{i}")
    app = graph.compile()
    start = time.perf_counter()
    async with CoachCallback(coach, store=None, concurrency=256) as callback:

        async def run() -> None:
            id = uuid4()
            callback.begin(Episode(str(id)))
            await app.ainvoke({"messages": [("user", "hello")]}, {"callbacks": [callback], "run_id": id})
            await callback.finish(str(id))

        await asyncio.gather(*(run() for _ in range(16)))
    return time.perf_counter() - start


async def main() -> None:
    graph, runs = app(10), 60
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        events = timed(callback)
        await in_app(graph, runs, [callback])
        per_event = sorted(events)
        count = len(events) / runs
    plain, recorded = [], []
    for _ in range(3):
        plain.append(await in_app(graph, runs, []))
        async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
            recorded.append(await in_app(graph, runs, [callback]))
    added = (min(recorded) - min(plain)) / count
    result = {
        "events_per_run": count,
        "handler_us": {p: round(per_event[int(len(per_event) * q)] * 1e6, 1) for p, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "app_us": round(added * 1e6, 1),
        "run_ms": {"plain": round(min(plain) * 1e3, 2), "recorded": round(min(recorded) * 1e3, 2)},
        "conversation_us": {turns: round(await conversation(turns) * 1e6, 1) for turns in (1, 10, 100, 400)},
    }
    without = await batch(None)
    result["slow_coach_s"] = {"without": round(without, 2), "with": round(await batch(Slow()), 2), "at_most": round(1.1 * without + 2, 2)}
    result["load_average"] = [round(load, 1) for load in os.getloadavg()]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
