"""Traces that MLflow's autologging left in a real store come back as the records of the live runs, and verdicts go back to them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from mappa_graph import TraceStore, Verdict
from mappa_graph.errors import ConfigError
from mappa_graph.exchange.importer import import_traces
from mappa_graph.exchange.writeback import MlflowTarget, write_back
from mappa_graph.record import EpisodeTrace
from tests.fakes.normal import normal
from tests.fakes.openai_server import OpenAIServer
from tests.fakes.shapes import SHAPES, run_live, tools

mlflow = pytest.importorskip("mlflow")

from mappa_graph.exchange.mlflow import MlflowSource  # noqa: E402

LOST = {"loop", "agent", "fan", "retried"}
"""Shapes with calls whose message no node returned: MLflow keeps neither their id nor why they ended."""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with its tables; to make them takes seconds."""
    before = mlflow.get_tracking_uri()
    settings = pytest.MonkeyPatch()
    settings.setenv("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # a trace is there when its run has ended, without seconds of waiting
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    mlflow.langchain.autolog()
    yield uri
    mlflow.langchain.autolog(disable=True)
    mlflow.set_tracking_uri(before)
    settings.undo()


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(lambda body: "") as server:
        yield server


async def traced(name: str, server: OpenAIServer) -> EpisodeTrace:
    mlflow.set_experiment(name)
    return await run_live(SHAPES[name.split("-")[0]](server))


def stored(run: Path) -> list[EpisodeTrace]:
    with TraceStore(run / "trace.db", read_only=True) as store:
        return list(store.traces())


def without_what_is_lost(found: dict[str, Any]) -> dict[str, Any]:
    """Without the call's id and the finish reason of an action."""
    return {**found, "actions": [a[:7] + a[8:9] + a[10:] for a in found["actions"]]}


@pytest.mark.parametrize("name", SHAPES)
async def test_a_trace_is_the_live_record_but_for_what_is_said_to_be_lost(
    name: str, uri: str, server: OpenAIServer, tmp_path: Path
) -> None:
    live = await traced(name, server)
    done = import_traces(MlflowSource(name, uri=uri), tmp_path, agents=SHAPES[name](server).agents)
    (trace,) = stored(tmp_path)
    lost = done.lost["response id (tokens can't be found by it)"]
    assert lost == sum(a.call_id is not None for a in live.actions) - sum(a.call_id is not None for a in trace.actions)
    assert (lost > 0) is (name in LOST)
    if name in LOST:
        assert without_what_is_lost(normal(trace)) == without_what_is_lost(normal(live))
    else:
        assert normal(trace) == normal(live)
    assert trace.episode.thread_id == "thread 1" and not done.problems


async def test_a_second_import_asks_only_for_what_is_new(uri: str, server: OpenAIServer, tmp_path: Path) -> None:
    for _ in range(2):
        await traced("loop-more", server)
    agents = SHAPES["loop"](server).agents
    assert import_traces(MlflowSource("loop-more", uri=uri), tmp_path, agents=agents).traces == 2
    again = import_traces(MlflowSource("loop-more", uri=uri), tmp_path, agents=agents)
    assert (again.traces, again.actions) == (0, 0)
    await traced("loop-more", server)
    assert import_traces(MlflowSource("loop-more", uri=uri), tmp_path, agents=agents).traces == 1
    whole = import_traces(MlflowSource("loop-more", uri=uri), tmp_path, agents=agents, again=True)
    assert (whole.traces, whole.known) == (0, 3)
    assert len(stored(tmp_path)) == 3


async def test_a_filter_is_mlflows_own_and_an_unknown_experiment_is_named(uri: str, server: OpenAIServer, tmp_path: Path) -> None:
    await traced("failing-filtered", server)
    await traced("failing-filtered", server)
    assert import_traces(MlflowSource("failing-filtered", uri=uri, filter="status = 'OK'"), tmp_path / "a").traces == 0
    assert import_traces(MlflowSource("failing-filtered", uri=uri, filter="status = 'ERROR'"), tmp_path / "b").traces == 2
    with pytest.raises(ConfigError, match="no experiment 'nothing'"):
        MlflowSource("nothing", uri=uri)


async def test_verdicts_become_assessments_once_and_human_ones_become_labels(uri: str, server: OpenAIServer, tmp_path: Path) -> None:
    from mlflow.entities import AssessmentSource

    mlflow.set_experiment("tools-rated")
    await run_live(tools(server))
    import_traces(MlflowSource("tools-rated", uri=uri), tmp_path)
    (trace,) = stored(tmp_path)
    first, second, third, last = trace.actions
    with TraceStore(tmp_path / "trace.db") as store:
        store.add_verdict(trace.episode.id, first.id, Verdict(8.0, "good call", coach="tens@1"))
        store.add_verdict(trace.episode.id, second.id, Verdict(1.0, "no such tool", blame=("solver",), better_action="add"))
        store.add_verdict(trace.episode.id, third.id, Verdict(None, error="no answer"))
    done = write_back(tmp_path, MlflowTarget(uri=uri))
    assert (done.written, done.unscored, done.unchanged) == (2, 1, 0)

    def assessments() -> dict[tuple[str, str], tuple[Any, str, str]]:
        found = mlflow.get_trace(trace.episode.id).info.assessments
        return {(a.span_id, a.name): (a.feedback.value, a.rationale, a.source.source_type) for a in found}

    span = {a.id: a.id.rsplit(":", 1)[1] for a in trace.actions}
    assert assessments() == {
        (span[first.id], "mappa_score"): (8.0, "good call", "LLM_JUDGE"),
        (span[second.id], "mappa_score"): (1.0, "no such tool\nblame: solver\nbetter: add", "LLM_JUDGE"),
    }
    # What is noted as written is not sent again; without the note it is found there; a changed verdict changes it.
    assert write_back(tmp_path, MlflowTarget(uri=uri)).unchanged == 2
    with sqlite3.connect(tmp_path / "imports.db") as ledger:
        ledger.execute("DELETE FROM written")
    assert write_back(tmp_path, MlflowTarget(uri=uri)).written == 2
    with TraceStore(tmp_path / "trace.db") as store:
        store.add_verdict(trace.episode.id, first.id, Verdict(9.0, "better than good", coach="tens@2"))
    done = write_back(tmp_path, MlflowTarget(uri=uri))
    assert (done.written, done.changed, done.unchanged) == (1, 1, 1)
    assert len(assessments()) == 2 and assessments()[span[first.id], "mappa_score"][:2] == (9.0, "better than good")

    person = AssessmentSource(source_type="HUMAN", source_id="ann")
    mlflow.log_feedback(trace_id=trace.episode.id, span_id=span[last.id], name="stars", value=4, source=person, rationale="fine")
    mlflow.log_feedback(trace_id=trace.episode.id, span_id=span[first.id], name="stars", value=1, source=person)
    mlflow.log_feedback(trace_id=trace.episode.id, name="whole", value=True, source=person)
    done = import_traces(MlflowSource("tools-rated", uri=uri), tmp_path, again=True, outcome_key="whole")
    assert (done.traces, done.updated, done.labels) == (0, 1, 2)
    from mappa_graph.coach.validation import read_labels

    assert {id: label.score for id, label in read_labels(tmp_path / "labels.jsonl").items()} == {last.id: 7.5, first.id: 0.0}
    assert done.scales == {"stars": "1..5 -> 0..10 (from its values)"}
    (trace,) = stored(tmp_path)
    assert trace.episode.outcome is not None and trace.episode.outcome.success
    assert trace.verdicts[first.id].score == 9.0


async def test_a_server_is_read_and_written_as_its_store_is(
    uri: str, server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await traced("tools-served", server)
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", uri)
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    from mlflow.server.fastapi_app import app

    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        while not running.started:
            await asyncio.to_thread(threading.Event().wait, 0.01)
        url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
        done = await asyncio.to_thread(lambda: import_traces(MlflowSource("tools-served", uri=url), tmp_path))
        (trace,) = stored(tmp_path)
        assert normal(trace) == normal(live) and done.traces == 1
        with TraceStore(tmp_path / "trace.db") as store:
            store.add_verdict(trace.episode.id, trace.actions[0].id, Verdict(6.0, "so so"))
        written = await asyncio.to_thread(lambda: write_back(tmp_path, MlflowTarget(uri=url)))
        assert written.written == 1
    finally:
        running.should_exit = True
        thread.join(10)
    assert mlflow.get_tracking_uri() == uri
    (one,) = mlflow.get_trace(trace.episode.id).info.assessments
    assert (one.feedback.value, one.rationale) == (6.0, "so so")
