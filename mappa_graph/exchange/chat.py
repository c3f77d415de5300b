"""Plain chats as traces: a list of messages a row, each reply of the assistant an action.

Known spellings: `messages` (OpenAI's `role` and `content`, tool calls and tool answers included), `conversations` (`from` and `value`), and
`prompt` with `completion` or `response`. A row says no times and no nodes: its actions follow one another in one node. A tool's answer is
the execution of the call that it names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..codec import encode
from .importer import SourceTrace
from .messages import fields_of
from .spans import Notes, name_of, seconds

_STEP_S = 1e-3
_IDS = ("id", "trace_id", "conversation_id", "chat_id", "session_id", "uuid")
_TIMES = ("timestamp", "created_at", "created", "time", "date", "start_time")
_SCORES = ("score", "rating", "label", "reward")


def is_chat(row: Mapping[str, Any]) -> bool:
    if "run_type" in row:
        return False
    return any(isinstance(row.get(k), list | str) for k in ("messages", "conversations", "conversation")) or (
        "prompt" in row and any(k in row for k in ("completion", "response", "chosen"))
    )


def trace_of(row: Mapping[str, Any], agent: str | None, notes: Notes) -> SourceTrace | None:
    """A chat as a trace; None, and counted, where nobody answers in it."""
    messages = _messages(row)
    id = next((name_of(row[k]) for k in _IDS if row.get(k)), None) or _own_id(row)
    if not messages:
        notes.add("chat without messages", id)
        return None
    start = next((t for k in _TIMES if (t := seconds(row.get(k))) is not None), 0.0)
    metadata = row.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    who = row.get("agent") or metadata.get("mappa_agent") or agent
    thread = next((row[k] for k in ("thread_id", "session_id", "conversation_id") if row.get(k)), None)
    if thread is not None:
        metadata.setdefault("thread_id", thread)
    model = row.get("model")
    root = f"{id}:chat"
    at = start
    spans: list[dict[str, Any]] = [
        {
            "id": root,
            "trace_id": id,
            "name": name_of(who or "chat"),
            "kind": "chain",
            "start": start,
            "inputs": {"messages": messages},
            "metadata": metadata,
            "content": hashlib.sha256(encode(messages)).hexdigest(),
        }
    ]
    asked: dict[str, Mapping[str, Any]] = {}
    last: dict[str, Any] | None = None
    for place, (fields, role) in enumerate(messages_read := [f for f in (fields_of(m, spoken=True) for m in messages) if f is not None]):
        at += _STEP_S
        if role == "assistant":
            name = fields.get("agent") or row.get("agent") or fields.get("name") or agent
            about = {} if name is None else {"mappa_agent": name_of(name)}
            last = {
                "id": f"{id}:{place}", "trace_id": id, "parent_id": root, "name": "chat", "kind": "llm", "start": at,
                "end": at + _STEP_S / 2, "inputs": messages[:place],
                "outputs": {"choices": [{"message": fields, "finish_reason": fields.get("finish_reason")}]},
                "metadata": about, "params": {"model": fields.get("model") or model or name or ""},
            }  # fmt: skip
            spans.append(last)
            for call in fields.get("tool_calls") or ():
                if isinstance(call, dict) and call.get("id"):
                    asked[str(call["id"])] = call
        elif role == "tool" and fields.get("tool_call_id") in asked:
            call = asked[str(fields["tool_call_id"])]
            function = call.get("function")
            function = function if isinstance(function, dict) else {"name": call.get("name"), "arguments": call.get("args")}
            spans.append(
                {
                    "id": f"{id}:{place}", "trace_id": id, "parent_id": root, "name": function.get("name") or "tool", "kind": "tool",
                    "start": at, "end": at + _STEP_S / 2, "inputs": _arguments(function.get("arguments")),
                    "outputs": {"type": "tool", "data": {"status": "success", **fields}}, "tool_call_id": fields["tool_call_id"],
                }
            )  # fmt: skip
    if len(messages_read) < len(messages):
        notes.add("message that can't be read", id)
    spans[0]["end"] = at + _STEP_S
    if last is None:
        notes.add("chat without an answer", id)
        return None
    score = next((row[k] for k in _SCORES if row.get(k) is not None), None)
    if score is not None:
        last["feedback"] = [
            {"id": f"{id}:label", "key": "score", "score": score if isinstance(score, int | float) else None, "value": score}
        ]
    return SourceTrace(id, spans)


def _messages(row: Mapping[str, Any]) -> list[Any]:
    for key in ("messages", "conversations", "conversation"):
        value = row.get(key)
        if isinstance(value, str) and value[:1] == "[":
            try:
                value = json.loads(value)
            except ValueError:
                continue
        if isinstance(value, list):
            return value
    prompt = row.get("prompt")
    answer = next((row[k] for k in ("completion", "response", "chosen") if k in row), None)
    if prompt is None or answer is None:
        return []
    return [*_side(prompt, "user"), *_side(answer, "assistant")]


def _side(value: Any, role: str) -> list[Any]:
    return list(value) if isinstance(value, list) else [{"role": role, "content": value if isinstance(value, str) else json.dumps(value)}]


def _arguments(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _own_id(row: Mapping[str, Any]) -> str:
    """Of a chat that has none: from what it says, so that it is the same chat wherever it comes from."""
    return "chat-" + hashlib.sha256(encode(row)).hexdigest()[:24]
