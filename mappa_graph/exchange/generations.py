"""What a model said, as the sources write it; and the ids that a source dropped, found again in the node that returned the message.

MLflow writes model calls as OpenAI chat JSON, without the message's id and without what the server said of the reply, but the step
around the call keeps the whole message: same text, same tool calls. `fill` takes it from there, so that the action still finds its
tokens by id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .messages import fields_of
from .spans import Span, name_of

_MAX_VISITED = 20_000


@dataclass(slots=True)
class Said:
    """One completion: `fields` of its message, or None where the source kept only a text."""

    fields: Mapping[str, Any] | None
    text: str = ""
    response_id: str | None = None
    model: str = ""
    finish_reason: str | None = None


def generations(outputs: Any) -> list[Said]:
    """The completions in a model run's outputs; empty where there is none."""
    if isinstance(outputs, dict):
        for key, read in (("generations", _langchain), ("choices", _openai)):
            if isinstance(outputs.get(key), list):
                return read(outputs)
        for key in ("output", "message", "messages", "response", "content"):
            if key in outputs and fields_of(outputs, spoken=True) is None:
                return generations(outputs[key])
    if isinstance(outputs, list):
        return [one for item in outputs for one in generations(item)]
    if isinstance(outputs, str):
        return [Said({"content": outputs}, outputs)]
    found = fields_of(outputs, spoken=True)
    if found is None:
        return []
    return [_of(found[0], {}, {})]


def _langchain(outputs: Mapping[str, Any]) -> list[Said]:
    whole = outputs.get("llm_output")
    whole = whole if isinstance(whole, dict) else {}
    rows: list[Any] = outputs["generations"]
    if rows and isinstance(rows[0], list):
        rows = rows[0]
    out = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        info = row.get("generation_info")
        found = fields_of(row.get("message"), spoken=True) if row.get("message") is not None else None
        if found is None:
            text = str(row.get("text") or "")
            out.append(Said(None, text, _id(whole.get("id")), str(whole.get("model_name") or ""), _finish(info)))
            continue
        said = _of(found[0], whole, info if isinstance(info, dict) else {})
        said.text = str(row.get("text") or "")
        out.append(said)
    return out


def _openai(outputs: Mapping[str, Any]) -> list[Said]:
    whole = {"id": outputs.get("id"), "model_name": outputs.get("model")}
    out = []
    for choice in outputs["choices"]:
        if not isinstance(choice, dict):
            continue
        found = fields_of(choice.get("message"), spoken=True)
        if found is None:
            out.append(Said(None, str(choice.get("text") or ""), _id(whole["id"]), str(whole["model_name"] or ""), _finish(choice)))
        else:
            out.append(_of(found[0], whole, choice))
    return out


def _of(fields: Mapping[str, Any], whole: Mapping[str, Any], info: Mapping[str, Any]) -> Said:
    about = fields.get("response_metadata")
    about = about if isinstance(about, dict) else {}
    content = fields.get("content")
    return Said(
        fields,
        content if isinstance(content, str) else "",
        _id(about.get("id") or whole.get("id")),
        str(about.get("model_name") or whole.get("model_name") or ""),
        _finish(about) or _finish(info) or _finish(fields),
    )


def _finish(info: Any) -> str | None:
    reason = info.get("finish_reason") if isinstance(info, dict) else None
    return None if not reason else str(reason)


def _id(value: Any) -> str | None:
    return None if value is None or value == "" else name_of(value)


def fill(spans: Sequence[Span], lost: Counter[str]) -> None:
    """Gives model calls whose message has no id the whole message that a step around them returned."""
    models = [s for s in spans if s.kind == "llm" and s.error is None]
    for span in models:
        span.said = generations(span.outputs)
    bare = [s for s in models if s.said and all(o.response_id is None and o.fields is not None and not o.fields.get("id") for o in s.said)]
    if not bare:
        return
    held: dict[str, list[Mapping[str, Any]]] = {}
    used: set[int] = set()
    # The last call first: of equal answers in one step, the last one is what the step returned.
    for span in reversed(bare):
        said: list[Said] = span.said
        above = span.parent
        while above is not None:
            if above.id not in held:
                held[above.id] = list(_assistants(above.outputs))
            match = next((m for m in held[above.id] if id(m) not in used and _alike(m, said[0].fields or {})), None)
            if match is not None and len(said) == 1:
                used.add(id(match))
                span.said = [_of({**match, "name": None}, {}, {})]
                lost["message id (found again in the node's output)"] += 1
            if held[above.id]:
                break  # what encloses that step holds the messages of other steps too
            above = above.parent


def _assistants(value: Any) -> Iterator[Mapping[str, Any]]:
    """The assistant messages with an id inside a value, last first."""
    found: list[Mapping[str, Any]] = []
    stack, visited = [value], 0
    while stack and visited < _MAX_VISITED:
        item = stack.pop()
        visited += 1
        if isinstance(item, dict):
            message = fields_of(item)
            if message is not None:
                if message[1] == "assistant" and message[0].get("id"):
                    found.append(message[0])
                continue
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, list):
            stack.extend(reversed(item))
    return reversed(found)


def _alike(whole: Mapping[str, Any], bare: Mapping[str, Any]) -> bool:
    return _content(whole) == _content(bare) and _called(whole) == _called(bare)


def _content(fields: Mapping[str, Any]) -> str:
    content = fields.get("content")
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(b if isinstance(b, str) else str(b.get("text") or "") for b in content if isinstance(b, str | dict))
    return str(content)


def _called(fields: Mapping[str, Any]) -> list[Any]:
    calls = fields.get("tool_calls") or ()
    out = []
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function")
            if isinstance(function, dict):
                out.append((call.get("id"), function.get("name")))
            else:
                out.append((call.get("id"), call.get("name")))
    return sorted(out, key=lambda c: json.dumps(c, default=str))
