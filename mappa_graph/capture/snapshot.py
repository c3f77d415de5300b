"""Copies of what the events carry, taken at event time.

Handlers are given the app's live objects, and tools and reducers may change those right afterwards, so whatever is kept is copied
here and now. A message object that was copied before, and whose content is still the same object, is not copied again: a
conversation costs its new messages per event, not its history. Everything in this module runs in the app's own threads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from enum import Enum
from operator import is_
from pathlib import PurePath
from typing import Any
from uuid import UUID

from langchain_core.messages import BaseMessage
from langgraph.types import Command, Send
from pydantic import BaseModel

from ..record import Execution

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_PLAIN = frozenset((str, int, float, bool, type(None)))
_AS_TEXT = (UUID, date, time, Decimal, PurePath)
_CALL_BLOCKS = ("tool_call", "tool_call_chunk", "tool_use", "function_call", "invalid_tool_call")
_MAX_ITEMS = 512
_LONG = 16
_MAX_LONG = 64
_MAX_DEPTH = 8


class Message:
    """A message as it was when an event carried it."""

    __slots__ = (
        "_dict", "_ref", "artifact", "content", "id", "invalid_calls", "live", "live_content", "name", "reasoning", "role", "status",
        "tool_call_id", "tool_calls",
    )  # fmt: skip

    def __init__(self, live: BaseMessage) -> None:
        fields = live.__dict__
        content = fields["content"]
        self.live = live
        self.live_content = content
        self.content = content if content.__class__ is str else copied(content)
        kind = fields.get("type", "")
        self.role = fields.get("role") if kind == "chat" else _ROLES.get(kind, kind)
        self.id: str | None = fields.get("id")
        self.name: str | None = fields.get("name")
        calls = fields.get("tool_calls")
        self.tool_calls: list[dict[str, Any]] = [{**c, "args": copied(c.get("args"))} for c in calls] if calls else []
        invalid = fields.get("invalid_tool_calls")
        self.invalid_calls: list[dict[str, Any]] = [dict(c) for c in invalid] if invalid else []
        self.tool_call_id: str | None = fields.get("tool_call_id")
        self.status: str | None = fields.get("status")
        artifact = fields.get("artifact")
        self.artifact = artifact if artifact is None or isinstance(artifact, Execution) else copied(artifact)
        self.reasoning: str = fields["additional_kwargs"].get("reasoning_content") or "" if self.role == "assistant" else ""
        self._dict: dict[str, Any] | None = None
        self._ref: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The content's text, blocks joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(b if isinstance(b, str) else b.get("text") or "" for b in self.content if isinstance(b, str | dict))

    def openai(self) -> dict[str, Any]:
        """As an OpenAI-style dict, one and the same object each time."""
        if self._dict is None:
            content = self.content
            if isinstance(content, list):
                # Calls are told apart below; blocks of text alone are a text.
                content = [b for b in content if not (isinstance(b, dict) and b.get("type") in _CALL_BLOCKS)]
                if all(isinstance(b, str) or (isinstance(b, dict) and b.get("type") == "text") for b in content):
                    content = self.text
            data: dict[str, Any] = {"role": self.role, "content": content}
            if self.name:
                data["name"] = self.name
            if self.tool_calls or self.invalid_calls:
                data["tool_calls"] = openai_calls(self)
            if self.tool_call_id:
                data["tool_call_id"] = self.tool_call_id
            self._dict = data
        return self._dict

    def reference(self) -> dict[str, Any]:
        """Stands for the message where the record holds it already."""
        if self._ref is None:
            self._ref = {"role": self.role, "id": self.id} if self.id else self.openai()
        return self._ref


def openai_calls(message: Message) -> list[dict[str, Any]]:
    """A message's tool calls as OpenAI writes them; those whose arguments did not parse keep their raw text."""
    calls = [(c.get("id"), c.get("name"), dumps(c.get("args"))) for c in message.tool_calls]
    calls += [(c.get("id"), c.get("name"), c.get("args") or "") for c in message.invalid_calls]
    return [{"id": id, "type": "function", "function": {"name": name, "arguments": args}} for id, name, args in calls]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclasses.dataclass(slots=True)
class SendSnap:
    """A `Send`; `arg` is held so that the node that is started with that very object can be told."""

    node: str
    arg: Any


@dataclasses.dataclass(slots=True)
class CommandSnap:
    update: Any
    goto: list[Any]
    resume: bool


class Interner:
    """The messages of one root run, each copied once."""

    __slots__ = ("_by_key", "_by_object", "_long")

    def __init__(self) -> None:
        self._by_object: dict[int, Message] = {}
        self._by_key: dict[tuple[Any, ...], Message] = {}
        self._long: dict[int, tuple[list[BaseMessage], list[Any], list[Message]]] = {}
        """By the first message: a conversation as it was last seen, its contents, its copies."""

    def messages(self, live: Sequence[BaseMessage]) -> list[Message]:
        if len(live) < _LONG:
            return self._copies(live)
        # A conversation that has grown since: that nothing has changed in what was seen before is checked at the speed of C.
        contents = [m.__dict__["content"] for m in live]
        known = self._long.get(id(live[0]))
        if known is not None and len(known[0]) <= len(live) and all(map(is_, known[0], live)) and all(map(is_, known[1], contents)):
            out = known[2] + self._copies(live[len(known[0]) :])
        else:
            out = self._copies(live)
        if known is not None or len(self._long) < _MAX_LONG:
            self._long[id(live[0])] = (list(live), contents, out)
        return out

    def _copies(self, live: Iterable[BaseMessage]) -> list[Message]:
        seen = self._by_object
        out = []
        for message in live:
            # The copy holds the message, so an id is not used twice.
            known = seen.get(id(message))
            if known is None or known.live_content is not message.__dict__["content"]:
                known = self._new(message)
            out.append(known)
        return out

    def message(self, live: BaseMessage) -> Message:
        return self._copies((live,))[0]

    def _new(self, live: BaseMessage) -> Message:
        fields = live.__dict__
        content = fields["content"]
        kind, name = fields.get("type"), fields.get("id")
        if content.__class__ is str and (name is not None or kind in ("human", "system")):
            # An equal message made anew (from a checkpoint, from a dict) is the one that is known already. Without an id, two equal
            # answers are two.
            key = (kind, name, fields.get("tool_call_id"), content)
            made = self._by_key.get(key)
            if made is not None and made.live.__dict__.get("tool_calls") == fields.get("tool_calls"):
                return made
            made = self._by_key[key] = Message(live)
        else:
            made = Message(live)
        self._by_object[id(live)] = made
        return made


class _Budget:
    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _MAX_ITEMS


def frozen(value: Any, interner: Interner, _budget: _Budget | None = None, _depth: int = 0) -> Any:
    """A copy of a node's input or output: plain containers, `Message`, `SendSnap`, `CommandSnap`, `Execution`; the rest by type name."""
    cls = value.__class__
    if cls in _PLAIN:
        return value
    budget = _budget or _Budget()
    if cls is dict or isinstance(value, Mapping):
        if _depth >= _MAX_DEPTH:
            return "…"
        out: dict[str, Any] = {}
        for key, item in list(value.items()):
            budget.left -= 1
            if budget.left < 0:
                out["…"] = f"{len(value) - len(out)} more"
                break
            out[str(key)] = frozen(item, interner, budget, _depth + 1)
        return out
    if cls is list or cls is tuple or cls is set:
        if _depth >= _MAX_DEPTH:
            return "…"
        return _frozen_items(list(value), interner, budget, _depth)
    if isinstance(value, BaseMessage):
        return interner.message(value)
    if cls is Send:
        return SendSnap(value.node, value.arg)
    if isinstance(value, Command):
        goto = value.goto if isinstance(value.goto, list | tuple) else [value.goto]
        return CommandSnap(
            frozen(value.update, interner, budget, _depth + 1),
            [SendSnap(g.node, g.arg) if isinstance(g, Send) else str(g) for g in goto],
            value.resume is not None,
        )
    if isinstance(value, Execution):
        return value
    if isinstance(value, BaseModel):
        return frozen(dict(value.__dict__), interner, budget, _depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return frozen(fields, interner, budget, _depth)
    if isinstance(value, Enum):
        return frozen(value.value, interner, budget, _depth + 1)
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, str):
        return str(value)
    return f"<{cls.__module__}.{cls.__qualname__}>"


def _frozen_items(items: list[Any], interner: Interner, budget: _Budget, depth: int) -> list[Any]:
    if len(items) >= _LONG and all(isinstance(i, BaseMessage) for i in items):
        return list(interner.messages(items))
    out: list[Any] = []
    for item in items:
        if isinstance(item, BaseMessage):
            out.append(interner.message(item))
            continue
        budget.left -= 1
        if budget.left < 0:
            out.append(f"… {len(items) - len(out)} more")
            break
        out.append(frozen(item, interner, budget, depth + 1))
    return out


def copied(value: Any, _depth: int = 0) -> Any:
    """A copy of plain JSON-like data; anything else in it is kept as it is."""
    cls = value.__class__
    if cls in _PLAIN or _depth >= _MAX_DEPTH:
        return value
    if cls is dict:
        return {k: copied(v, _depth + 1) for k, v in list(value.items())}
    if cls is list or cls is tuple:
        return [copied(v, _depth + 1) for v in list(value)]
    return value


def found(value: Any) -> list[Message]:
    """All messages inside a frozen value, in order."""
    out: list[Message] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Message):
            out.append(item)
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
        elif isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, CommandSnap):
            stack.append(item.update)
    return out
