"""Runs as OpenInference's LangChain instrumentor writes them, by its published attribute names (and checked against its 0.1.80).

`spans` gives what OpenTelemetry's SDK writes with `span.to_json()`, `otlp` the same as one OTLP JSON message. Where the instrumentor
itself is installed, a test uses it instead.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from uuid import UUID

_PLAIN = {"human": "human", "ai": "ai", "tool": "tool", "system": "system"}


def spans(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_span(run) for run in sorted(runs, key=lambda r: r["end_time"])]


def otlp(flat: list[dict[str, Any]]) -> dict[str, Any]:
    made = []
    for span in flat:
        events = [
            {"name": e["name"], "timeUnixNano": str(_nano(span["end_time"])), "attributes": _keyed(e["attributes"])} for e in span["events"]
        ]
        made.append(
            {
                "traceId": span["context"]["trace_id"][2:],
                "spanId": span["context"]["span_id"][2:],
                "parentSpanId": (span["parent_id"] or "")[2:],
                "name": span["name"],
                "kind": 1,
                "startTimeUnixNano": str(_nano(span["start_time"])),
                "endTimeUnixNano": str(_nano(span["end_time"])),
                "attributes": _keyed(span["attributes"]),
                "events": events,
                "status": {"code": 2, "message": span["status"]["description"]} if events else {"code": 1},
            }
        )
    scope = {"scope": {"name": "openinference.instrumentation.langchain"}, "spans": made}
    return {"resourceSpans": [{"resource": {"attributes": _keyed({"service.name": "app"})}, "scopeSpans": [scope]}]}


def _nano(text: str) -> int:
    whole = datetime.fromisoformat(text)
    return int(whole.timestamp()) * 10**9 + whole.microsecond * 1000


def _keyed(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    def value(v: Any) -> dict[str, Any]:
        if isinstance(v, bool):
            return {"boolValue": v}
        if isinstance(v, int):
            return {"intValue": str(v)}
        if isinstance(v, float):
            return {"doubleValue": v}
        if isinstance(v, list):
            return {"arrayValue": {"values": [value(x) for x in v]}}
        return {"stringValue": str(v)}

    return [{"key": k, "value": value(v)} for k, v in attributes.items()]


def _hex(id: str, digits: int) -> str:
    return "0x" + UUID(id).hex[-digits:]


def _span(run: dict[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for side, key in (("input", "inputs"), ("output", "outputs")):
        value = run.get(key)
        if value is None:
            continue
        if run["run_type"] != "llm":
            wrapped = isinstance(value, dict) and len(value) == 1 and side in value
            value = _typed(value[side] if wrapped and (run["run_type"] == "tool" or not isinstance(value[side], dict)) else value)
        plain = isinstance(value, str)
        attributes[f"{side}.value"] = value if plain else json.dumps(value)
        attributes[f"{side}.mime_type"] = "text/plain" if plain else "application/json"
    kind = {"llm": "LLM", "tool": "TOOL"}.get(run["run_type"], "AGENT" if "agent" in run["name"].lower() else "CHAIN")
    if kind == "LLM":
        _add_messages(attributes, run)
    if kind == "TOOL":
        attributes["tool.name"] = run["name"]
    metadata = run["extra"]["metadata"]
    attributes |= {"openinference.span.kind": kind, "metadata": json.dumps(metadata), "session.id": metadata.get("thread_id", "")}
    events, status = [], {"status_code": "OK"}
    if run.get("error"):
        text, _, trace = run["error"].partition("Traceback (most recent call last):")
        last = run["error"].rstrip().rsplit("\n\n", 1)[-1].strip()
        about = {"exception.message": text, "exception.type": last.split(":")[0], "exception.stacktrace": run["error"]}
        events.append({"name": "exception", "timestamp": run["end_time"], "attributes": about})
        status = {"status_code": "ERROR", "description": text + trace[:0]}
    return {
        "name": run["name"],
        "context": {"trace_id": _hex(run["trace_id"], 32), "span_id": _hex(run["id"], 16), "trace_state": "[]"},
        "kind": "SpanKind.INTERNAL",
        "parent_id": _hex(run["parent_run_id"], 16) if run.get("parent_run_id") else None,
        "start_time": run["start_time"],
        "end_time": run["end_time"],
        "status": status,
        "attributes": attributes,
        "events": events,
        "links": [],
    }


def _add_messages(attributes: dict[str, Any], run: dict[str, Any]) -> None:
    params = run["extra"].get("invocation_params") or {}
    attributes["llm.invocation_parameters"] = json.dumps(params)
    attributes["llm.model_name"] = params.get("model", "")
    if run.get("outputs"):
        attributes["output.value"] = json.dumps(run["outputs"])
    for number, message in enumerate(run["inputs"]["messages"][0]):
        kwargs = message["kwargs"]
        attributes[f"llm.input_messages.{number}.message.role"] = {"human": "user", "ai": "assistant"}.get(kwargs["type"], kwargs["type"])
        attributes[f"llm.input_messages.{number}.message.content"] = kwargs["content"]


def _typed(value: Any) -> Any:
    """Messages as `messages_to_dict` writes them."""
    if isinstance(value, dict):
        if value.get("type") in _PLAIN and "content" in value:
            return {"type": value["type"], "data": value}
        return {k: _typed(v) for k, v in value.items()}
    return [_typed(v) for v in value] if isinstance(value, list) else value
