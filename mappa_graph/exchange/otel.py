"""OpenTelemetry spans as spans of a trace: OTLP JSON, the SDK's JSON, and flat tables, in the words of OpenInference or GenAI.

Attributes come flat (`llm.input_messages.0.message.role`), nested, or as OTLP's list of keyed values; here they are one flat dict. What a
span is, what went in and what came out is looked for under OpenInference's names first, then under OpenTelemetry's GenAI
conventions, then under what LangSmith's and Traceloop's exporters write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_KIND = ("openinference.span.kind", "langsmith.span.kind", "traceloop.span.kind", "gen_ai.operation.name", "mlflow.spanType", "span_kind")
_INPUT = ("input.value", "gen_ai.input.messages", "gen_ai.prompt", "traceloop.entity.input", "gen_ai.tool.call.arguments")
_OUTPUT = ("output.value", "gen_ai.output.messages", "gen_ai.completion", "traceloop.entity.output", "gen_ai.tool.call.result")
_TOOL_CALL = ("gen_ai.tool.call.id", "tool_call.id", "tool.call.id", "message.tool_call_id")
_MODEL = ("llm.model_name", "gen_ai.response.model", "gen_ai.request.model")
_NUMBERED = re.compile(r"(.+?)\.(\d+)\.(.+)\Z")
_VALUES = ("stringValue", "string_value", "boolValue", "bool_value", "doubleValue", "double_value", "bytesValue", "bytes_value")
_MAX_NUMBER = 100_000


def is_otel(row: Mapping[str, Any]) -> bool:
    """Whether a row of a file is OpenTelemetry's."""
    return any(k in row for k in ("resourceSpans", "resource_spans", "traceId", "context.trace_id", "scopeSpans")) or (
        isinstance(row.get("context"), dict) and "span_id" in row["context"]
    )


def rows_to_spans(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The spans in rows: a row is one span, or one OTLP message of many."""
    for row in rows:
        groups = row.get("resourceSpans") or row.get("resource_spans")
        if isinstance(groups, list):
            for group in groups:
                scopes = group.get("scopeSpans") or group.get("scope_spans") or () if isinstance(group, dict) else ()
                for scope in scopes:
                    for span in scope.get("spans") or () if isinstance(scope, dict) else ():
                        if isinstance(span, dict):
                            yield span_of(span)
        else:
            yield span_of(row)


def span_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One OTel span as a span of a trace."""
    context = raw.get("context")
    context = context if isinstance(context, dict) else {}
    trace = _first(raw, "traceId", "trace_id", "context.trace_id") or context.get("trace_id")
    id = _first(raw, "spanId", "span_id", "context.span_id") or context.get("span_id")
    parent = _first(raw, "parentSpanId", "parent_span_id", "parent_id")
    flat = attributes(raw)
    kind = _kind(flat, raw)
    metadata = _metadata(flat)
    error = _error(raw)
    data: dict[str, Any] = {
        "id": _hex(id),
        "trace_id": _hex(trace),
        "parent_id": _hex(parent),
        "name": _name(raw, flat, kind),
        "kind": kind,
        "start": _time(raw, "start"),
        "end": _time(raw, "end"),
        "error": error,
        "metadata": metadata,
        "tags": _read(flat.get("tag.tags")) or (),
        "params": _params(flat),
        "tool_call_id": next((flat[k] for k in _TOOL_CALL if flat.get(k)), None),
        "usage": {k.rsplit(".", 1)[-1]: v for k, v in flat.items() if k.startswith(("llm.token_count.", "gen_ai.usage."))},
    }
    if kind.lower() in ("llm", "chat", "chat_model", "text_completion", "completion", "generation"):
        data["inputs"], data["outputs"] = _said(flat, error)
    else:
        data["inputs"] = next((_value(flat, k) for k in _INPUT if flat.get(k) is not None), None)
        data["outputs"] = next((_value(flat, k) for k in _OUTPUT if flat.get(k) is not None), None)
    return data


def attributes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A span's attributes as one flat dict, however they are written."""
    given = raw.get("attributes")
    if isinstance(given, str):
        given = _read(given)
    out: dict[str, Any] = {}
    if isinstance(given, list):
        for item in given:
            if isinstance(item, dict) and "key" in item:
                out[str(item["key"])] = _otlp(item.get("value"))
    elif isinstance(given, dict):
        _flatten(given, "", out)
    else:
        for key, value in raw.items():
            if key.startswith("attributes.") and value is not None:
                _flatten({key[11:]: value}, "", out)
    return out


def _flatten(value: Any, prefix: str, out: dict[str, Any], depth: int = 0) -> None:
    if isinstance(value, dict) and depth < 12 and (value or not prefix) and prefix not in ("metadata",):
        for key, item in value.items():
            _flatten(item, f"{prefix}.{key}" if prefix else str(key), out, depth + 1)
    elif isinstance(value, list) and depth < 12 and value and all(isinstance(i, dict) for i in value):
        for position, item in enumerate(value):
            _flatten(item, f"{prefix}.{position}", out, depth + 1)
    else:
        out[prefix] = value


def _otlp(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for key in _VALUES:
        if key in value:
            return value[key]
    for key in ("intValue", "int_value"):
        if key in value:
            try:
                return int(value[key])
            except (TypeError, ValueError):
                return value[key]
    array = value.get("arrayValue") or value.get("array_value")
    if isinstance(array, dict):
        return [_otlp(v) for v in array.get("values") or ()]
    pairs = value.get("kvlistValue") or value.get("kvlist_value")
    if isinstance(pairs, dict):
        return {str(p.get("key")): _otlp(p.get("value")) for p in pairs.get("values") or () if isinstance(p, dict)}
    return None


def _time(raw: Mapping[str, Any], side: str) -> Any:
    nanoseconds = _first(raw, f"{side}TimeUnixNano", f"{side}_time_unix_nano")
    try:
        return _first(raw, f"{side}_time", f"{side}Time") if nanoseconds is None else int(nanoseconds) / 1e9
    except (TypeError, ValueError):
        return None


def _kind(flat: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    for key in _KIND:
        value = flat.get(key)
        if isinstance(value, str) and value:
            return value.strip('"')
    if flat.get("llm.request.type"):
        return "llm"
    if isinstance(raw.get("span_kind"), str) and not raw["span_kind"].startswith("SPAN_KIND"):
        return str(raw["span_kind"])
    return "chain"


def _name(raw: Mapping[str, Any], flat: Mapping[str, Any], kind: str) -> Any:
    if kind.lower() in ("tool", "execute_tool"):
        return flat.get("tool.name") or flat.get("gen_ai.tool.name") or raw.get("name")
    return raw.get("name")


def _metadata(flat: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in flat.items():
        if key.startswith("langsmith.metadata."):
            out[key[19:]] = _read(value)
        elif key.startswith("metadata."):
            out[key[9:]] = value
    given = _read(flat.get("metadata"))
    if isinstance(given, dict):
        out.update(given)
    for key in ("session.id", "gen_ai.conversation.id", "traceloop.association.properties.thread_id"):
        if flat.get(key):
            out.setdefault("thread_id", flat[key])
    if flat.get("gen_ai.agent.name"):
        out.setdefault("lc_agent_name", flat["gen_ai.agent.name"])
    return out


def _params(flat: Mapping[str, Any]) -> dict[str, Any]:
    given = _read(flat.get("llm.invocation_parameters"))
    out: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    for key, value in flat.items():
        if key.startswith("gen_ai.request."):
            out.setdefault(key[15:], value)
    if not out.get("model"):
        model = next((flat[k] for k in _MODEL if flat.get(k)), None)
        if model is not None:
            out["model"] = model
    return out


def _said(flat: Mapping[str, Any], error: str | None) -> tuple[Any, Any]:
    """What a model was given and what it said."""
    inputs = _messages(flat, ("llm.input_messages", "gen_ai.prompt"))
    outputs = _messages(flat, ("llm.output_messages", "gen_ai.completion"))
    whole_in = next((_value(flat, k) for k in _INPUT if flat.get(k) is not None), None)
    whole_out = next((_value(flat, k) for k in _OUTPUT if flat.get(k) is not None), None)
    if isinstance(whole_in, dict | list) or not inputs:
        given = whole_in
        if isinstance(given, dict) and "messages" not in given and "prompts" not in given and inputs:
            given = {"messages": inputs}
    else:
        given = {"messages": inputs}
    if error is not None and whole_out is None and not outputs:
        return given, None
    if isinstance(whole_out, dict) and ("generations" in whole_out or "choices" in whole_out):
        return given, whole_out
    said = outputs or whole_out
    reasons = _read(flat.get("gen_ai.response.finish_reasons"))
    finish = flat.get("llm.finish_reason") or (reasons[0] if isinstance(reasons, list) and reasons else None)
    if isinstance(said, list):
        choices = [{"message": m, "finish_reason": (m.get("finish_reason") or finish) if isinstance(m, dict) else finish} for m in said]
    elif said is not None:
        choices = [{"message": said if isinstance(said, dict) else {"role": "assistant", "content": str(said)}, "finish_reason": finish}]
    else:
        return given, None
    return given, {"choices": choices, "id": flat.get("gen_ai.response.id"), "model": next((flat[k] for k in _MODEL if flat.get(k)), None)}


def _messages(flat: Mapping[str, Any], prefixes: Iterable[str]) -> list[dict[str, Any]]:
    """Messages written as numbered attributes."""
    for prefix in prefixes:
        found: dict[int, dict[str, Any]] = {}
        start = prefix + "."
        for key, value in flat.items():
            if not key.startswith(start):
                continue
            number, _, rest = key[len(start) :].partition(".")
            if number.isdigit() and rest and int(number) < _MAX_NUMBER:
                found.setdefault(int(number), {})[rest.removeprefix("message.")] = value
        if found:
            return [_message(found[i]) for i in sorted(found)]
    return []


def _message(parts: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": parts.get("role") or "assistant", "content": parts.get("content")}
    for key in ("name", "tool_call_id", "finish_reason"):
        if parts.get(key):
            out[key] = parts[key]
    if out["content"] is None:
        texts = [(k, v) for k, v in parts.items() if k.startswith("contents.") and k.endswith("message_content.text")]
        out["content"] = "".join(str(v) for _, v in sorted(texts, key=lambda t: _number(t[0]))) if texts else ""
    calls: dict[int, dict[str, Any]] = {}
    for key, value in parts.items():
        match = _NUMBERED.match(key)
        if match is not None and match.group(1) == "tool_calls":
            calls.setdefault(int(match.group(2)), {})[match.group(3).removeprefix("tool_call.")] = value
    if calls:
        out["tool_calls"] = [
            {
                "id": c.get("id"),
                "type": "function",
                "function": {
                    "name": c.get("function.name") or c.get("name"),
                    "arguments": c.get("function.arguments") or c.get("arguments"),
                },
            }
            for _, c in sorted(calls.items())
        ]
    return out


def _number(key: str) -> int:
    match = re.search(r"\.(\d+)\.", key)
    return int(match.group(1)) if match else 0


def _error(raw: Mapping[str, Any]) -> str | None:
    status = raw.get("status")
    status = status if isinstance(status, dict) else {}
    code = str(status.get("code") or status.get("status_code") or raw.get("status_code") or "")
    if code not in ("2", "ERROR", "STATUS_CODE_ERROR", "StatusCode.ERROR"):
        return None
    events = _read(raw.get("events"))
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and event.get("name") == "exception":
            about = attributes(event) or event
            stack = str(about.get("exception.stacktrace") or "")
            text = f"{about.get('exception.type') or 'Error'}: {about.get('exception.message') or ''}"
            return f"{text}\n{stack}" if "Traceback (most recent call last):" in stack else text
    return str(status.get("message") or status.get("description") or raw.get("status_message") or "Error")


def _value(flat: Mapping[str, Any], key: str) -> Any:
    value = flat[key]
    mime = flat.get(key.rsplit(".", 1)[0] + ".mime_type")
    return value if mime == "text/plain" else _read(value)


def _read(value: Any) -> Any:
    """A text that is JSON, read."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _first(raw: Mapping[str, Any], *names: str) -> Any:
    return next((raw[n] for n in names if raw.get(n) not in (None, "")), None)


def _hex(value: Any) -> str | None:
    """An id in plain hex: OTLP JSON has it so, the SDK's JSON with 0x before it."""
    if value is None:
        return None
    text = str(value)
    text = text.removeprefix("0x")
    return None if not text.strip("0") else text
