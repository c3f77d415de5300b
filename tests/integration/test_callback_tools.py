"""Tool calls that go wrong before a tool runs: each is answered, and the answer is the action's execution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from mappa_graph import Agent, CoachCallback
from tests.fakes.apps import Numbered, Tens, add, asks, chat, record, scripted
from tests.fakes.openai_server import OpenAIServer, tool_call
from tests.fakes.recorded import check_joins, nodes

ASK = {"messages": [("user", "go")]}


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(Numbered()) as server:
        yield server


def graph(server: OpenAIServer, style: str) -> Any:
    if style == "create_agent":
        return create_agent(chat(server, "solver"), tools=[add], name="solver")
    model = chat(server, "solver").bind_tools([add])

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    made = StateGraph(MessagesState).add_node("solve", solve).add_node("tools", ToolNode([add])).add_edge(START, "solve")
    made.add_conditional_edges("solve", lambda s: "tools" if s["messages"][-1].tool_calls else END, ["tools", END])
    return made.add_edge("tools", "solve").compile()


@pytest.mark.parametrize("style", ["ToolNode", "create_agent"])
@pytest.mark.parametrize(
    ("name", "args", "told"),
    [("subtract", {"a": 1, "b": 2}, "subtract is not a valid tool"), ("add", {"a": "one"}, "Field required")],
    ids=["unknown tool", "bad arguments"],
)
async def test_a_call_that_no_tool_can_take_is_answered_with_its_error(
    server: OpenAIServer, style: str, name: str, args: dict[str, Any], told: str
) -> None:
    server.reply = scripted(solver=[asks(tool_call(name, args, "c1")), "done"])
    coach = Tens()
    async with CoachCallback(coach, store=None, agents=[Agent("solver")]) as callback:
        trace = await record(graph(server, style), ASK, callback)
    assert [n[3] for n in nodes(trace)] == ["done"] * 3
    (execution,) = trace.actions[0].executions
    assert execution.status == "error" and execution.name == name and execution.tool_call_id == "c1"
    assert told in f"{execution.result} {execution.error and execution.error.message} {execution.stderr}"
    assert trace.actions[1].executions == () and trace.edges == ((0, 1),)
    assert check_joins(trace, server) == 2
    # The coach sees what came of the call before it judges.
    assert [len(case.executions) for case in coach.cases] == [1, 0]
