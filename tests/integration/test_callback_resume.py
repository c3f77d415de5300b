"""Runs that stop and go on: interrupts resumed by a handler that saw nothing before, retries, forks, cached nodes, tasks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import CachePolicy, Command, RetryPolicy, interrupt

from mappa_graph import Agent, CoachCallback, TraceStore
from mappa_graph.record import EpisodeTrace
from tests.fakes.apps import Numbered, Tens, Words, asks, chat, record
from tests.fakes.openai_server import OpenAIServer, tool_call
from tests.fakes.recorded import actions, check_joins, nodes


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(Numbered()) as server:
        yield server


def says(server: OpenAIServer, name: str) -> Any:
    model = chat(server, name)

    async def node(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    return node


@tool
def ask_human(question: str) -> str:
    """Asks."""
    return str(interrupt(question))


def node_app(server: OpenAIServer, saver: Any) -> Any:
    model = chat(server, "b")

    async def asking(state: Words) -> Any:
        before = (await model.ainvoke("before")).content
        return {"words": [before, interrupt("well?"), (await model.ainvoke("after")).content]}

    graph = StateGraph(Words).add_node("a", says(server, "a")).add_node("b", asking).add_node("side", says(server, "side"))
    graph.add_node("c", says(server, "c")).add_edge(START, "a").add_edge("a", "b").add_edge("a", "side").add_edge(["b", "side"], "c")
    return graph.compile(checkpointer=saver)


async def halves(app: Any, state: Any, store: Any, agents: Any) -> tuple[EpisodeTrace, EpisodeTrace, Tens, Tens]:
    """The record after the interrupt, and after a fresh handler went on; with each handler's coach."""
    config = {"configurable": {"thread_id": str(uuid4())}}
    first, second = Tens(), Tens()
    async with CoachCallback(first, store=store, agents=agents) as callback:
        await app.ainvoke(state, {**config, "callbacks": [callback]})
    before = next(store.traces())
    async with CoachCallback(second, store=store, agents=agents) as callback:
        await app.ainvoke(Command(resume="yes"), {**config, "callbacks": [callback]})
    traces = list(store.traces())
    assert len(traces) == 1
    return before, traces[0], first, second


async def test_an_interrupt_in_a_node_is_resumed_by_a_fresh_handler(server: OpenAIServer, tmp_path: Path) -> None:
    agents = [Agent(n) for n in ("a", "b", "side", "c")]
    with TraceStore(tmp_path / "t.db") as store:
        before, after, first, second = await halves(node_app(server, InMemorySaver()), {"words": []}, store, agents)
    assert before.episode.status == "interrupted"
    assert {t.path: t.status for t in before.transitions} == {"a": "done", "b": "interrupted", "side": "done"}
    assert after.episode.status == "done"
    assert after.episode.id == before.episode.id
    place = {(t.path, t.attempt): i for i, t in enumerate(after.transitions)}
    shape = {(n[0], n[2]): (n[1], n[3], n[4]) for n in nodes(after)}
    a, b, again, side = place["a", 1], place["b", 1], place["b", 2], place["side", 1]
    assert shape == {
        ("a", 1): (1, "done", []),
        ("b", 1): (2, "interrupted", [a]),
        ("side", 1): (2, "done", [a]),
        ("b", 2): (2, "done", [a]),
        ("c", 1): (3, "done", shape["c", 1][2]),
    }
    assert set(shape["c", 1][2]) == {again, side}
    assert after.transitions[b].task_id == after.transitions[again].task_id
    said = {x.output: i for i, x in enumerate(after.actions)}
    assert {x.output: x.kept for x in after.actions} == {"a 1": True, "b 1": False, "side 1": True, "b 2": True, "b 3": True, "c 1": True}
    expected = [("a 1", "b 1"), ("a 1", "side 1"), ("a 1", "b 2"), ("b 2", "b 3"), ("b 3", "c 1"), ("side 1", "c 1")]
    assert set(after.edges) == {(said[x], said[y]) for x, y in expected}
    assert check_joins(after, server) == 6
    assert {c.output for c in first.cases} == {"a 1", "side 1"}
    assert {c.output for c in second.cases} == {"b 1", "b 2", "b 3", "c 1"}
    assert len(after.verdicts) == 6


async def test_a_run_resumed_at_once_goes_on_in_the_handler_that_saw_it_stop(server: OpenAIServer, tmp_path: Path) -> None:
    app = node_app(server, InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    with TraceStore(tmp_path / "t.db") as store:
        async with CoachCallback(Tens(), store=store, agents=[Agent(n) for n in ("a", "b", "side", "c")]) as callback:
            await app.ainvoke({"words": []}, {**config, "callbacks": [callback]})
            await app.ainvoke(Command(resume="yes"), {**config, "callbacks": [callback]})
        (trace,) = store.traces()
    assert trace.episode.status == "done"
    kept = {x.output: x.kept for x in trace.actions}
    assert kept == {"a 1": True, "b 1": False, "side 1": True, "b 2": True, "b 3": True, "c 1": True}
    said = {x.output: i for i, x in enumerate(trace.actions)}
    expected = [("a 1", "b 1"), ("a 1", "side 1"), ("a 1", "b 2"), ("b 2", "b 3"), ("b 3", "c 1"), ("side 1", "c 1")]
    assert set(trace.edges) == {(said[x], said[y]) for x, y in expected}
    assert len(trace.verdicts) == 6


def tool_app(server: OpenAIServer, saver: Any) -> Any:
    model = chat(server, "solver").bind_tools([ask_human])

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("tools", ToolNode([ask_human])).add_edge(START, "solve")
    graph.add_conditional_edges("solve", lambda s: "tools" if s["messages"][-1].tool_calls else END, ["tools", END]).add_edge(
        "tools", "solve"
    )
    return graph.compile(checkpointer=saver)


def asks_first(body: dict[str, Any]) -> Any:
    """A solver that asks a human, and is done once it was answered."""
    answered = any(m["role"] == "tool" for m in body["messages"])
    return "done" if answered else asks(tool_call("ask_human", {"question": "well?"}, "c1"))


async def test_an_interrupt_in_a_tool_is_no_tool_error(server: OpenAIServer, tmp_path: Path) -> None:
    server.reply = asks_first
    app = tool_app(server, InMemorySaver())
    with TraceStore(tmp_path / "t.db") as store:
        before, after, first, second = await halves(app, {"messages": [("user", "go")]}, store, [Agent("solver")])
    assert before.actions[0].executions == ()
    assert nodes(after) == [
        ("solve", 1, 1, "done", []),
        ("tools", 2, 1, "interrupted", [0]),
        ("tools", 2, 2, "done", [0]),
        ("solve", 3, 1, "done", [2]),
    ]
    assert actions(after) == [("solver", "solve", "", [("ask_human", "ok", "yes")]), ("solver", "solve", "done", [])]
    assert after.edges == ((0, 1),)
    assert first.cases == []
    assert [len(c.executions) for c in second.cases] == [1, 0]


def sub_app(server: OpenAIServer, saver: Any) -> Any:
    model = chat(server, "late")

    async def asking(state: Words) -> Any:
        return {"words": [interrupt("?"), (await model.ainvoke("go")).content]}

    inner = StateGraph(Words).add_node("early", says(server, "early")).add_node("late", asking)
    inner.add_edge(START, "early").add_edge("early", "late")
    graph = StateGraph(Words).add_node("sub", inner.compile()).add_node("end", says(server, "end"))
    graph.add_edge(START, "sub").add_edge("sub", "end")
    return graph.compile(checkpointer=saver)


async def test_an_interrupt_in_a_subgraph_goes_on_in_the_same_graph(server: OpenAIServer, tmp_path: Path) -> None:
    agents = [Agent(n) for n in ("early", "late", "end")]
    with TraceStore(tmp_path / "t.db") as store:
        before, after, _, _ = await halves(sub_app(server, InMemorySaver()), {"words": []}, store, agents)
    assert [(t.path, t.status) for t in before.transitions] == [("sub", "interrupted"), ("sub/early", "done"), ("sub/late", "interrupted")]
    assert nodes(after) == [
        ("sub", 1, 1, "interrupted", []),
        ("sub/early", 1, 1, "done", [0]),
        ("sub/late", 2, 1, "interrupted", [1]),
        ("sub", 1, 2, "done", []),
        ("sub/late", 2, 2, "done", [1]),
        ("end", 2, 1, "done", [3]),
    ]
    assert [a.output for a in after.actions] == ["early 1", "late 1", "end 1"]
    assert after.edges == ((0, 1), (1, 2))


FIRST_HALF = """
import asyncio, sys
from types import SimpleNamespace
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from mappa_graph import Agent, CoachCallback
from tests.integration import test_callback_resume as apps

async def main():
    url, saves, traces = sys.argv[1:]
    async with AsyncSqliteSaver.from_conn_string(saves) as saver:
        for name, (build, agents, state) in apps.STOPPING.items():
            async with CoachCallback(None, store=f"{traces}/{name}.db", agents=[Agent(a) for a in agents]) as callback:
                config = {"callbacks": [callback], "configurable": {"thread_id": name}}
                await build(SimpleNamespace(url=url), saver).ainvoke(state, config)

asyncio.run(main())
"""
STOPPING: dict[str, tuple[Any, list[str], Any]] = {
    "node": (node_app, ["a", "b", "side", "c"], {"words": []}),
    "tool": (tool_app, ["solver"], {"messages": [("user", "go")]}),
    "sub": (sub_app, ["early", "late", "end"], {"words": []}),
}


async def test_an_interrupt_in_a_node_a_tool_or_a_subgraph_is_resumed_by_another_process(server: OpenAIServer, tmp_path: Path) -> None:
    sqlite = pytest.importorskip("langgraph.checkpoint.sqlite.aio")
    numbered = Numbered()
    server.reply = lambda body: asks_first(body) if body["model"] == "solver" else numbered(body)
    saves, root = str(tmp_path / "saves.db"), Path(__file__).parents[2]
    command = [sys.executable, "-c", FIRST_HALF, server.url, saves, str(tmp_path)]
    ran = await asyncio.to_thread(subprocess.run, command, cwd=root, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    after = {}
    async with sqlite.AsyncSqliteSaver.from_conn_string(saves) as saver:
        for name, (build, agents, _) in STOPPING.items():
            with TraceStore(tmp_path / f"{name}.db") as store:
                (before,) = store.traces()
                assert before.episode.status == "interrupted"
                async with CoachCallback(Tens(), store=store, agents=[Agent(a) for a in agents]) as callback:
                    config = {"callbacks": [callback], "configurable": {"thread_id": name}}
                    await build(server, saver).ainvoke(Command(resume="yes"), config)
                (trace,) = store.traces()
            assert trace.episode.status == "done" and trace.episode.id == before.episode.id
            assert len(trace.verdicts) == len(trace.actions) == check_joins(trace, server)
            after[name] = trace
    assert sorted(a.output for a in after["node"].actions) == ["a 1", "b 1", "b 2", "b 3", "c 1", "side 1"]
    assert len(after["node"].edges) == 6
    assert actions(after["tool"]) == [("solver", "solve", "", [("ask_human", "ok", "yes")]), ("solver", "solve", "done", [])]
    assert after["tool"].edges == ((0, 1),)
    assert [a.output for a in after["sub"].actions] == ["early 1", "late 1", "end 1"]
    assert after["sub"].edges == ((0, 1), (1, 2))
    assert [(n[0], n[2], n[3]) for n in nodes(after["sub"])] == [
        ("sub", 1, "interrupted"),
        ("sub/early", 1, "done"),
        ("sub/late", 1, "interrupted"),
        ("sub", 2, "done"),
        ("sub/late", 2, "done"),
        ("end", 1, "done"),
    ]


async def test_a_retried_attempt_is_recorded_and_its_calls_are_not_kept(server: OpenAIServer) -> None:
    model = chat(server, "solver")
    tries: list[int] = []

    async def flaky(state: Words) -> Any:
        said = (await model.ainvoke("go")).content
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("again")
        return {"words": [said]}

    graph = StateGraph(Words).add_node("first", says(server, "first"))
    graph.add_node("flaky", flaky, retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=3)).add_node("last", says(server, "last"))
    graph.add_edge(START, "first").add_edge("first", "flaky").add_edge("flaky", "last")
    coach = Tens()
    async with CoachCallback(coach, store=None, agents=[Agent(n) for n in ("first", "solver", "last")]) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert nodes(trace) == [
        ("first", 1, 1, "done", []),
        ("flaky", 2, 1, "failed", [0]),
        ("flaky", 2, 2, "failed", [0]),
        ("flaky", 2, 3, "done", [0]),
        ("last", 3, 1, "done", [3]),
    ]
    assert trace.transitions[1].error == "ConnectionError: again"
    assert [(a.output, a.kept) for a in trace.actions] == [
        ("first 1", True),
        ("solver 1", False),
        ("solver 2", False),
        ("solver 3", True),
        ("last 1", True),
    ]
    assert trace.edges == ((0, 1), (0, 2), (0, 3), (3, 4))
    assert len(coach.cases) == 5


async def test_a_fork_from_a_checkpoint_is_an_episode_of_its_own(server: OpenAIServer, tmp_path: Path) -> None:
    app = node_app(server, InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    with TraceStore(tmp_path / "t.db") as store:
        async with CoachCallback(None, store=store, agents=[Agent(n) for n in ("a", "b", "side", "c")]) as callback:
            await app.ainvoke({"words": []}, {**config, "callbacks": [callback]})
            past = [s async for s in app.aget_state_history(config)]
            fork = next(s for s in past if s.next == ("a",))
            await app.ainvoke(None, {**fork.config, "callbacks": [callback]})
            await callback.drain()
        first, second = store.traces()
    assert first.episode.id != second.episode.id
    assert {t.path for t in second.transitions} == {"a", "b", "side"}
    assert second.episode.thread_id == "t"
    assert check_joins(second, server) == 3


async def test_a_cached_node_makes_no_transition_and_what_follows_it_still_has_a_place(server: OpenAIServer) -> None:
    graph = StateGraph(Words).add_node("a", says(server, "a"), cache_policy=CachePolicy()).add_node("b", says(server, "b"))
    graph.add_edge(START, "a").add_edge("a", "b")
    app = graph.compile(cache=InMemoryCache())
    async with CoachCallback(None, store=None, agents=[Agent("a"), Agent("b")]) as callback:
        first = await record(app, {"words": []}, callback)
        second = await record(app, {"words": []}, callback)
    assert [n[0] for n in nodes(first)] == ["a", "b"]
    assert nodes(second) == [("b", 2, 1, "done", [])]
    assert [a.output for a in second.actions] == ["b 2"]


async def test_tasks_of_the_functional_api_follow_the_tasks_that_ended_before(server: OpenAIServer) -> None:
    models = {n: chat(server, n) for n in ("one", "two", "flow")}

    @task
    async def one(text: str) -> str:
        return str((await models["one"].ainvoke(text)).content)

    @task
    async def two(text: str) -> str:
        return str((await models["two"].ainvoke(text)).content)

    @entrypoint()
    async def flow(text: str) -> str:
        start = (await models["flow"].ainvoke(text)).content
        parts = [one(start), one(start)]
        both = [await p for p in parts]
        return await two(" ".join(both))

    async with CoachCallback(None, store=None, agents=[Agent(n) for n in models]) as callback:
        trace = await record(flow, "go", callback)
    assert nodes(trace) == [
        ("flow", 0, 1, "done", []),
        ("flow/one", 0, 1, "done", [0]),
        ("flow/one", 0, 1, "done", [0]),
        ("flow/two", 0, 1, "done", [1, 2]),
    ]
    assert [a.agent for a in trace.actions] == ["flow", "one", "one", "two"]
    assert trace.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert check_joins(trace, server) == 4
