"""Messages, commands and sends as traces spell them, read back into what a live event is copied to.

A message is spelled in four ways: LangChain's constructor JSON (`lc: 1`), its plain dict (`type: human | ai | tool`), that dict under
`data`, and OpenAI's (`role`); LangGraph's `Send` is only its `repr`. The one thing to know: two spellings of one message must come out
as one object, since who answered whom is told by identity; a message that a source stripped of its id is the latest known one with
the same content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..capture.snapshot import CommandSnap, Message, SendSnap
from .spans import name_of

ROLES = {
    "human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "HumanMessage": "user", "AIMessage": "assistant",
    "SystemMessage": "system", "ToolMessage": "tool", "FunctionMessage": "tool", "system": "system", "tool": "tool", "function": "tool",
    "user": "user", "assistant": "assistant", "developer": "system", "model": "assistant", "gpt": "assistant",
}  # fmt: skip
_LANGCHAIN = frozenset(("human", "ai", "AIMessageChunk", "system", "tool", "function"))
_MESSAGE_MARKS = ("response_metadata", "additional_kwargs", "tool_call_id", "id")
COMMAND = frozenset(("graph", "update", "resume", "goto"))
_SEND = re.compile(r"Send\(node='((?:[^'\\]|\\.)*)', arg=(.*?)(?:, timeout=.*)?\)\Z", re.DOTALL)
_MAX_SEND = 200_000
_MAX_DEPTH = 60
HUGE = 1_000_000
"""Characters of a text that are kept; of a longer one, the middle is cut."""


class Read(Message):
    """A message of a trace; `live` is None, and the server's own words about a reply are in `metadata`."""

    __slots__ = ("metadata",)

    def __init__(self, fields: Mapping[str, Any], role: str) -> None:
        self.live = None  # type: ignore[assignment]
        content = fields.get("content")
        if isinstance(content, dict):
            content = [content]
        elif content is not None and not isinstance(content, str | list):
            content = str(content)
        if content.__class__ is str and len(content) > HUGE:
            content = cut(content)
        self.content = self.live_content = "" if content is None else content
        self.role = role
        self.id = _text(fields.get("id"))
        self.name = _text(fields.get("name"))
        self.tool_calls, self.invalid_calls = _calls(fields)
        self.tool_call_id = _text(fields.get("tool_call_id"))
        self.status = _text(fields.get("status"))
        self.artifact = fields.get("artifact")
        extra = fields.get("additional_kwargs")
        reasoning = (extra.get("reasoning_content") if isinstance(extra, dict) else None) or fields.get("reasoning_content") or ""
        self.reasoning = reasoning if role == "assistant" and isinstance(reasoning, str) else ""
        about = fields.get("response_metadata")
        self.metadata: Mapping[str, Any] = about if isinstance(about, dict) else {}
        self._dict = None
        self._ref = None


def cut(text: str) -> str:
    """A text without its middle."""
    half = HUGE // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters cut …\n{text[-half:]}"


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else name_of(value)


def _calls(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    good: list[dict[str, Any]] = []
    bad: list[dict[str, Any]] = []
    given = fields.get("tool_calls") or ()
    if not given and not fields.get("invalid_tool_calls"):
        return good, bad
    for call in given if isinstance(given, list | tuple) else ():
        if not isinstance(call, dict):
            continue
        function = call.get("function")
        if not isinstance(function, dict):
            args = call.get("args")
            good.append({"name": call.get("name"), "args": {} if args is None else args, "id": _text(call.get("id"))})
            continue
        args = function.get("arguments")
        one = {"name": function.get("name"), "args": args, "id": _text(call.get("id"))}
        if isinstance(args, str):
            try:
                one["args"] = json.loads(args) if args else {}
            except ValueError:
                bad.append(one)
                continue
        good.append(one)
    invalid = fields.get("invalid_tool_calls") or ()
    bad += [dict(c) for c in invalid if isinstance(c, dict)] if isinstance(invalid, list | tuple) else []
    return good, bad


def fields_of(value: Any, *, spoken: bool = False) -> tuple[Mapping[str, Any], str] | None:
    """A message's fields and its role, or None for what is no message.

    `spoken`: in a place where only messages can be, such as a model's input; OpenAI's spelling and `[role, text]` pairs count there.
    """
    if isinstance(value, dict):
        if value.get("lc") == 1 and isinstance(value.get("kwargs"), dict):
            kwargs: Mapping[str, Any] = value["kwargs"]
            id = value.get("id")
            name = id[-1] if isinstance(id, list) and id else ""
            role = ROLES.get(str(kwargs.get("type") or "")) or ROLES.get(str(name).removesuffix("Chunk"))
            return None if role is None else (kwargs, role)
        kind = value.get("type")
        if isinstance(kind, str) and kind in _LANGCHAIN:
            data = value.get("data")
            if isinstance(data, dict) and "content" in data:
                return data, ROLES[kind]
            if "content" in value and (spoken or any(m in value for m in _MESSAGE_MARKS)):
                return value, ROLES[kind]
        if spoken:
            role = value.get("role") or value.get("from")
            if isinstance(role, str) and ("content" in value or "tool_calls" in value or "parts" in value or "value" in value):
                return _openai(value), ROLES.get(role, role)
            if isinstance(value.get("message"), dict):
                return fields_of(value["message"], spoken=True)
        return None
    if spoken and isinstance(value, str):
        return {"content": value}, "user"
    if spoken and isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] in ROLES:
        return {"content": value[1]}, ROLES[value[0]]
    return None


def _openai(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if "content" not in value and "value" in value:
        return {**value, "content": value["value"]}
    if "content" in value or "parts" not in value:
        return value
    # The GenAI conventions of OpenTelemetry: parts of text, tool calls, and tool answers.
    parts = [p for p in value["parts"] if isinstance(p, dict)] if isinstance(value["parts"], list) else []
    out = dict(value)
    out["content"] = "".join(str(p.get("content") or "") for p in parts if p.get("type") == "text")
    calls = [p for p in parts if p.get("type") == "tool_call"]
    if calls:
        out["tool_calls"] = [{"id": p.get("id"), "name": p.get("name"), "args": p.get("arguments")} for p in calls]
    answers = [p for p in parts if p.get("type") == "tool_call_response"]
    if answers:
        said = answers[0].get("response", answers[0].get("result"))
        out["content"] = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
        out["tool_call_id"] = answers[0].get("id")
    return out


def _called(calls: Any) -> tuple[Any, ...]:
    """Tells the calls of one message from those of another, however they are written."""
    out = []
    for call in calls if isinstance(calls, list | tuple) else ():
        if isinstance(call, dict):
            function = call.get("function")
            out.append(str(call.get("id") or (function.get("name") if isinstance(function, dict) else call.get("name"))))
    return tuple(out)


class Reader:
    """Reads the values of one trace."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Any, ...], Read] = {}
        self._by_content: dict[tuple[Any, ...], Read] = {}
        self._by_raw: dict[int, tuple[Any, Read]] = {}
        self.sends: list[Sent] = []
        self.cut = 0
        """Texts that were too long."""

    def message(self, fields: Mapping[str, Any], role: str) -> Read:
        """One and the same object for each spelling of a message."""
        known = self._by_raw.get(id(fields))
        if known is not None:
            return known[1]
        content = fields.get("content")
        if content.__class__ is str and len(content) > HUGE:
            self.cut += 1
        text = content if content.__class__ is str else json.dumps(content, sort_keys=True, default=str) if content else ""
        calls = fields.get("tool_calls")
        key = (role, _text(fields.get("tool_call_id")), text, _called(calls) if calls else ())
        name = _text(fields.get("id"))
        if name:
            # Most messages of a trace are ones that were seen before: they are told before they are read.
            made = self._by_key.get((name, *key))
            if made is None:
                made = self._by_key[(name, *key)] = Read(fields, role)
            self._by_content[key] = made
        else:
            made = self._by_content.get(key) or self._by_content.setdefault(key, Read(fields, role))
        self._by_raw[id(fields)] = (fields, made)
        return made

    def prompt(self, value: Any) -> list[Message]:
        """What a model was given: a list of messages, such a list in a list, a text, or a dict with one of these."""
        for key in ("messages", "prompts", "input", "prompt", "text"):
            if isinstance(value, dict) and fields_of(value, spoken=True) is None and key in value:
                value = value[key]
                break
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) and not _pair(value[0]):
            value = value[0]
        found = [fields_of(v, spoken=True) for v in (value if isinstance(value, list) and not _pair(value) else [value])]
        return [self.message(*f) for f in found if f is not None]

    def value(self, value: Any, depth: int = 0) -> Any:
        """A node's input or output as `capture.snapshot.frozen` would have left it."""
        if isinstance(value, dict):
            if depth >= _MAX_DEPTH:
                return "…"
            message = fields_of(value)
            if message is not None:
                return self.message(*message)
            if value.keys() == COMMAND:
                goto = value["goto"]
                targets = [self._target(g) for g in (goto if isinstance(goto, list) else [goto]) if g]
                return CommandSnap(self.value(value["update"], depth + 1), targets, value["resume"] is not None)
            return {str(k): self.value(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(v, depth + 1) for v in value] if depth < _MAX_DEPTH else "…"
        if value.__class__ is str and len(value) > HUGE:
            self.cut += 1
            return cut(value)
        return value

    def route(self, value: Any) -> Any:
        """What a conditional edge returned: node names and sends, or None."""
        if isinstance(value, str):
            return self._target(value)
        if isinstance(value, list) and value and all(isinstance(v, str) or _is_send(v) for v in value):
            return [self._target(v) for v in value]
        return None

    def _target(self, value: Any) -> Any:
        if _is_send(value):
            sent = Sent(value["node"], value["arg"], True)
        elif isinstance(value, str) and value.startswith("Send("):
            sent = _sent(value)
        else:
            return str(value)
        self.sends.append(sent)
        return sent.snap

    def sent(self, node: str, given: Any, place: Any) -> Any:
        """The argument of the send that a pushed node was started with: the one that equals its input, else the one in its place."""
        open_ = [s for s in self.sends if s.snap.node == node and not s.taken]
        match = next((s for s in open_ if s.read and s.arg == given), None)
        if match is None and isinstance(place, int):
            # A node's input can be written another way than the argument was: then the order in which tasks were pushed tells.
            match = next((s for s in open_ if not s.read), None)
        if match is None:
            return None
        match.taken = True
        return match.snap.arg


class Sent:
    """A `Send` in a trace; `snap.arg` is an object of its own, which the node it started is told by."""

    __slots__ = ("arg", "read", "snap", "taken")

    def __init__(self, node: str, arg: Any, read: bool) -> None:
        self.arg = arg
        self.read = read
        self.taken = False
        self.snap = SendSnap(node, [arg])


def _is_send(value: Any) -> bool:
    return isinstance(value, dict) and "node" in value and "arg" in value and len(value) <= 3


def _sent(text: str) -> Any:
    match = _SEND.match(text) if len(text) <= _MAX_SEND else None
    if match is None:
        name = re.match(r"Send\(node='((?:[^'\\]|\\.)*)'", text)
        return Sent(name.group(1) if name else "", None, False)
    try:
        return Sent(match.group(1), _plain(ast.literal_eval(match.group(2))), True)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return Sent(match.group(1), None, False)


def _plain(value: Any) -> Any:
    """As JSON would have it: no tuples."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _pair(value: Sequence[Any]) -> bool:
    return len(value) == 2 and isinstance(value[0], str) and value[0] in ROLES and not isinstance(value[1], dict)
