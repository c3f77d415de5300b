"""What recording costs, counted and not timed: work per event, and how much of the coach's time a batch of runs waits for."""

from __future__ import annotations

import asyncio
import statistics
import sys
from typing import Any
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph

from mappa_graph import Agent, CoachCallback, Verdict
from mappa_graph.record import Episode

TURNS = 100


class Scripted(BaseChatModel):
    """Answers at once."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("an answer", response_metadata={"id": uuid4().hex}))])

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return self._generate(messages)


def counted(callback: CoachCallback, name: str) -> list[int]:
    """Wraps a method of the handler; the list fills with the number of Python functions that each event calls."""
    method, counts = getattr(callback, name), []

    def run(*args: Any, **kwargs: Any) -> None:
        calls = 0

        def see(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(see)
        try:
            method(*args, **kwargs)
        finally:
            sys.setprofile(None)
        counts.append(calls)

    setattr(callback, name, run)
    return counts


async def test_a_call_late_in_a_long_conversation_costs_no_more_than_an_early_one() -> None:
    model = Scripted(metadata={"mappa_agent": "solver"})

    async def talk(state: MessagesState) -> Any:
        history: list[BaseMessage] = []
        for i in range(TURNS):
            history.append(HumanMessage(f"question {i}", id=f"q{i}"))
            history.append(await model.ainvoke(history))
        return {"messages": []}

    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        started, ended = counted(callback, "on_chat_model_start"), counted(callback, "on_llm_end")
        id = uuid4()
        callback.begin(Episode(str(id)))
        graph = StateGraph(MessagesState).add_node(talk).add_edge(START, "talk").compile()
        await graph.ainvoke({"messages": []}, {"callbacks": [callback], "run_id": id})
        trace = await callback.finish(str(id))
    assert len(started) == len(ended) == len(trace.actions) == TURNS
    # Each event does the same work; a few are charged with what the interpreter does now and then (imports, finalisers).
    for counts in (started, ended):
        assert statistics.median(counts[-20:]) <= statistics.median(counts[20:40]) + 2, counts
        assert statistics.median(counts) < TURNS / 2, counts
    assert [len(action.messages) for action in trace.actions[:3]] == [1, 3, 5] and len(trace.actions[-1].messages) == 2 * TURNS - 1


class Together:
    """A coach that answers nobody before all have asked: what would take turns would never end."""

    name = "together"

    def __init__(self, expected: int) -> None:
        self._barrier = asyncio.Barrier(expected)

    async def score(self, case: Any) -> Verdict:
        async with asyncio.timeout(30):
            await self._barrier.wait()
        return Verdict(7.0)


async def test_a_batch_of_runs_waits_for_one_verdict_and_not_for_their_sum() -> None:
    runs, nodes = 4, 3
    model = Scripted(metadata={"mappa_agent": "solver"})

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    for i in range(nodes):
        builder.add_node(f"n{i}", node).add_edge(START if i == 0 else f"n{i - 1}", f"n{i}")
    graph = builder.compile()

    async with CoachCallback(Together(runs * nodes), store=None, agents=[Agent("solver")], concurrency=runs * nodes) as callback:

        async def run() -> Any:
            id = uuid4()
            callback.begin(Episode(str(id)))
            await graph.ainvoke({"messages": [("user", "hello")]}, {"callbacks": [callback], "run_id": id})
            # The graph has ended while no verdict is there yet.
            return await callback.finish(str(id))

        traces = await asyncio.gather(*(run() for _ in range(runs)))
    assert [[v.score for v in trace.verdicts.values()] for trace in traces] == [[7.0] * nodes] * runs
