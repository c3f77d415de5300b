"""OpenTelemetry spans come back as the records of the live runs: OTLP JSON, the SDK's JSON, flat tables, OpenInference and GenAI names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from langchain_core.tracers.langchain import LangChainTracer
from langsmith import Client

from mappa_graph import TraceStore
from mappa_graph.exchange.files import FileSource
from mappa_graph.exchange.importer import Imported, import_traces
from mappa_graph.record import EpisodeTrace
from tests.fakes.langsmith import LangSmith
from tests.fakes.normal import normal
from tests.fakes.openai_server import OpenAIServer
from tests.fakes.openinference import otlp, spans
from tests.fakes.shapes import SHAPES, Shape, run_live


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(lambda body: "") as server:
        yield server


async def recorded(shape: Shape) -> tuple[EpisodeTrace, list[dict[str, Any]]]:
    with LangSmith() as service:
        client = Client(api_url=service.url, api_key="x", auto_batch_tracing=True)
        live = await run_live(shape, [LangChainTracer(client=client, project_name="p")])
        client.flush(timeout=60)
        client.cleanup()
        return live, spans(list(service.runs.values()))


def imported(path: Path, run: Path, shape: Shape) -> tuple[EpisodeTrace, Imported]:
    done = import_traces(FileSource(path, run), run, agents=shape.agents)
    with TraceStore(run / "trace.db", read_only=True) as store:
        (trace,) = store.traces()
    return trace, done


@pytest.mark.parametrize("name", SHAPES)
async def test_a_trace_is_the_live_record_in_each_spelling(name: str, server: OpenAIServer, tmp_path: Path) -> None:
    shape = SHAPES[name](server)
    live, flat = await recorded(shape)
    (tmp_path / "otlp.jsonl").write_text(json.dumps(otlp(flat)) + "\n")
    (tmp_path / "otlp.json").write_text(json.dumps(otlp(flat), indent=1))
    (tmp_path / "sdk.jsonl").write_text("".join(json.dumps(s) + "\n" for s in flat))
    columns = []
    for span in flat:
        row: dict[str, Any] = {k: span[k] for k in ("name", "parent_id", "start_time", "end_time")}
        row |= {f"context.{k}": span["context"][k] for k in ("trace_id", "span_id")}
        row |= {"status_code": span["status"]["status_code"], "events": json.dumps(span["events"])}
        row |= {f"attributes.{k}": v for k, v in span["attributes"].items() if not k.startswith("llm.input_messages")}
        columns.append(row)
    names = sorted({k for row in columns for k in row})
    pq.write_table(pa.Table.from_pylist([{k: row.get(k) for k in names} for row in columns]), tmp_path / "flat.parquet")
    for kind in ("otlp.jsonl", "otlp.json", "sdk.jsonl", "flat.parquet"):
        trace, done = imported(tmp_path / kind, tmp_path / f"run-{kind}", shape)
        assert normal(trace) == normal(live), kind
        assert trace.episode.id == flat[0]["context"]["trace_id"][2:] and trace.episode.thread_id == "thread 1"
        # OpenInference keeps a tool call's id only in what the tool gave back; one that failed gave nothing.
        failed = sum(
            e.status == "error" and e.error is not None and e.error.type != "ToolError" for a in live.actions for e in a.executions
        )
        assert dict(done.lost) == ({"tool call id": failed} if failed else {})
        assert not done.problems


@pytest.mark.parametrize("name", SHAPES)
async def test_the_instrumentors_own_spans_are_the_live_record(name: str, server: OpenAIServer, tmp_path: Path) -> None:
    instrumentation = pytest.importorskip("openinference.instrumentation.langchain")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = instrumentation.LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=provider, skip_dep_check=True)
    try:
        shape = SHAPES[name](server)
        live = await run_live(shape)
    finally:
        instrumentor.uninstrument()
    (tmp_path / "spans.jsonl").write_text("".join(s.to_json(indent=None) + "\n" for s in exporter.get_finished_spans()))
    trace, _ = imported(tmp_path / "spans.jsonl", tmp_path / "run", shape)
    assert normal(trace) == normal(live)


def span(id: int, parent: int | None, name: str, start: float, end: float, **attributes: Any) -> dict[str, Any]:
    return {
        "traceId": f"{7:032x}", "spanId": f"{id:016x}", "parentSpanId": "" if parent is None else f"{parent:016x}", "name": name,
        "startTimeUnixNano": str(int(start * 1e9)), "endTimeUnixNano": str(int(end * 1e9)),
        "attributes": [{"key": k.replace("__", "."), "value": {"stringValue": v}} for k, v in attributes.items()],
    }  # fmt: skip


def test_an_app_of_another_framework_in_genai_names_has_nodes_by_its_agents(tmp_path: Path) -> None:
    asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "2 + 3?"}]}])
    call = {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 2, "b": 3}}
    said = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "I add"}, call], "finish_reason": "tool_call"}])
    end = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "5"}], "finish_reason": "stop"}])
    rows = [
        span(1, None, "POST /ask", 1000, 1010),
        span(2, 1, "invoke_agent adder", 1001, 1006, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="adder"),
        span(
            3, 2, "chat gpt", 1001.5, 1002, gen_ai__operation__name="chat", gen_ai__request__model="gpt", gen_ai__response__id="call-1",
            gen_ai__input__messages=asked, gen_ai__output__messages=said,
        ),
        span(4, 2, "execute_tool add", 1003, 1004, gen_ai__operation__name="execute_tool", gen_ai__tool__name="add",
             gen_ai__tool__call__id="c1", gen_ai__tool__call__arguments='{"a": 2, "b": 3}', gen_ai__tool__call__result="5"),
        span(5, 1, "left", 1007, 1009, gen_ai__operation__name="invoke_agent"),
        span(6, 5, "chat gpt", 1007.1, 1008, gen_ai__operation__name="chat", gen_ai__output__messages=end),
        span(7, 1, "right", 1007, 1009, gen_ai__operation__name="invoke_agent"),
        span(8, 7, "chat gpt", 1007.2, 1008, gen_ai__operation__name="chat", gen_ai__output__messages=end),
    ]  # fmt: skip
    (tmp_path / "spans.jsonl").write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": rows}]}]}) + "\n")
    trace, done = imported(tmp_path / "spans.jsonl", tmp_path / "run", Shape(None, None, None))
    place = {t.id: i for i, t in enumerate(trace.transitions)}
    assert [(t.path, t.step, [place[p] for p in t.parents]) for t in trace.transitions] == [
        ("invoke_agent adder", 1, []), ("left", 2, [0]), ("right", 2, [0]),
    ]  # fmt: skip
    first = trace.actions[0]
    assert (first.agent, first.output, first.call_id, first.finish_reason) == ("adder", "I add", "call-1", "tool_call")
    assert [(e.name, e.code, e.result, e.tool_call_id) for e in first.executions] == [("add", '{"a": 2, "b": 3}', "5", "c1")]
    assert list(first.messages) == [{"role": "user", "content": "2 + 3?"}]
    assert trace.edges == ((0, 1), (0, 2))
    assert done.lost["node metadata (steps guessed from times)"] == 3 and done.lost["prompt"] == 2
    assert trace.episode.started == 1000.0
