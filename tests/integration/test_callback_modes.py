"""One app, every way to run it: the record and the joins are the same, and what goes wrong stays contained."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from mappa_graph import Agent, CoachCallback, Outcome, TraceStore, Verdict, mark
from mappa_graph.client import detached
from mappa_graph.coach import LLMCoach
from mappa_graph.coach.base import Case
from mappa_graph.errors import ConfigError, EpisodeError
from mappa_graph.record import Call, Episode, EpisodeTrace
from tests.fakes.apps import Numbered, Tens, Words, add, asks, chat, record
from tests.fakes.openai_server import OpenAIServer, tool_call
from tests.fakes.recorded import actions, check_joins, nodes

ASK = {"messages": [("user", "go")]}


def two_turns(body: dict[str, Any]) -> Any:
    if any(m["role"] == "tool" for m in body["messages"]):
        return "the sum is 3"
    return asks(tool_call("add", {"a": 1, "b": 2}, "c1"), text="let me add")


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(two_turns) as server:
        yield server


@pytest.fixture
def numbered() -> Iterator[OpenAIServer]:
    with OpenAIServer(Numbered()) as server:
        yield server


def tool_app(server: OpenAIServer, *, sync: bool = False) -> Any:
    model = chat(server, "solver").bind_tools([add])

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def solve_sync(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("solve", solve_sync if sync else solve).add_node("tools", ToolNode([add]))
    graph.add_edge(START, "solve").add_edge("tools", "solve")
    graph.add_conditional_edges("solve", lambda s: "tools" if s["messages"][-1].tool_calls else END, ["tools", END])
    return graph.compile()


def check_two_turns(trace: EpisodeTrace, server: OpenAIServer) -> None:
    assert nodes(trace) == [("solve", 1, 1, "done", []), ("tools", 2, 1, "done", [0]), ("solve", 3, 1, "done", [1])]
    assert actions(trace) == [("solver", "solve", "let me add", [("add", "ok", "3")]), ("solver", "solve", "the sum is 3", [])]
    assert trace.edges == ((0, 1),)
    assert [a.finish_reason for a in trace.actions] == ["tool_calls", "stop"]
    assert all(a.kept for a in trace.actions)
    assert check_joins(trace, server) == 2


async def drive(app: Any, config: Any, how: str) -> None:
    if how == "ainvoke":
        await app.ainvoke(ASK, config)
    elif how == "invoke":
        await asyncio.to_thread(app.invoke, ASK, config)
    elif how.startswith("astream_events"):
        async for _ in app.astream_events(ASK, config, version=how[-2:]):
            pass
    elif how.startswith("astream:"):
        async for _ in app.astream(ASK, config, stream_mode=how.split(":")[1]):
            pass
    else:
        mode: Any = how.split(":")[1]
        await asyncio.to_thread(lambda: list(app.stream(ASK, config, stream_mode=mode)))


STREAM_MODES = ("values", "updates", "messages", "custom", "checkpoints", "tasks", "debug")
STREAMS = [f"{how}:{mode}" for how in ("astream", "stream") for mode in STREAM_MODES]
WAYS = ["ainvoke", "invoke", "astream_events:v1", "astream_events:v2", *STREAMS]


@pytest.mark.parametrize("how", WAYS)
async def test_the_record_is_the_same_in_every_way_to_run(server: OpenAIServer, how: str) -> None:
    id = str(uuid4())
    app = tool_app(server, sync=how.startswith(("invoke", "stream:")))
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        callback.begin(Episode(id))
        await drive(app, {"callbacks": [callback], "run_id": UUID(id)}, how)
        check_two_turns(await callback.finish(id), server)
        assert not callback.failures


async def test_the_record_is_the_same_under_astream_events_v3(server: OpenAIServer) -> None:
    id = str(uuid4())
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        callback.begin(Episode(id))
        stream = await tool_app(server).astream_events(ASK, {"callbacks": [callback], "run_id": UUID(id)}, version="v3")
        async for _ in stream:
            pass
        check_two_turns(await callback.finish(id), server)


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_message_in_the_apps_state_carries_the_id_of_its_call(server: OpenAIServer, streaming: bool) -> None:
    model = chat(server, "solver", streaming=streaming)

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    app = StateGraph(MessagesState).add_node("solve", solve).add_edge(START, "solve").compile()
    message = (await app.ainvoke(ASK))["messages"][-1]
    assert (message.id if streaming else message.response_metadata["id"]) in server.calls


async def test_a_streaming_model_and_one_whose_server_sends_no_delta_id(server: OpenAIServer) -> None:
    async def run() -> EpisodeTrace:
        async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
            model = chat(server, "solver", streaming=True)

            async def solve(state: MessagesState) -> Any:
                return {"messages": [await model.ainvoke(state["messages"])]}

            graph = StateGraph(MessagesState).add_node("solve", solve).add_edge(START, "solve")
            return await record(graph.compile(), ASK, callback)

    assert [a.call_id for a in (await run()).actions] == ["call-1"]
    server.delta_id = False
    assert [a.call_id for a in (await run()).actions] == [None]


async def test_streamed_choices_that_langchain_merged_claim_no_call(server: OpenAIServer) -> None:
    server.reply = lambda body: ["one", "two"]
    model = chat(server, "solver", streaming=True)

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"], n=2)]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_edge(START, "solve")
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        trace = await record(graph.compile(), ASK, callback)
    assert [a.call_id for a in trace.actions] == [None]


async def test_a_consumer_that_stops_early_leaves_a_cancelled_episode(server: OpenAIServer, tmp_path: Path) -> None:
    async with CoachCallback(None, store=tmp_path / "t.db", agents=[Agent("solver")]) as callback:
        stream = tool_app(server).astream(ASK, {"callbacks": [callback]}, stream_mode="updates")
        async for _ in stream:
            break
        await stream.aclose()
        await callback.drain()
    with TraceStore(tmp_path / "t.db") as store:
        (trace,) = store.traces()
    assert trace.episode.status == "cancelled"
    assert [a.output for a in trace.actions] == ["let me add"]


async def test_a_cancelled_run_keeps_what_was_done(server: OpenAIServer, tmp_path: Path) -> None:
    started = asyncio.Event()

    async def slow(state: MessagesState) -> Any:
        started.set()
        await asyncio.sleep(60)

    model = chat(server, "solver")

    async def solve(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("solve", solve).add_node("slow", slow).add_edge(START, "solve").add_edge("solve", "slow")
    coach = Tens()
    async with CoachCallback(coach, store=tmp_path / "t.db", agents=[Agent("solver")]) as callback:
        running = asyncio.create_task(graph.compile().ainvoke(ASK, {"callbacks": [callback]}))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await callback.drain()
    with TraceStore(tmp_path / "t.db") as store:
        (trace,) = store.traces()
    assert trace.episode.status == "cancelled"
    assert [(t.path, t.status) for t in trace.transitions] == [("solve", "done"), ("slow", "cancelled")]
    assert len(trace.verdicts) == 1


async def test_a_failing_node_is_recorded_with_its_error(numbered: OpenAIServer) -> None:
    model = chat(numbered, "solver")

    async def solve(state: Words) -> Any:
        await model.ainvoke("go")
        raise ValueError("no idea")

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    id = str(uuid4())
    async with CoachCallback(Tens(), store=None, agents=[Agent("solver")]) as callback:
        with pytest.raises(ValueError, match="no idea"):
            await graph.compile().ainvoke({"words": []}, {"callbacks": [callback], "run_id": UUID(id)})
        trace = await callback.finish(id)
    assert (trace.episode.status, trace.episode.error) == ("failed", "ValueError: no idea")
    assert [(t.status, t.error) for t in trace.transitions] == [("failed", "ValueError: no idea")]
    assert len(trace.verdicts) == 1
    assert not trace.actions[0].kept


async def test_a_failed_call_is_an_action_with_an_error_and_no_verdict(numbered: OpenAIServer) -> None:
    numbered.reply = lambda body: (400, {"error": {"message": "too long", "type": "invalid_request_error"}})
    model = chat(numbered, "solver")

    async def solve(state: Words) -> Any:
        try:
            await model.ainvoke("go")
        except Exception as error:
            return {"words": [type(error).__name__]}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    async with CoachCallback(Tens(), store=None, agents=[Agent("solver")]) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    (action,) = trace.actions
    assert action.error is not None
    assert "too long" in action.error
    assert (action.call_id, action.kept, trace.verdicts) == (None, False, {})


async def test_abatch_with_one_callback_keeps_the_runs_apart(server: OpenAIServer, tmp_path: Path) -> None:
    async with CoachCallback(Tens(), store=tmp_path / "t.db", agents=[Agent("solver")]) as callback:
        asked = [{"messages": [("user", f"question {i}")]} for i in range(12)]
        await tool_app(server).abatch(asked, {"callbacks": [callback]})
        await callback.drain()
        assert not callback.failures
    with TraceStore(tmp_path / "t.db") as store:
        traces = list(store.traces())
    assert len(traces) == 12
    for trace in traces:
        check_two_turns(trace, server)
        assert {len({m["content"] for m in a.messages if m["role"] == "user"}) for a in trace.actions} == {1}
        assert len(trace.verdicts) == 2
    assert {t.actions[0].messages[0]["content"] for t in traces} == {f"question {i}" for i in range(12)}


async def test_runs_in_many_threads_with_one_callback_keep_every_event(tmp_path: Path) -> None:
    model = mark(FakeListChatModel(responses=["said"]), "solver")

    def node(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("end", node)
    for i in range(4):
        graph.add_node(f"n{i}", node).add_edge(START, f"n{i}").add_edge(f"n{i}", "end")
    app = graph.compile()

    def run() -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with CoachCallback(Tens(), store=tmp_path / "t.db") as callback, ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda i: app.invoke({"messages": [("user", str(i))]}, {"callbacks": [callback]}), range(40)))
                assert not callback.failures
        finally:
            sys.setswitchinterval(interval)

    await asyncio.to_thread(run)
    with TraceStore(tmp_path / "t.db") as store:
        traces = list(store.traces())
    assert len(traces) == 40
    assert {(len(t.transitions), len(t.actions), len(t.verdicts)) for t in traces} == {(5, 5, 5)}
    assert {t.edges for t in traces} == {((0, 4), (1, 4), (2, 4), (3, 4))}


async def test_one_run_id_used_twice_makes_two_episodes(server: OpenAIServer, tmp_path: Path) -> None:
    id = uuid4()
    async with CoachCallback(None, store=tmp_path / "t.db", agents=[Agent("solver")]) as callback:
        for _ in range(2):
            await tool_app(server).ainvoke(ASK, {"callbacks": [callback], "run_id": id})
    with TraceStore(tmp_path / "t.db") as store:
        traces = list(store.traces())
    assert [t.episode.id for t in traces] == [str(id), f"{id}:2"]
    assert [len(t.actions) for t in traces] == [2, 2]
    assert {a.call_id for t in traces for a in t.actions} == {f"call-{i}" for i in range(1, 5)}


async def test_a_node_that_passes_callbacks_of_its_own_is_seen_through_the_models(numbered: OpenAIServer) -> None:
    async with CoachCallback(None, store=None, agents=[Agent("solver"), Agent("lost")]) as callback:
        kept, lost = chat(numbered, "solver", callbacks=[callback]), chat(numbered, "lost")

        async def solve(state: Words) -> Any:
            said = [await kept.ainvoke("go", config={"callbacks": []}), await lost.ainvoke("go", config={"callbacks": []})]
            return {"words": [s.content for s in said]}

        graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
        trace = await record(graph.compile(), {"words": []}, callback)
        assert [(a.output, trace.transitions[0].id == a.transition_id) for a in trace.actions] == [("solver 1", True)]
        await kept.ainvoke("outside any graph")
        await callback.drain()
        assert callback.orphans == 1


async def test_the_callback_also_in_the_models_constructor_records_once(numbered: OpenAIServer) -> None:
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        model = chat(numbered, "solver", callbacks=[callback])

        async def solve(state: Words) -> Any:
            return {"words": [(await model.ainvoke("go")).content]}

        app = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve").compile().with_config(callbacks=[callback])
        trace = await record(app, {"words": []}, callback)
    assert len(trace.actions) == 1


async def test_a_call_that_a_node_started_and_did_not_await_is_not_lost(numbered: OpenAIServer) -> None:
    numbered.delay_s = 0.15
    model = chat(numbered, "solver")
    tasks: list[Any] = []

    async def solve(state: Words) -> Any:
        tasks.append(asyncio.create_task(model.ainvoke("go")))
        await asyncio.sleep(0.05)
        return {"words": ["early"]}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    async with CoachCallback(Tens(), store=None, agents=[Agent("solver")]) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [a.output for a in trace.actions] == ["solver 1"]
    assert len(trace.verdicts) == 1


async def test_a_plain_chain_without_a_graph_is_recorded_as_one_transition(numbered: OpenAIServer) -> None:
    chain = chat(numbered, "solver") | (lambda message: message.content)
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        trace = await record(chain, "go", callback)
    assert [(t.path, t.status) for t in trace.transitions] == [("RunnableSequence", "done")]
    assert actions(trace) == [("solver", "RunnableSequence", "solver 1", [])]


async def test_a_handler_that_fails_is_counted_and_the_app_goes_on(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mappa_graph.capture.tap as tap

    def broken(*args: Any) -> Any:
        raise RuntimeError("no copy")

    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        monkeypatch.setattr(tap, "frozen", broken)
        with caplog.at_level(logging.WARNING):
            state = await tool_app(server).ainvoke(ASK, {"callbacks": [callback]})
        assert state["messages"][-1].content == "the sum is 3"
        assert callback.failures["RuntimeError"] > 0
        assert "no copy" in caplog.text
        monkeypatch.undo()
        assert len((await record(tool_app(server), ASK, callback)).actions) == 2


async def test_what_tools_and_reducers_change_later_does_not_reach_the_record(numbered: OpenAIServer) -> None:
    model = chat(numbered, "solver")

    async def solve(state: dict[str, Any]) -> Any:
        prompt: list[Any] = [AIMessage("first"), AIMessage("second")]
        await model.ainvoke(prompt)
        prompt[0].content = "changed"
        prompt.pop()
        state["notes"]["deep"].append("changed")
        return {"notes": {"deep": []}}

    graph: Any = StateGraph(dict).add_node("solve", solve).add_edge(START, "solve")
    async with CoachCallback(None, store=None, agents=[Agent("solver")]) as callback:
        trace = await record(graph.compile(), {"notes": {"deep": ["given"]}}, callback)
    assert [m["content"] for m in trace.actions[0].messages] == ["first", "second"]
    assert "changed" not in str(trace.transitions[0].input)


seen_by_coach: contextvars.ContextVar[str] = contextvars.ContextVar("seen_by_coach", default="nothing")


class AskingCoach:
    """Calls a model of its own for each verdict."""

    name = "asking"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.context: set[str] = set()

    async def score(self, case: Case) -> Verdict:
        self.context.add(seen_by_coach.get())
        await self.model.ainvoke(f"judge {case.output}")
        return Verdict(5.0)


async def test_the_coachs_own_calls_are_not_recorded_and_its_context_is_empty(server: OpenAIServer) -> None:
    seen_by_coach.set("the app's context")
    coach = AskingCoach(detached(chat(server, "coach")))
    async with CoachCallback(coach, store=None, agents=[Agent("solver"), Agent("coach")]) as callback:
        trace = await record(tool_app(server), ASK, callback)
    assert [a.agent for a in trace.actions] == ["solver", "solver"]
    assert [v.score for v in trace.verdicts.values()] == [5.0, 5.0]
    assert coach.context == {"nothing"}


class BadCoach:
    """Fails in another way at each call."""

    name = "bad@2"

    def __init__(self) -> None:
        self.calls = 0

    async def score(self, case: Case) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("no model")
        if self.calls == 2:
            await asyncio.sleep(60)
        return 10


async def test_a_coach_that_fails_gives_no_score_and_one_failure_each(numbered: OpenAIServer, tmp_path: Path) -> None:
    model = chat(numbered, "solver")

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    graph = StateGraph(Words)
    for i in range(3):
        graph.add_node(f"n{i}", solve).add_edge(START if i == 0 else f"n{i - 1}", f"n{i}")
    with TraceStore(tmp_path / "t.db") as store:
        async with CoachCallback(BadCoach(), store=store, agents=[Agent("solver")], concurrency=1, coach_timeout_s=0.3) as callback:
            trace = await record(graph.compile(), {"words": []}, callback)
        verdicts = [trace.verdicts[a.id] for a in trace.actions]
        assert [v.score for v in verdicts] == [None, None, None]
        assert [(v.error or "").split(":")[0] for v in verdicts] == ["RuntimeError", "TimeoutError", "CoachError"]
        assert {v.coach for v in verdicts} == {"bad@2"}
        assert store.failures() == {"coach:RuntimeError": 1, "coach:TimeoutError": 1, "coach:CoachError": 1}


class Hindsight(Tens):
    async def score_episode(self, cases: Any) -> Any:
        self.cases += cases
        return {case.action_id: Verdict(float(i)) for i, case in enumerate(cases) if i != 1}


async def test_hindsight_scores_the_whole_episode_once_it_is_graded(server: OpenAIServer) -> None:
    coach = Hindsight()
    id = str(uuid4())
    async with CoachCallback(coach, store=None, agents=[Agent("solver")], when="episode") as callback:
        callback.begin(Episode(id, task="t", reference="3"))
        await tool_app(server).ainvoke(ASK, {"callbacks": [callback], "run_id": UUID(id)})
        assert coach.cases == []
        trace = await callback.finish(id, outcome=Outcome(True))
    assert [c.outcome for c in coach.cases] == [Outcome(True)] * 2
    assert [len(c.after) for c in coach.cases] == [1, 0]
    first, second = (trace.verdicts[a.id] for a in trace.actions)
    assert first.score == 0.0
    assert second.score is None
    assert "gave no verdict" in (second.error or "")


async def test_generated_scores_what_was_said_before_its_tools_ran(server: OpenAIServer) -> None:
    coach = Tens()
    async with CoachCallback(coach, store=None, agents=[Agent("solver")], when="generated") as callback:
        trace = await record(tool_app(server), ASK, callback)
    assert [len(c.executions) for c in coach.cases] == [0, 0]
    assert len(trace.verdicts) == 2
    assert len(trace.actions[0].executions) == 1


async def test_a_transition_is_scored_once_and_its_actions_share_the_score(numbered: OpenAIServer) -> None:
    model = chat(numbered, "solver")

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content for _ in range(3)]}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    coach = Tens()
    async with CoachCallback(coach, store=None, agents=[Agent("solver")], unit="transition") as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert [c.output for c in coach.cases] == ["solver 1\n\nsolver 2\n\nsolver 3"]
    assert {v.score for v in trace.verdicts.values()} == {10.0}
    assert len(trace.verdicts) == 3


async def test_the_coach_works_while_the_graph_goes_on(numbered: OpenAIServer) -> None:
    model = chat(numbered, "solver")
    scored = asyncio.Event()
    loop = asyncio.get_running_loop()

    class First(Tens):
        async def score(self, case: Case) -> Verdict:
            loop.call_soon_threadsafe(scored.set)
            return await super().score(case)

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    async def wait(state: Words) -> Any:
        await asyncio.wait_for(scored.wait(), 20)
        return {"words": ["waited"]}

    graph = StateGraph(Words).add_node("solve", solve).add_node("wait", wait).add_edge(START, "solve").add_edge("solve", "wait")
    async with CoachCallback(First(), store=None, agents=[Agent("solver")]) as callback:
        trace = await record(graph.compile(), {"words": []}, callback)
    assert trace.transitions[1].output == {"words": ["waited"]}


async def test_the_trace_has_the_calls_that_the_gateway_stored(numbered: OpenAIServer, tmp_path: Path) -> None:
    model = chat(numbered, "solver")

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    graph = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve")
    with TraceStore(tmp_path / "t.db") as store:
        store.add_call(Call("call-1", "solver", 0, (1, 2), (3,), (-0.5,), "stop"))
        async with CoachCallback(None, store=store, agents=[Agent("solver")]) as callback:
            trace = await record(graph.compile(), {"words": []}, callback)
    assert trace.calls[trace.actions[0].id].completion_ids == (3,)


async def test_finish_without_begin_and_after_the_episode_saved_itself(numbered: OpenAIServer, tmp_path: Path) -> None:
    model = chat(numbered, "solver")

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    app = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve").compile()
    with TraceStore(tmp_path / "t.db") as store:
        async with CoachCallback(None, store=store, agents=[Agent("solver")]) as callback:
            id = uuid4()
            await app.ainvoke({"words": []}, {"callbacks": [callback], "run_id": id})
            await callback.drain()
            trace = await callback.finish(str(id), outcome=Outcome(True))
            assert len(trace.actions) == 1
            with pytest.raises(EpisodeError, match="neither begun nor seen"):
                await callback.finish(str(uuid4()))
            begun = str(uuid4())
            callback.begin(Episode(begun, task="never run"))
            empty = await callback.finish(begun, status="failed", error="ValueError: no graph")
            assert (empty.episode.status, empty.episode.error, empty.actions) == ("failed", "ValueError: no graph", ())
            dropped = str(uuid4())
            callback.begin(Episode(dropped))
            callback.forget(dropped)
        assert [e.id for e in store.episodes()] == [str(id), begun]
        saved = store.episode(str(id))
        assert saved is not None
        assert saved.episode.outcome == Outcome(True)


async def test_nothing_of_an_episode_stays_in_memory_after_finish(numbered: OpenAIServer) -> None:
    model = chat(numbered, "solver")

    async def solve(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    app = StateGraph(Words).add_node("solve", solve).add_edge(START, "solve").compile()
    async with CoachCallback(Tens(), store=None, agents=[Agent("solver")]) as callback:
        for _ in range(3):
            await record(app, {"words": []}, callback)
        worker = callback._worker
        assert not callback._runs
        assert not worker.recordings
        held = [name for name, value in vars(worker).items() if isinstance(value, dict) and value and name != "_calls"]
        assert held == []
        assert not worker.judge._running


async def test_a_closed_callback_says_so_and_a_sync_app_can_close_it(server: OpenAIServer, tmp_path: Path) -> None:
    def run() -> None:
        with CoachCallback(Tens(), store=str(tmp_path / "t.db"), agents=[Agent("solver")]) as callback:
            tool_app(server, sync=True).invoke(ASK, {"callbacks": [callback]})
        with pytest.raises(EpisodeError, match="closed"):
            callback.forget("x")

    with ThreadPoolExecutor(1) as pool:
        await asyncio.wrap_future(pool.submit(run))
    with TraceStore(tmp_path / "t.db") as store:
        (trace,) = store.traces()
    assert len(trace.verdicts) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"when": "later"}, "when='later'"),
        ({"unit": "token"}, "unit='token'"),
        ({"when": "generated", "unit": "transition"}, "can't take effect"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"coach": object()}, "no score method"),
        ({"agents": ["solver"]}, "no Agent"),
        ({"agents": [Agent("a"), Agent("a", role="other")]}, "two different agents"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CoachCallback(**{"store": None, **wrong})


async def test_an_llm_coach_at_the_apps_own_address_disturbs_neither(server: OpenAIServer) -> None:
    verdict = '{"score": 7, "reason": "fine", "blame": [], "better_action": null}'
    server.reply = lambda body: verdict if body["model"] == "coach" else two_turns(body)
    coach = LLMCoach(chat(server, "coach"), output="json")
    for _ in range(2):
        async with CoachCallback(coach, store=None, agents=[Agent("solver")]) as callback:
            traces = await asyncio.gather(*(record(tool_app(server), ASK, callback) for _ in range(4)))
        assert [v.error for t in traces for v in t.verdicts.values()] == [None] * 8
        assert {v.score for t in traces for v in t.verdicts.values()} == {7.0}
