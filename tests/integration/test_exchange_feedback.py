"""Verdicts become LangSmith feedback once, whatever stops the command; what people said there becomes labels that validate a coach."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tracers.langchain import LangChainTracer
from langsmith import Client
from typer.testing import CliRunner

from mappa_graph import TraceStore, Verdict
from mappa_graph.cli import app as commands
from mappa_graph.coach.validation import read_labels
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.importer import import_traces
from mappa_graph.exchange.langsmith import LangSmithSource
from mappa_graph.exchange.writeback import LangSmithTarget, write_back
from mappa_graph.record import EpisodeTrace
from tests.fakes.langsmith import LangSmith
from tests.fakes.openai_server import OpenAIServer
from tests.fakes.shapes import loop, run_live, tools


@pytest.fixture
def service() -> Iterator[LangSmith]:
    with LangSmith() as service:
        yield service


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(lambda body: "") as server:
        yield server


def client_of(service: LangSmith) -> Client:
    return Client(api_url=service.url, api_key="x", auto_batch_tracing=False)


async def production(service: LangSmith, server: OpenAIServer, run: Path) -> EpisodeTrace:
    """One imported trace of a loop with two agents and four actions."""
    client = Client(api_url=service.url, api_key="x", auto_batch_tracing=True)
    shape = loop(server)
    await run_live(shape, [LangChainTracer(client=client, project_name="production")])
    client.flush(timeout=60)
    client.cleanup()
    import_traces(LangSmithSource("production", run, client=client_of(service)), run, agents=shape.agents)
    return only(run)


def only(run: Path) -> EpisodeTrace:
    with TraceStore(run / "trace.db", read_only=True) as store:
        (trace,) = store.traces()
        return trace


def judge(run: Path, scores: dict[str, float | None], reason: str = "because") -> None:
    trace = only(run)
    with TraceStore(run / "trace.db") as store:
        for id, score in scores.items():
            verdict = Verdict(score, reason, coach="tens@1") if score is not None else Verdict(None, error="no answer")
            store.add_verdict(trace.episode.id, id, verdict)


async def test_verdicts_become_feedback_on_the_models_runs_once(
    service: LangSmith, server: OpenAIServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = await production(service, server, tmp_path)
    a, b, c, d = (x.id for x in trace.actions)
    judge(tmp_path, {a: 10.0, b: 2.5, c: None})
    service.refuse["POST /feedback"] = deque([(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})])
    done = write_back(tmp_path, LangSmithTarget(client=client_of(service)))
    assert (done.written, done.unscored, done.unchanged, dict(done.failed)) == (2, 1, 0, {})
    assert "Traceback" not in caplog.text and "Error creating feedback" not in caplog.text
    assert {(f["run_id"], f["key"], f["score"], f["comment"]) for f in service.feedback.values()} == {
        (a, "mappa_score", 10.0, "because"), (b, "mappa_score", 2.5, "because"),
    }  # fmt: skip
    for one in service.feedback.values():
        assert one["session_id"] == service.session("production")
        assert one["feedback_source"]["type"] == "model" and one["feedback_source"]["metadata"]["coach"] == "tens@1"
    posts = service.asked["POST /feedback"]
    done = write_back(tmp_path, LangSmithTarget(client=client_of(service)))
    assert (done.written, done.unchanged) == (0, 2) and service.asked["POST /feedback"] == posts
    judge(tmp_path, {a: 4.0, d: 6.0}, "on second thought")
    done = write_back(tmp_path, LangSmithTarget(client=client_of(service)))
    assert (done.written, done.changed, done.unchanged) == (2, 1, 1)
    assert {f["run_id"]: f["score"] for f in service.feedback.values()} == {a: 4.0, b: 2.5, d: 6.0}


async def test_a_killed_write_back_goes_on_and_sends_nothing_twice(service: LangSmith, server: OpenAIServer, tmp_path: Path) -> None:
    trace = await production(service, server, tmp_path)
    judge(tmp_path, {x.id: float(i) for i, x in enumerate(trace.actions)})

    class Killed(BaseException):
        pass

    target = LangSmithTarget(client=client_of(service))
    write = target.write

    def killing(*args: Any) -> Any:
        write(*args)
        if len(service.feedback) == 2:
            raise Killed  # after the request, and before it is noted
        return "noted"

    target.write = killing  # type: ignore[method-assign]
    with pytest.raises(Killed):
        write_back(tmp_path, target)
    done = write_back(tmp_path, LangSmithTarget(client=client_of(service)))
    assert (done.written, done.unchanged) == (3, 1)
    assert {f["run_id"]: f["score"] for f in service.feedback.values()} == {x.id: float(i) for i, x in enumerate(trace.actions)}


async def test_a_run_that_was_deleted_is_counted_and_a_refusal_ends_it(service: LangSmith, server: OpenAIServer, tmp_path: Path) -> None:
    trace = await production(service, server, tmp_path)
    judge(tmp_path, {x.id: 5.0 for x in trace.actions})
    del service.runs[trace.actions[1].id]
    done = write_back(tmp_path, LangSmithTarget(client=client_of(service)))
    assert done.written == 3 and dict(done.failed) == {"the run is not there any more": 1}
    service.refuse["POST /feedback"] = deque([(401, {})])
    with pytest.raises(ConfigError, match="feedback"):
        write_back(tmp_path, LangSmithTarget(client=client_of(service)))


async def test_what_people_said_becomes_labels_and_what_models_and_we_said_does_not(
    service: LangSmith, server: OpenAIServer, tmp_path: Path
) -> None:
    trace = await production(service, server, tmp_path)
    a, b, c, d = (x.id for x in trace.actions)
    judge(tmp_path, {a: 10.0, b: 1.0, c: 9.0, d: 3.0})
    write_back(tmp_path, LangSmithTarget(client=client_of(service)))
    node = service.runs[a]["parent_run_id"]
    service.say(node, "thumb", 1, comment="nice")  # on the step around the call
    service.say(b, "thumb", 0, source="api")
    service.say(c, "thumb", 1)
    service.say(c, "stars", 4)
    service.say(d, "stars", 2)
    service.say(d, "judge", 0.9, source="model")
    service.say(d, "odd", 1234)
    service.say(d, "word", value="good")
    service.say(trace.episode.id, "thumb", 0)  # on the whole trace: on no one action
    done = import_traces(LangSmithSource("production", tmp_path, client=client_of(service)), tmp_path, outcome_key="thumb")
    assert (done.updated, done.labels) == (1, 4)
    assert done.scales == {
        "odd": "left out: values from 1234 to 1234 are on no usual scale; give it: --scale odd=LOW..HIGH",
        "stars": "1..5 -> 0..10 (from its values)",
        "thumb": "0..1 -> 0..10 (from its values)",
        "word": "0..1 -> 0..10 (from its values)",
    }
    rows = {r["action"]: r for r in map(json.loads, (tmp_path / "labels.jsonl").read_text().splitlines())}
    assert {id: r["score"] for id, r in rows.items()} == {a: 10.0, b: 0.0, c: 8.75, d: 6.25}
    assert rows[a]["comment"] == "nice" and rows[c]["keys"] == {"thumb": 10.0, "stars": 7.5} and rows[b]["agent"] == "critic"
    assert done.problems == {"feedback on a step of no one action (labels none)": 1}
    again = only(tmp_path)
    assert again.episode.outcome is not None and again.episode.outcome.success is False
    assert {id: v.score for id, v in again.verdicts.items()} == {a: 10.0, b: 1.0, c: 9.0, d: 3.0}

    # The labels are what `coach validate` reads.
    assert {id: label.score for id, label in read_labels(tmp_path / "labels.jsonl").items()} == {a: 10.0, b: 0.0, c: 8.75, d: 6.25}
    words = ["coach", "validate", str(tmp_path), "--labels", str(tmp_path / "labels.jsonl"), "--stored"]
    said = await asyncio.to_thread(CliRunner().invoke, commands, words)
    assert said.exit_code == 0, said.output
    assert "against labels   4 actions" in said.output

    scaled = import_traces(
        LangSmithSource("production", tmp_path, client=client_of(service)), tmp_path, scales={"odd": (0, 2000)}, label_keys=["odd"]
    )
    assert scaled.scales == {"odd": "0..2000 -> 0..10 (given)"} and scaled.labels == 1


async def test_verdicts_on_others_actions_are_told_apart(service: LangSmith, server: OpenAIServer, tmp_path: Path) -> None:
    from mappa_graph.exchange.importer import SpanSource

    spans = [
        {"id": "r", "trace_id": "t", "name": "app", "kind": "chain", "start": 1.0, "end": 3.0, "inputs": "hi"},
        {
            "id": "m",
            "trace_id": "t",
            "parent_id": "r",
            "name": "llm",
            "kind": "llm",
            "start": 1.5,
            "end": 2.0,
            "inputs": "hi",
            "outputs": "ho",
        },
    ]
    import_traces(SpanSource(spans), tmp_path)
    judge(tmp_path, {"m": 5.0})
    done = write_back(tmp_path, LangSmithTarget(client=client_of(service)))
    assert (done.written, done.foreign) == (0, 1)
    with pytest.raises(ConfigError, match="no recorded run"):
        write_back(tmp_path / "nothing", LangSmithTarget(client=client_of(service)))


async def test_a_live_record_is_written_to_by_the_project_it_was_traced_in(
    service: LangSmith, server: OpenAIServer, tmp_path: Path
) -> None:
    client = Client(api_url=service.url, api_key="x", auto_batch_tracing=True)
    live = await run_live(tools(server), [LangChainTracer(client=client, project_name="staging")])
    client.flush(timeout=60)
    client.cleanup()
    with TraceStore(tmp_path / "trace.db") as store:
        store.save_episode(live)
    judge(tmp_path, {live.actions[0].id: 7.0})
    done = write_back(tmp_path, LangSmithTarget(client=client_of(service), project="staging"))
    assert done.written == 1
    (one,) = service.feedback.values()
    assert one["session_id"] == service.session("staging") and one["run_id"] == live.actions[0].id
