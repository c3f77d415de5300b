"""Corners of LangGraph that change what a run's events look like."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AnyMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

from mappa_graph import Agent, CoachCallback, TraceStore, Verdict
from mappa_graph.coach.base import Case
from mappa_graph.record import Episode, EpisodeTrace
from tests.fakes.apps import Numbered, Tens, Words, add, asks, chat, record, scripted
from tests.fakes.openai_server import OpenAIServer, tool_call
from tests.fakes.recorded import actions, check_joins, nodes

ASK = {"messages": [("user", "go")]}


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(Numbered()) as server:
        yield server


def says(server: OpenAIServer, name: str) -> Any:
    model = chat(server, name)

    async def node(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    return node


def team(*names: str) -> list[Agent]:
    return [Agent(name) for name in names]


async def test_a_conditional_entry_point_is_no_transition_and_its_sends_start_the_graph(server: OpenAIServer) -> None:
    graph = StateGraph(Words).add_node("w", says(server, "w")).add_node("end", says(server, "end"))
    graph.add_conditional_edges(START, lambda s: [Send("w", {"words": ["1"]}), Send("w", {"words": ["2"]})], ["w"]).add_edge("w", "end")
    async with CoachCallback(None, store=None, agents=team("w", "end")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [n[:1] + n[4:] for n in nodes(trace)] == [("w", []), ("w", []), ("end", [0, 1])]
    assert trace.edges == ((0, 2), (1, 2))


async def test_a_map_in_the_middle_of_a_cycle(server: OpenAIServer) -> None:
    """plan -> (work, work) -> plan -> (work, work) -> plan: each worker follows the plan that sent it."""

    def fan(state: Words) -> Any:
        return END if len(state["words"]) > 6 else [Send("work", {"words": []}), Send("work", {"words": []})]

    graph = StateGraph(Words).add_node("plan", says(server, "plan")).add_node("work", says(server, "work"))
    graph.add_edge(START, "plan").add_conditional_edges("plan", fan, ["work", END]).add_edge("work", "plan")
    async with CoachCallback(None, store=None, agents=team("plan", "work")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [n[:1] + n[4:] for n in nodes(trace)] == [
        ("plan", []),
        ("work", [0]),
        ("work", [0]),
        ("plan", [1, 2]),
        ("work", [3]),
        ("work", [3]),
        ("plan", [4, 5]),
    ]
    assert trace.edges == ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6))


async def test_a_join_of_branches_of_unequal_length_follows_the_end_of_each(server: OpenAIServer) -> None:
    names = ("a", "short", "long1", "long2", "end")
    graph = StateGraph(Words)
    for name in names:
        graph.add_node(name, says(server, name))
    graph.add_edge(START, "a").add_edge("a", "short").add_edge("a", "long1").add_edge("long1", "long2").add_edge(["short", "long2"], "end")
    app = graph.compile()
    async with CoachCallback(None, store=None, agents=team(*names), graph=app) as callback:
        trace = await record(app, {"words": []}, callback)
    place = {t.id: t.path for t in trace.transitions}
    parents = {t.path: {place[p] for p in t.parents} for t in trace.transitions}
    assert parents == {"a": set(), "short": {"a"}, "long1": {"a"}, "long2": {"long1"}, "end": {"short", "long2"}}
    said = [a.agent for a in trace.actions]
    expected = {("a", "short"), ("a", "long1"), ("long1", "long2"), ("short", "end"), ("long2", "end")}
    assert {(said[x], said[y]) for x, y in trace.edges} == expected


async def test_router_labels_mean_what_the_graph_says_also_in_a_subgraph(server: OpenAIServer) -> None:
    inner = StateGraph(Words)
    names = ("a", "b", "after_a", "after_b")
    for name in names:
        inner.add_node(name, says(server, name))
    inner.add_edge(START, "a").add_edge(START, "b").add_edge("b", "after_b")
    inner.add_conditional_edges("a", lambda s: "yes", {"yes": "after_a", "no": END})
    app = StateGraph(Words).add_node("sub", inner.compile()).add_edge(START, "sub").compile()
    async with CoachCallback(None, store=None, agents=team(*names), graph=app) as callback:
        trace = await record(app, {"words": []}, callback)
    place = {t.id: t.path for t in trace.transitions}
    parents = {t.path: {place[p] for p in t.parents} for t in trace.transitions}
    assert parents["sub/after_a"] == {"sub/a"}
    assert parents["sub/after_b"] == {"sub/b"}
    said = [a.agent for a in trace.actions]
    assert {(said[x], said[y]) for x, y in trace.edges} == {("a", "after_a"), ("b", "after_b")}


async def test_sends_in_one_step_from_two_nodes_each_follow_their_own(server: OpenAIServer) -> None:
    graph = StateGraph(Words)
    for name in ("left", "right"):

        async def node(state: Words, name: str = name) -> Any:
            said = (await chat(server, name).ainvoke("go")).content
            return Command(update={"words": [said]}, goto=[Send("work", {"words": [name]})])

        graph.add_node(name, node, destinations=("work",)).add_edge(START, name)
    graph.add_node("work", says(server, "work"))
    async with CoachCallback(None, store=None, agents=team("left", "right", "work")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    place = {t.id: t.path for t in trace.transitions}
    follows = {(t.input["words"][0], place[p]) for t in trace.transitions if t.path == "work" for p in t.parents}
    assert follows == {("left", "left"), ("right", "right")}
    assert len(trace.edges) == 2


async def test_of_two_nodes_in_one_step_the_one_that_named_the_next_is_its_parent(server: OpenAIServer) -> None:
    async def jumps(state: Words) -> Any:
        return Command(update={"words": [(await chat(server, "jumps").ainvoke("go")).content]}, goto="after_jump")

    graph = StateGraph(Words).add_node("jumps", jumps, destinations=("after_jump",)).add_node("routes", says(server, "routes"))
    graph.add_node("after_jump", says(server, "after_jump")).add_node("after_route", says(server, "after_route"))
    graph.add_edge(START, "jumps").add_edge(START, "routes")
    graph.add_conditional_edges("routes", lambda s: "after_route", ["after_route"])
    async with CoachCallback(None, store=None, agents=team("jumps", "routes", "after_jump", "after_route")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    place = {t.id: t.path for t in trace.transitions}
    assert {t.path: [place[p] for p in t.parents] for t in trace.transitions} == {
        "jumps": [],
        "routes": [],
        "after_jump": ["jumps"],
        "after_route": ["routes"],
    }


async def test_an_error_handler_follows_the_attempt_it_handles(server: OpenAIServer) -> None:
    async def fails(state: Words) -> Any:
        await chat(server, "fails").ainvoke("go")
        raise ValueError("broken")

    async def handles(state: Words) -> Any:
        return {"words": [(await chat(server, "handles").ainvoke("go")).content]}

    graph = StateGraph(Words).add_node("fails", fails, error_handler=handles).add_node("after", says(server, "after"))
    graph.add_edge(START, "fails").add_edge("fails", "after")
    async with CoachCallback(None, store=None, agents=team("fails", "handles", "after")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [(n[0], n[3], n[4]) for n in nodes(trace)][:2] == [("fails", "failed", []), ("__error_handler__fails", "done", [0])]
    assert trace.episode.status == "done"
    assert (0, 1) in trace.edges


async def test_calls_made_at_once_in_a_node_are_side_by_side(server: OpenAIServer) -> None:
    model = chat(server, "solver")

    async def solve(state: Words) -> Any:
        first = (await model.ainvoke("go")).content
        both = await asyncio.gather(model.ainvoke("left"), model.ainvoke("right"))
        return {"words": [first, *(b.content for b in both), (await model.ainvoke("end")).content]}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    server.delay_s = 0.05
    async with CoachCallback(None, store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert trace.edges == ((0, 1), (0, 2), (1, 3), (2, 3))


async def test_a_model_with_retry_records_each_try(server: OpenAIServer) -> None:
    replies: Any = iter([(500, {"error": {"message": "busy"}}), "well"])
    server.reply = lambda body: next(replies)
    model = chat(server, "solver").with_retry(wait_exponential_jitter=False, stop_after_attempt=2)

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    async with CoachCallback(Tens(), store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [(a.output, a.error is None, a.kept) for a in trace.actions] == [("", False, False), ("well", True, True)]
    assert list(trace.verdicts) == [trace.actions[1].id]


async def test_a_reply_from_a_cache_claims_no_call_a_second_time(server: OpenAIServer) -> None:
    model = chat(server, "solver", cache=InMemoryCache())

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    app = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve").compile()
    async with CoachCallback(None, store=None, agents=team("solver")) as callback:
        traces = [await record(app, {"words": []}, callback) for _ in range(2)]
    assert [t.actions[0].output for t in traces] == ["solver 1", "solver 1"]
    assert [t.actions[0].call_id for t in traces] == ["call-1", None]


async def test_a_stream_that_its_consumer_left_still_knows_its_call(server: OpenAIServer, tmp_path: Path) -> None:
    async with CoachCallback(None, store=tmp_path / "t.db", agents=team("solver")) as callback:
        app = StateGraph(Words).add_node("solve", says(server, "solver")).add_edge(START, "solve").compile()
        stream = app.astream({"words": []}, {"callbacks": [callback]}, stream_mode="messages")
        async for _ in stream:
            break
        await stream.aclose()
        await callback.drain()
    with TraceStore(tmp_path / "t.db") as store:
        (trace,) = store.traces()
    assert trace.episode.status == "cancelled"
    assert [(a.call_id, a.kept) for a in trace.actions] == [("call-1", False)]
    assert [t.status for t in trace.transitions] == ["cancelled"]


@dataclass
class DataState:
    messages: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)


class ModelState(BaseModel):
    messages: Annotated[list[AnyMessage], add_messages] = []


@pytest.mark.parametrize("schema", [DataState, ModelState])
async def test_states_that_are_dataclasses_or_pydantic_models(server: OpenAIServer, schema: Any) -> None:
    server.reply = scripted(solver=[asks(tool_call("add", {"a": 1, "b": 2})), "done"])
    model = chat(server, "solver").bind_tools([add])

    async def solve(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state.messages)]}

    graph = StateGraph(schema).add_node("solve", solve).add_node("tools", ToolNode([add])).add_edge(START, "solve")
    graph.add_conditional_edges("solve", lambda s: "tools" if s.messages[-1].tool_calls else END, ["tools", END]).add_edge("tools", "solve")
    async with CoachCallback(None, store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), ASK, callback)
    assert actions(trace) == [("solver", "solve", "", [("add", "ok", "3")]), ("solver", "solve", "done", [])]
    assert trace.transitions[0].input["messages"][0]["content"] == "go"
    assert set(trace.transitions[2].input["messages"][0]) == {"role", "id"}
    assert check_joins(trace, server) == 2


async def test_a_hand_written_executor_answers_through_its_messages(server: OpenAIServer) -> None:
    first = asks(tool_call("look", {"q": 1}, "c1"), tool_call("look", {"q": 2}, "c2"))
    server.reply = scripted(solver=[first, asks(tool_call("look", {"q": 3}, "c1")), "done"])
    model = chat(server, "solver")

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def execute(state: MessagesState) -> Any:
        calls: Any = state["messages"][-1]
        return {"messages": [ToolMessage(f"saw {c['args']['q']}", tool_call_id=c["id"]) for c in calls.tool_calls]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("execute", execute).add_edge(START, "solve")
    graph.add_conditional_edges("solve", lambda s: "execute" if s["messages"][-1].tool_calls else END, ["execute", END])
    graph.add_edge("execute", "solve")
    coach = Tens()
    async with CoachCallback(coach, store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), ASK, callback)
    assert [e for _, _, _, e in actions(trace)] == [[("look", "ok", "saw 1"), ("look", "ok", "saw 2")], [("look", "ok", "saw 3")], []]
    assert {c.action_id: len(c.executions) for c in coach.cases} == {a.id: n for a, n in zip(trace.actions, (2, 1, 0), strict=True)}


async def test_an_old_answer_that_a_node_gives_back_is_no_answer_to_a_new_call_with_its_id(server: OpenAIServer) -> None:
    server.reply = scripted(solver=[asks(tool_call("look", {"q": q}, "c")) for q in (1, 2)] + ["done"])
    model = chat(server, "solver")

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def echo(state: MessagesState) -> Any:
        return {"messages": state["messages"]}

    async def execute(state: MessagesState) -> Any:
        (call,) = state["messages"][-1].tool_calls  # type: ignore[union-attr]
        return {"messages": [ToolMessage(f"saw {call['args']['q']}", tool_call_id=call["id"])]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("echo", echo).add_node("execute", execute)
    graph.add_edge(START, "solve").add_edge("echo", "execute").add_edge("execute", "solve")
    graph.add_conditional_edges("solve", lambda s: "echo" if s["messages"][-1].tool_calls else END, ["echo", END])
    async with CoachCallback(None, store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), ASK, callback)
    assert [[e.result for e in a.executions] for a in trace.actions] == [["saw 1"], ["saw 2"], []]


async def test_of_two_calls_with_one_id_the_later_one_is_answered(server: OpenAIServer) -> None:
    server.reply = scripted(solver=[asks(tool_call("add", {"a": 1, "b": 1}, "c")), asks(tool_call("add", {"a": 1, "b": 1}, "c"))])
    model = chat(server, "solver")

    async def solve(state: MessagesState) -> Any:
        await model.ainvoke("draft")
        said = await model.ainvoke("go")
        return {"messages": [said, await add.ainvoke(said.tool_calls[0])]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_edge(START, "solve")
    async with CoachCallback(None, store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), ASK, callback)
    assert [[e.result for e in a.executions] for a in trace.actions] == [[], ["2"]]


async def test_a_call_answered_later_in_its_own_graph_beside_another_with_its_id(server: OpenAIServer) -> None:
    graph = StateGraph(MessagesState)
    for name in ("left", "right"):
        inner = StateGraph(MessagesState)

        async def ask(state: MessagesState, name: str = name) -> Any:
            return {"messages": [await chat(server, name).ainvoke("ask")]}

        async def muse(state: MessagesState, name: str = name) -> Any:
            await asyncio.sleep(0.3 if name == "right" else 0)
            await chat(server, name).ainvoke("muse")
            return {"messages": []}

        @tool("add")
        def adds(a: int, b: int, name: str = name) -> str:
            """Adds."""
            return f"of {name}"

        inner.add_node("ask", ask).add_node("muse", muse).add_node("tools", ToolNode([adds]))
        inner.add_edge(START, "ask").add_edge("ask", "muse").add_edge("muse", "tools")
        graph.add_node(name, inner.compile()).add_edge(START, name)
    call = asks(tool_call("add", {"a": 1, "b": 1}, "c"))
    server.reply = scripted(left=[call, "hm"], right=[call, "hm"])
    async with CoachCallback(None, store=None, agents=team("left", "right")) as callback:
        trace = await record(graph.compile(), ASK, callback)
    assert sorted((a.agent, a.output, [e.result for e in a.executions]) for a in trace.actions) == [
        ("left", "", ["of left"]),
        ("left", "hm", []),
        ("right", "", ["of right"]),
        ("right", "hm", []),
    ]


async def test_calls_that_nobody_answers_are_complete_when_their_node_is_called_again(server: OpenAIServer) -> None:
    server.reply = scripted(solver=[asks(tool_call("add", {"a": 1, "b": 2})), "done"])
    model = chat(server, "solver")
    scored = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Telling(Tens):
        async def score(self, case: Case) -> Verdict:
            loop.call_soon_threadsafe(scored.set)
            return await super().score(case)

    async def solve(state: Words) -> Any:
        said = await model.ainvoke("go")
        if said.content:
            await asyncio.wait_for(scored.wait(), 20)
        return {"words": [str(said.content)]}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    graph.add_conditional_edges("solve", lambda s: END if s["words"][-1] else "solve", ["solve", END])
    async with CoachCallback(Telling(), store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [len(a.executions) for a in trace.actions] == [0, 0]
    assert len(trace.verdicts) == 2


@tool
def fails(x: int) -> str:
    """Fails."""
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize("handled", [True, False])
async def test_a_tool_that_raises_is_an_execution_with_its_traceback(server: OpenAIServer, handled: bool) -> None:
    server.reply = scripted(solver=[asks(tool_call("fails", {"x": 1})), "done"])
    model = chat(server, "solver").bind_tools([fails])

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("tools", ToolNode([fails], handle_tool_errors=handled))
    graph.add_edge(START, "solve").add_edge("tools", "solve")
    graph.add_conditional_edges("solve", lambda s: "tools" if s["messages"][-1].tool_calls else END, ["tools", END])
    id = str(uuid4())
    async with CoachCallback(Tens(), store=None, agents=team("solver")) as callback:
        callback.begin(Episode(id))
        running = graph.compile().ainvoke(ASK, {"callbacks": [callback], "run_id": UUID(id)})
        if handled:
            await running
        else:
            with pytest.raises(ZeroDivisionError):
                await running
        trace = await callback.finish(id)
    (execution,) = trace.actions[0].executions
    assert execution.error is not None
    assert (execution.status, execution.error.type, execution.error.message) == ("error", "ZeroDivisionError", "by zero")
    assert "in fails" in execution.error.traceback
    assert trace.episode.status == ("done" if handled else "failed")
    assert len(trace.verdicts) == len(trace.actions)


async def test_a_tools_live_output_and_a_dict_artifact_are_kept(server: OpenAIServer) -> None:
    from langchain_core.callbacks import adispatch_custom_event

    @tool
    async def talks(x: int) -> str:
        """Talks."""
        await adispatch_custom_event("stdout", "line 1\n")
        await adispatch_custom_event("stdout", "line 2\n")
        return "end"

    @tool(response_format="content_and_artifact")
    def shell(x: int) -> tuple[str, Any]:
        """Shell."""
        return "failed", {"stdout": "out", "stderr": "err", "exit_code": 3}

    server.reply = scripted(solver=[asks(tool_call("talks", {"x": 1}, "a"), tool_call("shell", {"x": 1}, "b")), "done"])
    model = chat(server, "solver").bind_tools([talks, shell])

    async def solve(state: MessagesState) -> Any:
        said = await model.ainvoke("go")
        return {"messages": [await talks.ainvoke(said.tool_calls[0]), await shell.ainvoke(said.tool_calls[1])]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_edge(START, "solve")
    async with CoachCallback(None, store=None, agents=team("solver")) as callback:
        trace = await record(graph.compile(), ASK, callback)
    talked, ran = trace.actions[0].executions
    assert (talked.stdout, talked.result, talked.status) == ("line 1\nline 2\n", "end", "ok")
    assert (ran.stdout, ran.stderr, ran.status) == ("out", "err", "error")
    assert ran.error is not None
    assert ran.error.message == "3"


async def halves(server: OpenAIServer, store: Any, **compiled: Any) -> tuple[EpisodeTrace, EpisodeTrace]:
    """Two halves of a run through one callback, the first finished before the second begins."""

    async def asking(state: Words) -> Any:
        return {"words": [interrupt("?")]} if not compiled else {"words": ["no need"]}

    graph = StateGraph(Words).add_node("a", says(server, "a")).add_node("b", asking).add_node("c", says(server, "c"))
    graph.add_edge(START, "a").add_edge("a", "b").add_edge("b", "c")
    app = graph.compile(checkpointer=InMemorySaver(), **compiled)
    thread = {"configurable": {"thread_id": "t"}}
    async with CoachCallback(Tens(), store=store, agents=team("a", "c")) as callback:
        ids = [str(uuid4()), str(uuid4())]
        traces = []
        for id, given in zip(ids, ({"words": []}, None if compiled else Command(resume="yes")), strict=True):
            callback.begin(Episode(id, task="t"))
            await app.ainvoke(given, {**thread, "callbacks": [callback], "run_id": UUID(id)})
            traces.append(await callback.finish(id))
    return traces[0], traces[1]


@pytest.mark.parametrize("stored", [True, False])
async def test_finish_of_a_resumed_run_gives_the_whole_episode(server: OpenAIServer, tmp_path: Path, stored: bool) -> None:
    first, whole = await halves(server, tmp_path / "t.db" if stored else None)
    assert (first.episode.status, whole.episode.status) == ("interrupted", "done")
    assert whole.episode.id == first.episode.id
    assert [(t.path, t.status) for t in whole.transitions] == [("a", "done"), ("b", "interrupted"), ("b", "done"), ("c", "done")]
    assert [a.output for a in whole.actions] == ["a 1", "c 1"]
    assert whole.edges == ((0, 1),)
    assert len(whole.verdicts) == 2


async def test_a_static_breakpoint_is_an_interrupt_and_goes_on_as_one(server: OpenAIServer) -> None:
    first, whole = await halves(server, None, interrupt_before=["b"])
    assert first.episode.status == "interrupted"
    assert [(t.path, t.status) for t in whole.transitions] == [("a", "done"), ("b", "done"), ("c", "done")]
    assert whole.edges == ((0, 1),)


async def test_a_new_question_on_the_same_thread_is_a_new_episode(server: OpenAIServer, tmp_path: Path) -> None:
    graph = StateGraph(Words).add_node("a", says(server, "a")).add_edge(START, "a")
    app = graph.compile(checkpointer=InMemorySaver())
    async with CoachCallback(None, store=tmp_path / "t.db", agents=team("a")) as callback:
        for _ in range(2):
            await app.ainvoke({"words": []}, {"callbacks": [callback], "configurable": {"thread_id": "t"}})
    with TraceStore(tmp_path / "t.db") as store:
        traces = list(store.traces())
    assert [len(t.transitions) for t in traces] == [1, 1]
    assert {t.episode.thread_id for t in traces} == {"t"}


async def test_a_callback_that_is_dropped_stops_its_thread(server: OpenAIServer) -> None:
    callback = CoachCallback(None, store=None)
    thread = callback._worker._thread
    await record(StateGraph(Words).add_node("a", says(server, "a")).add_edge(START, "a").compile(), {"words": []}, callback)
    assert thread.is_alive()
    del callback
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
