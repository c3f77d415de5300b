"""Agents that LangChain and its companions build, and agents inside agents: the whole record of each shape."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

from mappa_graph import Agent, CoachCallback, Policy, mark
from tests.fakes.apps import Numbered, Tens, Words, add, asks, chat, record, scripted
from tests.fakes.openai_server import OpenAIServer, tool_call
from tests.fakes.recorded import actions, check_joins, nodes

ASK = {"messages": [("user", "go")]}


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(Numbered()) as server:
        yield server


class Twice(AgentMiddleware):
    """Calls the model twice and keeps the second answer."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        await handler(request)
        return await handler(request)


async def test_create_agent_with_tools_and_middleware(server: OpenAIServer) -> None:
    call = asks(tool_call("add", {"a": 1, "b": 2}, "c1"), tool_call("add", {"a": 3, "b": 4}, "c2"))
    server.reply = scripted(solver=["draft", call, "draft 2", "done"])
    app = create_agent(Policy("solver", base_url=server.url), tools=[add], middleware=[Twice()], name="solver")
    coach = Tens()
    async with CoachCallback(coach, store=None) as callback:
        trace = await record(app, ASK, callback)
    assert nodes(trace) == [
        ("model", 1, 1, "done", []),
        ("tools", 2, 1, "done", [0]),
        ("tools", 2, 1, "done", [0]),
        ("model", 3, 1, "done", [1, 2]),
    ]
    assert [(a[:3]) for a in actions(trace)] == [
        ("solver", "model", "draft"),
        ("solver", "model", ""),
        ("solver", "model", "draft 2"),
        ("solver", "model", "done"),
    ]
    assert sorted(e.result or "" for e in trace.actions[1].executions) == ["3", "7"]
    assert [a.kept for a in trace.actions] == [False, True, False, True]
    assert trace.edges == ((0, 1), (1, 2), (2, 3))
    assert check_joins(trace, server) == 4
    assert len(coach.cases) == 4


async def test_create_react_agent(server: OpenAIServer) -> None:
    from langgraph.prebuilt import create_react_agent

    server.reply = scripted(solver=[asks(tool_call("add", {"a": 1, "b": 2})), "done"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        app = create_react_agent(chat(server, "solver"), [add])
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        trace = await record(app, ASK, callback)
    assert nodes(trace) == [("agent", 1, 1, "done", []), ("tools", 2, 1, "done", [0]), ("agent", 3, 1, "done", [1])]
    assert actions(trace) == [("solver", "agent", "", [("add", "ok", "3")]), ("solver", "agent", "done", [])]
    assert trace.edges == ((0, 1),)
    assert check_joins(trace, server) == 2


async def test_a_mark_in_with_config_that_create_agent_drops_is_reported(server: OpenAIServer) -> None:
    lost = chat(server, "gpt").with_config(metadata={"mappa_agent": "solver"})
    app = create_agent(lost, tools=[add])
    async with CoachCallback(Tens(), store=None, agents=[Agent("solver")]) as callback:
        trace = await record(app, ASK, callback)
        assert dict(callback.unknown) == {"model (gpt)": 1}
        assert not callback.agents_seen
    assert not trace.verdicts
    assert [(a.agent, a.trainable) for a in trace.actions] == [("model", False)]


async def test_supervisor_hands_off_and_synthetic_messages_are_no_actions(server: OpenAIServer) -> None:
    supervisor = pytest.importorskip("langgraph_supervisor")
    server.reply = scripted(
        boss=[asks(tool_call("transfer_to_math", {}, "h1")), "all done"],
        math=[asks(tool_call("add", {"a": 1, "b": 2}, "h1")), "it is 3"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        math = create_agent(Policy("math", base_url=server.url, policy="math"), [add], name="math")
        app = supervisor.create_supervisor([math], model=Policy("boss", base_url=server.url)).compile()
    async with CoachCallback(None, store=None) as callback:
        trace = await record(app, ASK, callback)
    assert [n[0] for n in nodes(trace)] == [
        "supervisor",
        "supervisor/agent",
        "supervisor/tools",
        "math",
        "math/model",
        "math/tools",
        "math/model",
        "supervisor",
        "supervisor/agent",
    ]
    assert [(a[0], a[2]) for a in actions(trace)] == [("boss", ""), ("math", ""), ("math", "it is 3"), ("boss", "all done")]
    assert [len(a.executions) for a in trace.actions] == [1, 1, 0, 0]
    assert trace.actions[0].executions[0].name == "transfer_to_math"
    assert trace.actions[1].executions[0].result == "3"
    assert trace.edges == ((0, 1), (1, 2), (2, 3))
    assert all(t.status == "done" for t in trace.transitions)
    assert check_joins(trace, server) == 4


async def test_swarm_hands_off(server: OpenAIServer) -> None:
    swarm = pytest.importorskip("langgraph_swarm")
    server.reply = scripted(alice=[asks(tool_call("transfer_to_bob", {}, "x"))], bob=["bob here"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alice = create_agent(Policy("alice", base_url=server.url), [swarm.create_handoff_tool(agent_name="bob")], name="alice")
        bob = create_agent(Policy("bob", base_url=server.url), [add], name="bob")
        app = swarm.create_swarm([alice, bob], default_active_agent="alice").compile()
    async with CoachCallback(None, store=None) as callback:
        trace = await record(app, ASK, callback)
    assert [(n[0], n[3]) for n in nodes(trace)] == [
        ("alice", "done"),
        ("alice/model", "done"),
        ("alice/tools", "done"),
        ("bob", "done"),
        ("bob/model", "done"),
    ]
    assert actions(trace) == [
        ("alice", "alice/model", "", [("transfer_to_bob", "ok", "Successfully transferred to bob")]),
        ("bob", "bob/model", "bob here", []),
    ]
    assert trace.edges == ((0, 1),)
    assert check_joins(trace, server) == 2


async def test_subgraph_as_a_node_and_invoked_in_a_node(server: OpenAIServer) -> None:
    models = {name: chat(server, name) for name in ("one", "two", "three", "outer")}

    def says(name: str) -> Any:
        async def node(state: Words) -> Any:
            return {"words": [(await models[name].ainvoke("go")).content]}

        return node

    inner = (
        StateGraph(Words).add_node("one", says("one")).add_node("two", says("two")).add_edge(START, "one").add_edge("one", "two").compile()
    )
    other = StateGraph(Words).add_node("three", says("three")).add_edge(START, "three").compile(name="other")

    async def calls(state: Words) -> Any:
        said = (await models["outer"].ainvoke("before")).content
        for _ in range(2):
            await other.ainvoke({"words": []})
        return {"words": [said, (await models["outer"].ainvoke("after")).content]}

    graph = StateGraph(Words).add_node("sub", inner).add_node("calls", calls).add_edge(START, "sub").add_edge("sub", "calls")
    async with CoachCallback(None, store=None, agents=[Agent(n) for n in models]) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert nodes(trace) == [
        ("sub", 1, 1, "done", []),
        ("sub/one", 1, 1, "done", [0]),
        ("sub/two", 2, 1, "done", [1]),
        ("calls", 2, 1, "done", [0]),
        ("calls/three", 1, 1, "done", [3]),
        ("calls/three", 1, 1, "done", [3]),
    ]
    assert [a[0] for a in actions(trace)] == ["one", "two", "outer", "three", "three", "outer"]
    assert trace.edges == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    assert check_joins(trace, server) == 6


async def test_an_agent_used_as_a_tool(server: OpenAIServer) -> None:
    server.reply = scripted(
        boss=[asks(tool_call("ask_helper", {"question": "1+2"}, "same")), "so 3"],
        helper=[asks(tool_call("add", {"a": 1, "b": 2}, "same")), "3"],
    )
    helper = create_agent(chat(server, "helper"), [add])

    @tool
    async def ask_helper(question: str) -> str:
        """Asks."""
        state = await helper.ainvoke({"messages": [("user", question)]})
        return str(state["messages"][-1].content)

    app = create_agent(chat(server, "boss"), [ask_helper])
    async with CoachCallback(None, store=None, agents=[Agent("boss"), Agent("helper")]) as callback:
        trace = await record(app, ASK, callback)
    assert nodes(trace) == [
        ("model", 1, 1, "done", []),
        ("tools", 2, 1, "done", [0]),
        ("tools/model", 1, 1, "done", [1]),
        ("tools/tools", 2, 1, "done", [2]),
        ("tools/model", 3, 1, "done", [3]),
        ("model", 3, 1, "done", [1]),
    ]
    assert actions(trace) == [
        ("boss", "model", "", [("ask_helper", "ok", "3")]),
        ("helper", "tools/model", "", [("add", "ok", "3")]),
        ("helper", "tools/model", "3", []),
        ("boss", "model", "so 3", []),
    ]
    assert trace.edges == ((0, 1), (1, 2), (2, 3))
    assert check_joins(trace, server) == 4


async def test_parallel_agents_whose_tool_call_ids_collide(server: OpenAIServer) -> None:
    server.reply = scripted(
        left=[asks(tool_call("add", {"a": 1, "b": 1}, "c")), "left"], right=[asks(tool_call("add", {"a": 2, "b": 2}, "c")), "right"]
    )
    graph = StateGraph(MessagesState)
    for name in ("left", "right"):
        graph.add_node(name, create_agent(chat(server, name), [add])).add_edge(START, name)
    async with CoachCallback(None, store=None, agents=[Agent("left"), Agent("right")]) as callback:
        trace = await record(graph.compile(), ASK, callback)
    got = {(a.agent, a.output): [e.result for e in a.executions] for a in trace.actions}
    assert got == {("left", ""): ["2"], ("left", "left"): [], ("right", ""): ["4"], ("right", "right"): []}
    place = {(a.agent, a.output): i for i, a in enumerate(trace.actions)}
    assert set(trace.edges) == {(place["left", ""], place["left", "left"]), (place["right", ""], place["right", "right"])}
    assert check_joins(trace, server) == 4


class Point(BaseModel):
    """A point."""

    x: int


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
async def test_structured_output_is_joined_also_where_it_is_malformed(server: OpenAIServer, method: Any) -> None:
    good: Any = asks(tool_call("Point", {"x": 1})) if method == "function_calling" else '{"x": 1}'
    bad: Any = asks(tool_call("Point", {"y": "?"})) if method == "function_calling" else "no json"
    server.reply = scripted(solver=[good, bad])
    model = Policy("solver", base_url=server.url, max_retries=0).with_structured_output(Point, method=method)

    async def solve(state: Words) -> Any:
        words = [str((await model.ainvoke("a point")).x)]
        with pytest.raises(Exception):
            await model.ainvoke("another")
        return {"words": words}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    coach = Tens()
    async with CoachCallback(coach, store=None) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [a.call_id for a in trace.actions] == ["call-1", "call-2"]
    assert [server.calls[a.call_id]["body"]["messages"][-1]["content"] for a in trace.actions if a.call_id] == ["a point", "another"]
    assert trace.actions[0].kept
    assert (trace.actions[1].error is None) == (method == "function_calling")
    assert trace.edges == ((0, 1),)


async def test_several_completions_of_one_prompt_are_actions_side_by_side(server: OpenAIServer) -> None:
    server.reply = lambda body: ["a", "b", "c"] if body.get("n") == 3 else "end"
    model = Policy("solver", base_url=server.url)

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke("go", n=3)]}

    async def after(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke("more")]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("after", after).add_edge(START, "solve").add_edge("solve", "after")
    coach = Tens()
    async with CoachCallback(coach, store=None) as callback:
        trace = await record(graph.compile(), ASK, callback)
    assert [(a.output, a.call_id, a.call_index, a.kept) for a in trace.actions] == [
        ("a", "call-1", 0, True),
        ("b", "call-1", 1, False),
        ("c", "call-1", 2, False),
        ("end", "call-2", 0, True),
    ]
    assert len({a.id for a in trace.actions}) == 4
    assert trace.edges == ((0, 3), (1, 3), (2, 3))
    assert len(trace.verdicts) == 4


async def test_a_command_to_the_parent_graph_is_no_failure(server: OpenAIServer) -> None:
    first, second = chat(server, "first"), chat(server, "second")

    async def leave(state: Words) -> Any:
        said = await first.ainvoke("go")
        return Command(goto="second", graph=Command.PARENT, update={"words": [said.content]})

    async def finish(state: Words) -> Any:
        return {"words": [(await second.ainvoke("go")).content]}

    inner = StateGraph(Words).add_node("leave", leave).add_edge(START, "leave").compile()
    graph = StateGraph(Words).add_node("sub", inner, destinations=("second",)).add_node("second", finish).add_edge(START, "sub")
    async with CoachCallback(None, store=None, agents=[Agent("first"), Agent("second")]) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert nodes(trace) == [("sub", 1, 1, "done", []), ("sub/leave", 1, 1, "done", [0]), ("second", 2, 1, "done", [0])]
    assert trace.transitions[1].output == {"command": {"goto": ["second"], "update": {"words": ["first 1"]}}}
    assert trace.edges == ((0, 1),)
    assert trace.episode.status == "done"


async def test_marks_of_the_model_win_over_the_mapping_and_the_mapping_over_names(server: OpenAIServer) -> None:
    plain, marked = chat(server, "gpt"), mark(chat(server, "gpt"), agent="marked", role="the marked one")

    def says(model: Any) -> Any:
        async def node(state: Words) -> Any:
            return {"words": [(await model.ainvoke("go")).content]}

        return node

    inner = StateGraph(Words).add_node("deep", says(plain)).add_edge(START, "deep").compile()
    graph = StateGraph(Words).add_node("a", says(marked)).add_node("b", says(plain)).add_node("planner", inner)
    graph.add_node("critic", says(plain)).add_node("noted", says(plain), metadata={"mappa_agent": "writer"})
    for before, after in [(START, "a"), ("a", "b"), ("b", "planner"), ("planner", "critic"), ("critic", "noted")]:
        graph.add_edge(before, after)
    agents = {"planner/**": Agent("planner"), "?": Agent("short"), "x": Agent("critic", trainable=False)}
    async with CoachCallback(None, store=None, agents=agents) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
        assert not callback.unknown
    assert [a.agent for a in trace.actions] == ["marked", "short", "planner", "critic", "writer"]
    assert [a.trainable for a in trace.actions] == [True, True, True, False, True]
