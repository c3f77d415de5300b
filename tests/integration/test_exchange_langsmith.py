"""Traces that LangChain's own LangSmith tracer sent come back as the records of the live runs, from the API and from exports."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from langchain_core.tracers.langchain import LangChainTracer
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from langsmith import Client

from mappa_graph import CoachCallback, TraceStore, mark
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.files import FileSource
from mappa_graph.exchange.importer import Imported, Importer, import_traces
from mappa_graph.exchange.langsmith import LangSmithSource
from mappa_graph.record import EpisodeTrace
from tests.fakes.apps import Numbered, Words, chat
from tests.fakes.langsmith import LangSmith
from tests.fakes.normal import normal
from tests.fakes.openai_server import OpenAIServer
from tests.fakes.shapes import SHAPES, Shape, fan, loop, run_live

KEY = "lsv2_pt_0123456789abcdef"


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(lambda body: "") as server:
        yield server


def client_of(service: LangSmith) -> Client:
    return Client(api_url=service.url, api_key=KEY, auto_batch_tracing=False)


async def traced(service: LangSmith, shapes: list[Shape]) -> list[EpisodeTrace]:
    """Runs recorded live and traced by the real SDK at once."""
    client = Client(api_url=service.url, api_key=KEY, auto_batch_tracing=True)
    live = [await run_live(shape, [LangChainTracer(client=client, project_name="production")]) for shape in shapes]
    client.flush(timeout=60)
    client.cleanup()
    return live


def stored(run: Path) -> list[EpisodeTrace]:
    with TraceStore(run / "trace.db", read_only=True) as store:
        return list(store.traces())


def parquet(runs: list[dict[str, Any]], path: Path) -> None:
    """As a bulk export: nested fields are JSON, times are timestamps."""
    rows = []
    for run in runs:
        row = {k: run.get(k) for k in ("id", "trace_id", "parent_run_id", "dotted_order", "run_type", "name", "error", "session_name")}
        row |= {k: json.dumps(run.get(k)) for k in ("inputs", "outputs", "extra", "events", "tags")}
        row |= {k: datetime.fromisoformat(run[k]) if run.get(k) else None for k in ("start_time", "end_time")}
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("name", SHAPES)
async def test_a_trace_is_the_live_record_from_the_api_and_from_either_export(name: str, server: OpenAIServer, tmp_path: Path) -> None:
    shape = SHAPES[name](server)
    with LangSmith(page=5) as service:
        (live,) = await traced(service, [shape])
        sources: dict[str, Callable[[Path], Any]] = {
            "api": lambda run: LangSmithSource("production", run, client=client_of(service)),
            "jsonl": lambda run: FileSource(tmp_path / "runs.jsonl", run),
            "parquet": lambda run: FileSource(tmp_path / "export", run),
        }
        runs = list(service.runs.values())
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in runs))
        (tmp_path / "export").mkdir()
        parquet(runs, tmp_path / "export" / "part-0.parquet")
        for kind, source in sources.items():
            run = tmp_path / kind
            done = import_traces(source(run), run, agents=shape.agents)
            (trace,) = stored(run)
            assert normal(trace) == normal(live), kind
            assert (done.traces, done.actions, dict(done.problems), dict(done.lost)) == (1, len(live.actions), {}, {})
            # The ids are LangSmith's run ids, which are the live ones.
            assert trace.episode.id == live.episode.id and {a.id for a in trace.actions} == {a.id for a in live.actions}
            assert trace.episode.thread_id == "thread 1"


async def test_pages_rate_limits_and_lost_connections_cost_nothing(server: OpenAIServer, tmp_path: Path) -> None:
    with LangSmith(page=7) as service:
        live = await traced(service, [loop(server) for _ in range(5)])
        service.refuse["/runs/query"] = deque([(429, {"Retry-After": "0"}), (429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})])
        service.refuse["/sessions"] = deque([(429, {"Retry-After": "0"})])
        run = tmp_path / "run"
        done = import_traces(LangSmithSource("production", run, client=client_of(service)), run, agents=loop(server).agents)
        assert (done.traces, done.actions) == (5, 20)
        assert {t.episode.id: normal(t) for t in stored(run)} == {t.episode.id: normal(t) for t in live}
        assert service.asked["/runs/query"] > 5
        assert not list(run.glob("*.spool*"))


async def test_a_killed_import_goes_on_and_a_second_one_adds_nothing(server: OpenAIServer, tmp_path: Path) -> None:
    with LangSmith(page=4) as service:
        await traced(service, [loop(server) for _ in range(4)])
        run = tmp_path / "run"

        class Killed(BaseException):
            pass

        source = LangSmithSource("production", run, client=client_of(service))
        put_down, kept = source._put_down, []

        def killing(spool: Any, runs: Any) -> None:
            put_down(spool, runs[:10])
            kept.extend(runs[:10])
            raise Killed

        source._put_down = killing  # type: ignore[method-assign]
        with pytest.raises(Killed):
            import_traces(source, run, agents=loop(server).agents)
        assert len(kept) == 10 and list(run.glob("*.spool"))
        before = service.asked["/runs/query"]
        done = import_traces(LangSmithSource("production", run, client=client_of(service)), run, agents=loop(server).agents)
        assert done.traces == 4 and done.actions == 16
        # The newest runs were kept, and are not asked for again.
        assert service.asked["/runs/query"] - before < before
        done = import_traces(LangSmithSource("production", run, client=client_of(service)), run, agents=loop(server).agents)
        assert (done.traces, done.known, done.actions) == (0, 4, 0)
        await traced(service, [fan(server)])
        # What began over an hour before the latest known trace is not asked for again, unless it is.
        for old in [r for r in service.runs.values() if r["trace_id"] != list(service.runs.values())[-1]["trace_id"]]:
            old["start_time"] = (datetime.fromisoformat(old["start_time"]) - timedelta(days=1)).isoformat()
        done = import_traces(LangSmithSource("production", run, client=client_of(service)), run)
        assert (done.traces, done.known) == (1, 0)
        assert len(stored(run)) == 5
        done = import_traces(LangSmithSource("production", run, client=client_of(service)), run, again=True)
        assert (done.traces, done.known) == (0, 5)


async def test_a_trace_that_grew_is_stored_anew_and_a_live_record_is_left(server: OpenAIServer, tmp_path: Path) -> None:
    shape = loop(server)
    with LangSmith() as service:
        first, second = await traced(service, [shape, loop(server)])
        run = tmp_path / "run"
        with TraceStore(run / "trace.db") as store:
            store.save_episode(second)
        runs = dict(service.runs)
        cut = [id for id, r in runs.items() if r["trace_id"] == first.episode.id][-3:]
        for id in cut:
            del service.runs[id]
        done = import_traces(LangSmithSource("production", run, client=client_of(service)), run, agents=shape.agents)
        assert (done.traces, done.live) == (1, 1)
        service.runs = runs
        done = import_traces(LangSmithSource("production", run, client=client_of(service)), run, agents=shape.agents)
        assert (done.traces, done.updated, done.live) == (0, 1, 1)
        assert {t.episode.id: normal(t) for t in stored(run)} == {t.episode.id: normal(t) for t in (first, second)}


async def test_only_what_was_asked_for_comes_by_time_and_by_feedback(server: OpenAIServer, tmp_path: Path) -> None:
    with LangSmith() as service:
        live = await traced(service, [loop(server) for _ in range(3)])
        for place, score in ((0, 1), (1, 0)):
            service.say(live[place].episode.id, "user_score", score)

        def ids(**options: Any) -> set[str]:
            run = tmp_path / str(len(list(tmp_path.iterdir())))
            import_traces(LangSmithSource("production", run, client=client_of(service), **options), run)
            return {t.episode.id for t in stored(run)}

        assert ids(filter='and(eq(feedback_key, "user_score"), eq(feedback_score, 1))') == {live[0].episode.id}
        middle = datetime.fromisoformat(service.runs[live[1].episode.id]["start_time"])
        assert ids(since=middle) == {live[1].episode.id, live[2].episode.id}
        assert ids(until=middle) == {live[0].episode.id, live[1].episode.id}
        assert ids(since=middle, until=middle, filter='eq(name, "LangGraph")') == {live[1].episode.id}


async def test_no_key_is_stored_or_said(server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LangSmith() as service:
        await traced(service, [loop(server)])
        service.keys.clear()
        monkeypatch.setenv("LANGSMITH_API_KEY", KEY)
        monkeypatch.setenv("LANGSMITH_ENDPOINT", service.url)
        run = tmp_path / "run"
        import_traces(LangSmithSource("production", run), run)
        assert service.keys == {KEY}
        for file in run.iterdir():
            assert KEY.encode() not in file.read_bytes(), file
        service.refuse["/runs/query"] = deque([(403, {})])
        with pytest.raises(ConfigError) as refused:
            import_traces(LangSmithSource("production", run), run)
        assert KEY not in str(refused.value)
    monkeypatch.delenv("LANGSMITH_API_KEY")
    monkeypatch.delenv("LANGSMITH_ENDPOINT")
    with pytest.raises(ConfigError, match="LANGSMITH_API_KEY"):
        LangSmithSource("production", tmp_path)


async def test_agents_are_named_by_node_paths_where_models_carry_no_mark(server: OpenAIServer, tmp_path: Path) -> None:
    from mappa_graph import Agent

    with LangSmith() as service:
        await traced(service, [loop(server)])
        done: dict[str, Imported] = {}
        for name, agents in (("none", None), ("paths", {"sol*": Agent("solver", policy="shared"), "**": Agent("other")})):
            with Importer(tmp_path / name, agents=agents) as importer:
                done[name] = importer.take(LangSmithSource("production", tmp_path / name, client=client_of(service)))
        # A reply that names a version comes from a gateway, so these are known by the model's name even without a mark.
        assert done["none"].agents == {"solver": 2, "critic": 2}
        assert done["paths"].agents == {"solver": 2, "other": 2}
        assert {(a.agent, a.policy) for a in stored(tmp_path / "paths")[0].actions} == {("solver", "shared"), ("other", "other")}


async def test_a_run_that_was_interrupted_and_resumed_is_one_episode(server: OpenAIServer, tmp_path: Path) -> None:
    server.reply = Numbered()
    model = mark(chat(server, "solver"), "solver")

    async def ask(state: Words) -> Any:
        return {"words": [(await model.ainvoke("go")).content]}

    async def wait(state: Words) -> Any:
        said = (await model.ainvoke("more?")).content
        return {"words": [f"{said} {interrupt('really?')}"]}

    graph = StateGraph(Words).add_node("ask", ask).add_node("wait", wait).add_edge(START, "ask").add_edge("ask", "wait")
    with LangSmith() as service:
        client = Client(api_url=service.url, api_key=KEY, auto_batch_tracing=True)
        app = graph.compile(checkpointer=InMemorySaver())
        async with CoachCallback(None, store=tmp_path / "live" / "trace.db") as callback:
            for number in range(2):
                config: Any = {"configurable": {"thread_id": f"t{number}"}}
                config["callbacks"] = [callback, LangChainTracer(client=client, project_name="production")]
                await app.ainvoke({"words": []}, config)
                await app.ainvoke(Command(resume="yes"), config)
            await callback.drain()
        client.flush(timeout=60)
        client.cleanup()
        live = {t.episode.id: t for t in stored(tmp_path / "live")}
        run = tmp_path / "run"
        for traces in (4, 0):
            done = import_traces(LangSmithSource("production", run, client=client_of(service)), run)
            assert (done.traces, done.updated) == (traces, 0)
            found = {t.episode.id: t for t in stored(run)}
            assert {id: normal(t) for id, t in found.items()} == {id: normal(t) for id, t in live.items()}
            assert {id: t.edges for id, t in found.items()} == {id: t.edges for id, t in live.items()}
        # More became known of a first half: the whole is built again, once.
        first = next(iter(live))
        service.say(first, "note", 1)
        import_traces(LangSmithSource("production", run, client=client_of(service)), run)
        assert {t.episode.id: normal(t) for t in stored(run)} == {id: normal(t) for id, t in live.items()}


JUNK: list[Any] = [
    None, 0, -1, 1e308, float("nan"), 10**40, "", "x" * 50, [], {}, [[]], {"a": {}}, True, [1, "2", {"role": "user"}],
    {"lc": 1, "kwargs": {}}, {"lc": 1, "kwargs": {"type": []}}, {"type": "ai"}, {"type": "ai", "content": 5, "id": []},
    {"role": 3, "content": {}}, "Send(", ["user"], "Send(node='a', arg=",
    {"graph": 1, "update": 2, "resume": 3, "goto": 4}, {"generations": [None]}, {"choices": [None, 1]},
    "\ud800", "GraphInterrupt(", "2026-13-45",
    {"tool_calls": [1, {"function": 3}, {"id": {}}], "role": "assistant"},
    {"content": None, "type": "tool", "tool_call_id": {}, "id": []},
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*at, key)
        yield from places(inner, (*at, key))


async def test_junk_anywhere_in_a_run_never_ends_an_import(server: OpenAIServer, tmp_path: Path) -> None:
    rng = random.Random(0)
    with LangSmith() as service:
        await traced(service, [SHAPES["agent"](server), fan(server)])
        by_trace: dict[str, list[Any]] = {}
        for run in service.runs.values():
            by_trace.setdefault(run["trace_id"], []).append(run)
    count = 150
    with open(tmp_path / "bad.jsonl", "w") as file:  # noqa: ASYNC230
        for number in range(count):
            runs = json.loads(json.dumps(rng.choice(list(by_trace.values()))))
            for _ in range(rng.randint(1, 6)):
                run = rng.choice(runs)
                path = rng.choice(list(places(run)))
                value = run
                for key in path[:-1]:
                    value = value[key]
                value[path[-1]] = rng.choice(JUNK)
            for run in runs:
                file.write(json.dumps({**run, "trace_id": f"t{number}"}) + "\n")
    done = import_traces(FileSource(tmp_path / "bad.jsonl", tmp_path, format="langsmith"), tmp_path)
    assert done.failed == 0 and done.traces + done.empty == count and done.traces > count * 0.9
    assert len(stored(tmp_path)) == done.traces and done.problems
