"""Apps of the shapes that traces come in: each is made anew around a fake server, and recorded live beside whatever else listens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send

from mappa_graph import Agent, CoachCallback, Policy, mark
from mappa_graph.record import Episode, EpisodeTrace

from .apps import Numbered, Words, add, asks, chat, run_code, scripted
from .openai_server import OpenAIServer, tool_call


@dataclass
class Shape:
    app: Any
    state: Any
    agents: list[Agent] | None


@tool
def boom(what: str) -> str:
    """Raises."""
    raise ValueError(f"no {what}\nat all")


class Twice(AgentMiddleware):
    """Calls the model twice and keeps the second answer."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        await handler(request)
        return await handler(request)


def loop(server: OpenAIServer) -> Shape:
    """A hand-written graph: a loop over an async and a sync node that keep texts, not messages."""
    server.reply = Numbered()
    solver, critic = chat(server, "solver"), chat(server, "critic")

    async def solve(state: Words) -> Any:
        return {"words": [(await solver.ainvoke(f"solve {len(state['words'])}")).content]}

    def criticise(state: Words) -> Any:
        return {"words": [critic.invoke([("system", "be kind"), ("user", "what of it?")]).content]}

    def enough(state: Words) -> str:
        return END if len(state["words"]) >= 4 else "solve"

    graph = StateGraph(Words).add_node("solve", solve).add_node("criticise", criticise)
    graph.add_edge(START, "solve").add_edge("solve", "criticise").add_conditional_edges("criticise", enough, ["solve", END])
    return Shape(graph.compile(), {"words": []}, [Agent("solver"), Agent("critic", trainable=False)])


def tools(server: OpenAIServer) -> Shape:
    """A hand-written graph with a ToolNode: answers, an artifact, an unknown tool, wrong arguments, a tool that raises."""
    server.reply = scripted(
        solver=[
            asks(tool_call("add", {"a": 1, "b": 2}, "c1"), tool_call("run_code", {"code": "print('out')"}, "c2")),
            asks(tool_call("nothing_such", {}, "c1"), tool_call("add", {"a": "x"}, "c2")),
            asks(tool_call("boom", {"what": "luck"}, "c9"), text="I try"),
            "the end",
        ]
    )
    used = [add, run_code, boom]
    model = Policy("solver", base_url=server.url).bind_tools(used)

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def more(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("tools", ToolNode(used, handle_tool_errors=True))
    graph.add_edge(START, "solve").add_conditional_edges("solve", more, ["tools", END]).add_edge("tools", "solve")
    return Shape(graph.compile(), {"messages": [("user", "go")]}, None)


def agent(server: OpenAIServer) -> Shape:
    """`create_agent` with tools side by side, and a middleware that drops a draft."""
    call = asks(tool_call("add", {"a": 1, "b": 2}, "c1"), tool_call("add", {"a": 3, "b": 4}, "c2"))
    server.reply = scripted(solver=["draft", call, "draft 2", "done"])
    model = Policy("solver", base_url=server.url, role="solves")
    return Shape(
        create_agent(model, tools=[add], middleware=[Twice()], name="solver"),
        {"messages": [{"role": "user", "content": "go"}]},
        None,
    )


def fan(server: OpenAIServer) -> Shape:
    """Parallel nodes, a join, sends, and what follows them."""
    server.reply = Numbered()
    models = {name: chat(server, name) for name in ("planner", "left", "right", "judge", "worker", "boss")}

    def says(name: str) -> Any:
        async def node(state: Any) -> Any:
            return {"words": [(await models[name].ainvoke("go")).content]}

        return node

    def spread(state: Words) -> list[Send]:
        return [Send("worker", {"words": [str(i)]}) for i in range(3)]

    graph = StateGraph(Words)
    for name in models:
        graph.add_node(name, says(name))
    graph.add_edge(START, "planner").add_edge("planner", "left").add_edge("planner", "right").add_edge(["left", "right"], "judge")
    graph.add_conditional_edges("judge", spread, ["worker"]).add_edge("worker", "boss").add_edge("boss", END)
    return Shape(graph.compile(), {"words": []}, [Agent(name) for name in models])


def nested(server: OpenAIServer) -> Shape:
    """A subgraph as a node, a command that names where to go, and a subagent that is a tool."""
    server.reply = scripted(
        planner=["a plan"], solver=[asks(tool_call("ask_helper", {"question": "why?"}, "h1")), "because"], helper=["that is why"]
    )
    helper = create_agent(mark(chat(server, "helper"), "helper"), tools=[], name="helper")

    @tool
    async def ask_helper(question: str) -> str:
        """Asks the helper."""
        out = await helper.ainvoke({"messages": [("user", question)]})
        return str(out["messages"][-1].content)

    planner = mark(chat(server, "planner"), "planner")

    async def plan(state: MessagesState) -> Command[Any]:
        return Command(update={"messages": [await planner.ainvoke(state["messages"])]}, goto="solver")

    solver = create_agent(mark(chat(server, "solver"), "solver"), tools=[ask_helper], name="solver")
    graph = StateGraph(MessagesState).add_node("plan", plan, destinations=("solver",)).add_node("solver", solver)
    graph.add_edge(START, "plan")
    return Shape(graph.compile(), {"messages": [("user", "go")]}, None)


def retried(server: OpenAIServer) -> Shape:
    """A node that fails once and is run again."""
    server.reply = Numbered()
    solver = chat(server, "solver")
    tries: list[int] = []

    async def solve(state: Words) -> Any:
        said = (await solver.ainvoke("go")).content
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("once")
        return {"words": [said]}

    policy = RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=RuntimeError)
    graph = StateGraph(Words).add_node("solve", solve, retry_policy=policy).add_edge(START, "solve")
    return Shape(graph.compile(), {"words": []}, [Agent("solver")])


def failing(server: OpenAIServer) -> Shape:
    """A node whose server refuses, which fails the run."""
    server.reply = lambda body: (400, {"error": {"message": "too long", "type": "invalid_request_error", "code": None, "param": None}})
    solver = chat(server, "solver")

    async def solve(state: Words) -> Any:
        return {"words": [(await solver.ainvoke("go")).content]}

    return Shape(StateGraph(Words).add_node("solve", solve).add_edge(START, "solve").compile(), {"words": []}, [Agent("solver")])


SHAPES: dict[str, Callable[[OpenAIServer], Shape]] = {f.__name__: f for f in (loop, tools, agent, fan, nested, retried, failing)}


async def run_live(shape: Shape, callbacks: Iterable[Any] = (), **config: Any) -> EpisodeTrace:
    """One run, recorded by `CoachCallback` beside other callbacks; a run that fails is recorded too."""
    async with CoachCallback(None, store=None, agents=shape.agents) as callback:
        id = str(uuid4())
        callback.begin(Episode(id, task="the task"))
        given = {"callbacks": [callback, *callbacks], "run_id": UUID(id), "configurable": {"thread_id": "thread 1"}, **config}
        try:
            await shape.app.ainvoke(shape.state, given)
        except Exception:
            return await callback.finish(id)
        return await callback.finish(id)
