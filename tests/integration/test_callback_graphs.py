"""Hand-written graphs over real HTTP: the whole record of each shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send

from mappa_graph import Agent, CoachCallback, Policy, TraceStore
from tests.fakes.apps import Numbered, Tens, Words, add, chat, record, run_code
from tests.fakes.openai_server import OpenAIServer, tool_call
from tests.fakes.recorded import actions, check_joins, nodes


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(Numbered()) as server:
        yield server


async def test_a_graph_with_sync_and_async_nodes_and_a_conditional_loop_is_recorded_whole(server: OpenAIServer, tmp_path: Any) -> None:
    solver, critic = chat(server, "solver"), chat(server, "critic")

    async def solve(state: Words) -> Any:
        return {"words": [(await solver.ainvoke(f"solve {len(state['words'])}")).content]}

    def criticise(state: Words) -> Any:
        return {"words": [critic.invoke("what of it?").content]}

    def enough(state: Words) -> str:
        return END if len(state["words"]) >= 4 else "solve"

    graph = StateGraph(Words).add_node("solve", solve).add_node("criticise", criticise)
    graph.add_edge(START, "solve").add_edge("solve", "criticise").add_conditional_edges("criticise", enough, ["solve", END])
    coach = Tens()
    agents = [Agent("solver", role="solves"), Agent("critic", trainable=False)]
    async with CoachCallback(coach, store=tmp_path / "trace.db", agents=agents) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
        assert nodes(trace) == [
            ("solve", 1, 1, "done", []),
            ("criticise", 2, 1, "done", [0]),
            ("solve", 3, 1, "done", [1]),
            ("criticise", 4, 1, "done", [2]),
        ]
        assert actions(trace) == [
            ("solver", "solve", "solver 1", []),
            ("critic", "criticise", "critic 1", []),
            ("solver", "solve", "solver 2", []),
            ("critic", "criticise", "critic 2", []),
        ]
        assert trace.edges == ((0, 1), (1, 2), (2, 3))
        assert check_joins(trace, server) == 4
        assert [a.trainable for a in trace.actions] == [True, False, True, False]
        assert all(a.kept for a in trace.actions)
        assert {id: v.score for id, v in trace.verdicts.items()} == {a.id: 10.0 for a in trace.actions}
        assert [c.action_id for c in coach.cases] == [a.id for a in trace.actions]
        assert coach.cases[0].card.role == "solves"
        assert trace.transitions[0].input == {"words": []}
        assert trace.transitions[1].output == {"words": ["critic 1"]}
        assert trace.episode.status == "done"
        assert trace.episode.ended >= trace.episode.started > 0
        assert not callback.failures
        assert not callback.unknown
    with TraceStore(tmp_path / "trace.db") as store:
        assert store.episode(trace.episode.id) == trace


async def test_tool_calls_are_answered_by_their_tool_runs_and_an_artifact_is_the_record(server: OpenAIServer) -> None:
    replies = iter(
        [
            {
                "content": "",
                "tool_calls": [tool_call("add", {"a": 1, "b": 2}, "c1"), tool_call("run_code", {"code": "print('out')"}, "c2")],
            },
            {"content": "", "tool_calls": [tool_call("nothing_such", {}, "c1"), tool_call("add", {"a": "x"}, "c2")]},
            "the end",
        ]
    )
    server.reply = lambda body: next(replies)
    model = Policy("solver", base_url=server.url).bind_tools([add, run_code])

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def more(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("tools", ToolNode([add, run_code]))
    graph.add_edge(START, "solve").add_conditional_edges("solve", more, ["tools", END]).add_edge("tools", "solve")
    coach = Tens()
    async with CoachCallback(coach, store=None) as callback:
        trace = await record(graph.compile(), {"messages": [("user", "go")]}, callback)
    assert nodes(trace) == [
        ("solve", 1, 1, "done", []),
        ("tools", 2, 1, "done", [0]),
        ("solve", 3, 1, "done", [1]),
        ("tools", 4, 1, "done", [2]),
        ("solve", 5, 1, "done", [3]),
    ]
    first, second, last = trace.actions
    assert {e.name: (e.status, e.result, e.tool_call_id, e.code) for e in first.executions} == {
        "add": ("ok", "3", "c1", '{"a": 1, "b": 2}'),
        "python": ("ok", None, "c2", "print('out')"),
    }
    assert next(e for e in first.executions if e.name == "python").stdout == "out\n"
    errors = {e.name: (e.status, e.error.type if e.error else "", e.tool_call_id) for e in second.executions}
    assert errors == {"nothing_such": ("error", "ToolError", "c1"), "add": ("error", "ValidationError", "c2")}
    assert last.executions == ()
    assert trace.edges == ((0, 1), (1, 2))
    assert check_joins(trace, server) == 3
    assert {c.action_id: len(c.executions) for c in coach.cases} == {first.id: 2, second.id: 2, last.id: 0}


async def test_fenced_code_that_a_node_runs_through_a_tool_belongs_to_the_call_before_it(server: OpenAIServer) -> None:
    coder = chat(server, "coder")

    async def solve(state: Words) -> Any:
        words = []
        for _ in range(2):
            said = await coder.ainvoke("write code")
            call = {"name": "run_code", "args": {"code": said.content}, "id": str(uuid4()), "type": "tool_call"}
            words.append((await run_code.ainvoke(call)).content)
        return {"words": words}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    coach = Tens()
    async with CoachCallback(coach, store=None, agents=[Agent("coder")]) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [[e.code for e in a.executions] for a in trace.actions] == [["coder 1"], ["coder 2"]]
    assert [[e.code for e in c.executions] for c in coach.cases] == [["coder 1"], ["coder 2"]]
    assert trace.edges == ((0, 1),)


async def test_parallel_nodes_join_and_sends_follow_what_sent_them(server: OpenAIServer) -> None:
    models = {name: chat(server, name) for name in ("planner", "left", "right", "judge", "worker", "boss")}

    def says(name: str) -> Any:
        async def node(state: Any) -> Any:
            return {"words": [(await models[name].ainvoke("go")).content]}

        return node

    def fan(state: Words) -> list[Send]:
        return [Send("worker", {"words": [str(i)]}) for i in range(3)]

    graph = StateGraph(Words)
    for name in models:
        graph.add_node(name, says(name))
    graph.add_edge(START, "planner").add_edge("planner", "left").add_edge("planner", "right").add_edge(["left", "right"], "judge")
    graph.add_conditional_edges("judge", fan, ["worker"]).add_edge("worker", "boss").add_edge("boss", END)
    agents = [Agent(name) for name in models]
    async with CoachCallback(None, store=None, agents=agents) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    place = {t.path: [i for i, u in enumerate(trace.transitions) if u.path == t.path] for t in trace.transitions}
    parents = {t.path: set(nodes(trace)[i][4]) for i, t in enumerate(trace.transitions)}
    assert {k: len(v) for k, v in place.items()} == {"planner": 1, "left": 1, "right": 1, "judge": 1, "worker": 3, "boss": 1}
    assert parents["left"] == parents["right"] == set(place["planner"])
    assert parents["judge"] == {*place["left"], *place["right"]}
    assert parents["worker"] == set(place["judge"])
    assert parents["boss"] == set(place["worker"])
    by_agent: dict[str, list[int]] = {}
    for i, action in enumerate(trace.actions):
        by_agent.setdefault(action.agent, []).append(i)
    p, left, right, j, b = (by_agent[n][0] for n in ("planner", "left", "right", "judge", "boss"))
    expected = {(p, left), (p, right), (left, j), (right, j)} | {(j, w) for w in by_agent["worker"]} | {(w, b) for w in by_agent["worker"]}
    assert set(trace.edges) == expected
    assert check_joins(trace, server) == 8
