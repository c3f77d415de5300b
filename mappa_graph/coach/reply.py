"""Reads a coach model's reply into verdicts, strictly.

A reply is one JSON object of the schema, and nothing else: it may come as the arguments of one tool call, or as text that is the
object alone (a leading `<think>` block and one code fence around it are taken off). Whatever else comes is refused with a sentence
that says what was wrong, which is what the model is told when it is asked again. The one thing to know: nothing is ever repaired,
clamped, defaulted or searched for in prose, because a made-up score is trained on like a true one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .render import clean

_SPACE = re.compile(r"\s+")
_ECHO_REASON = 24
"""Characters from which a reason that stands word for word in the agents' text is taken for a quotation."""

_FIELDS: dict[str, Any] = {
    "reason": {"type": "string", "description": "What the evidence shows, in your own words, before you give the score."},
    "score": {"type": "number", "minimum": 0, "maximum": 10, "description": "0 (worst) to 10 (best)."},
    "blame": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Labels of the actions (such as #2) or names of the agents that a fault is traced to; empty where there is none.",
    },
    "better_action": {"type": ["string", "null"], "description": "What the agent should have written instead, or null."},
}

VERDICT_SCHEMA: dict[str, Any] = {
    "title": "verdict",
    "description": "The verdict on one action.",
    "type": "object",
    "properties": _FIELDS,
    "required": list(_FIELDS),
    "additionalProperties": False,
}

_ENTRY = {"action": {"type": "string", "description": "Label of the action, such as #2."}, **_FIELDS}

VERDICTS_SCHEMA: dict[str, Any] = {
    "title": "verdicts",
    "description": "The verdicts on the actions of an episode.",
    "type": "object",
    "properties": {
        "verdicts": {
            "type": "array",
            "items": {"type": "object", "properties": _ENTRY, "required": list(_ENTRY), "additionalProperties": False},
        }
    },
    "required": ["verdicts"],
    "additionalProperties": False,
}


class MalformedReply(ValueError):
    """A reply isn't a verdict; the message says why, to the model and in the record."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A verdict as it was read, ids resolved."""

    score: float
    reason: str
    blame: tuple[str, ...] = ()
    better_action: str | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """What a verdict may refer to: labels and ids of actions, and agents."""

    labels: Mapping[str, str]
    """Label -> action id."""
    agents: Collection[str] = ()

    def resolve(self, name: str) -> str | None:
        """The action id or agent name meant, or None."""
        name = name.strip()
        if name in self.labels:
            return self.labels[name]
        if name in self.agents or name in self.labels.values():
            return name
        return None


@dataclass(frozen=True, slots=True)
class EpisodeReply:
    """What a reply for a whole episode held: valid verdicts by action id, and what was wrong with the rest."""

    verdicts: Mapping[str, Parsed]
    problems: Sequence[str] = field(default_factory=tuple)


def payload_of(message: Any, title: str) -> Any:
    """The one JSON object that a chat message carries.

    Args:
        message: a LangChain `AIMessage`.
        title: name of the schema's tool; a call of another tool is refused.
    """
    if finish_reason(message) in ("length", "max_tokens", "MAX_TOKENS"):
        raise MalformedReply("the reply was cut off at the length limit; write a shorter reason")
    if getattr(message, "invalid_tool_calls", None):
        raise MalformedReply("the tool call's arguments are not valid JSON")
    calls = getattr(message, "tool_calls", None) or []
    if len(calls) > 1:
        raise MalformedReply(f"the reply held {len(calls)} tool calls; give exactly one verdict")
    if calls:
        if calls[0].get("name") != title:
            raise MalformedReply(f"the reply called a tool named {calls[0].get('name')!r}; the only one is {title!r}")
        return calls[0].get("args")
    return strict_json(text_of(message))


def strict_json(text: str) -> Any:
    """The JSON value a text consists of. Refuses prose around it, a second value, NaN, and a key given twice."""
    said = text.strip()
    if not said.startswith(("{", "[", "```")) and "</think>" in said:
        said = said.split("</think>", 1)[1].strip()
    if said.startswith("```") and said.endswith("```") and "\n" in said:
        opening, _, rest = said.partition("\n")
        said = rest[:-3].strip() if opening.strip().lower() in ("```", "```json") else said
    if not said:
        raise MalformedReply("the reply was empty")
    try:
        return json.loads(said, object_pairs_hook=_no_twice, parse_constant=_no_constant)
    except MalformedReply:
        raise
    except RecursionError as error:
        raise MalformedReply("the reply is nested too deeply") from error
    except ValueError as error:
        raise MalformedReply(f"the reply is not one JSON object and nothing else ({error})") from error


def parse_verdict(payload: Any, names: Names) -> Parsed:
    """A verdict of one action. Raises `MalformedReply`."""
    return _verdict(payload, names, {"reason", "score", "blame", "better_action"})


def parse_verdicts(payload: Any, names: Names, wanted: Collection[str]) -> EpisodeReply:
    """The verdicts of an episode's actions, matched by id, never by position.

    An entry that is malformed, unknown, or given twice counts as missing; the others stand. Raises `MalformedReply` if the whole
    isn't `{"verdicts": [..]}`.
    """
    if not isinstance(payload, dict) or set(payload) != {"verdicts"} or not isinstance(payload["verdicts"], list):
        raise MalformedReply('the reply must be an object with the one key "verdicts", which holds a list')
    good: dict[str, Parsed] = {}
    problems: list[str] = []
    seen: set[str] = set()
    for entry in payload["verdicts"]:
        name = entry.get("action") if isinstance(entry, dict) else None
        action_id = names.resolve(name) if isinstance(name, str) else None
        if not isinstance(entry, dict) or action_id is None or action_id not in wanted:
            problems.append(f"an entry names the action {_shown(name)}, which is not one of those to score")
            continue
        if action_id in seen:
            good.pop(action_id, None)
            problems.append(f"action {_shown(name)} has two verdicts")
            continue
        seen.add(action_id)
        try:
            rest = {k: v for k, v in entry.items() if k != "action"}
            good[action_id] = _verdict(rest, names, {"reason", "score", "blame", "better_action"})
        except MalformedReply as error:
            problems.append(f"action {_shown(name)}: {error}")
    return EpisodeReply(good, tuple(problems))


def refuse_echo(parsed: Parsed, reply: str, texts: Iterable[str]) -> None:
    """Refuses a verdict that merely repeats what an agent wrote: the whole reply, or a long reason, found word for word in its text.

    `texts` come from `squeeze`. A weak model can be brought to copy a verdict that an agent planted; a verdict in the coach's own words
    doesn't stand in the case.
    """
    whole = _squeeze(reply)
    reason = _squeeze(parsed.reason)
    for text in texts:
        if (len(whole) > 12 and whole in text) or (len(reason) >= _ECHO_REASON and reason in text):
            raise MalformedReply("the verdict is copied from the agents' text; judge the evidence yourself, in your own words")


def squeeze(texts: Iterable[str]) -> list[str]:
    """Texts as `refuse_echo` compares them: runs of white space as one blank, empty ones and doubles left out."""
    return list({_squeeze(text): None for text in texts if text.strip()})


def text_of(message: Any) -> str:
    """The text of a chat message, blocks joined."""
    content = getattr(message, "content", message)
    if isinstance(content, str):
        return content
    parts = [b if isinstance(b, str) else b.get("text", "") for b in content or () if isinstance(b, str | Mapping)]
    return "".join(p for p in parts if isinstance(p, str))


def finish_reason(message: Any) -> str | None:
    """Why generation ended, under whichever name the provider gives it."""
    meta = getattr(message, "response_metadata", None) or {}
    reason = meta.get("finish_reason") or meta.get("stop_reason")
    return str(reason) if reason is not None else None


def _verdict(payload: Any, names: Names, allowed: set[str]) -> Parsed:
    if not isinstance(payload, dict):
        raise MalformedReply(f"a verdict must be one JSON object, not {_kind(payload)}")
    unknown = sorted(set(payload) - allowed)
    if unknown:
        raise MalformedReply(f"unknown keys {', '.join(map(_shown, unknown[:5]))}; the keys are reason, score, blame, better_action")
    for key in ("score", "reason"):
        if key not in payload:
            raise MalformedReply(f"the key {key!r} is missing")
    score = payload["score"]
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise MalformedReply(f"score must be a number, not {_kind(score)}")
    if not 0 <= score <= 10 or not math.isfinite(score):
        raise MalformedReply(f"score {_shown(score)} is outside 0..10")
    reason = payload["reason"]
    if not isinstance(reason, str) or not reason.strip():
        raise MalformedReply("reason must be a text that isn't empty")
    better = payload.get("better_action")
    if better is not None and not isinstance(better, str):
        raise MalformedReply(f"better_action must be a text or null, not {_kind(better)}")
    return Parsed(float(score), reason.strip(), _blame(payload.get("blame"), names), better.strip() or None if better else None)


def _blame(value: Any, names: Names) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise MalformedReply(f"blame must be a list of action labels or agent names, not {_kind(value)}")
    found: list[str] = []
    for name in value:
        meant = names.resolve(name) if isinstance(name, str) else None
        if meant is None:
            known = ", ".join([*list(names.labels)[:12], *list(names.agents)[:12]])
            raise MalformedReply(f"blame names {_shown(name)}, which is neither an action nor an agent; they are: {known}")
        if meant not in found:
            found.append(meant)
    return tuple(found)


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise MalformedReply(f"the key {_shown(key)} is given twice")
        out[key] = value
    return out


def _no_constant(name: str) -> Any:
    raise MalformedReply(f"{name} is not a number that can be used")


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    text = clean(repr(value)).replace("\n", " ")
    return text if len(text) <= 60 else text[:59] + "…"


def _squeeze(text: str) -> str:
    return _SPACE.sub(" ", text).strip()
