"""How the store and the gateway put records into bytes: JSON for texts, plain arrays for tokens.

Agent output is hostile data: lone surrogates, NUL characters, integers of a thousand digits and objects that JSON does not know all
have to be kept rather than lose the record, so the quick path (`orjson`, where it is installed) falls back to the standard library.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from .record import Action, Call, Episode, EpisodeTrace, Outcome, Transition, from_json, to_json

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

DEFLATE_FROM = 512
DEFLATE_CALL_FROM = 4096
"""Bytes. Of a call's texts, which are written while a client waits, only those are deflated that are long enough to pay at once."""


def encode(value: Any) -> bytes:
    """JSON as UTF-8. What JSON can't hold is written as the text of it."""
    if orjson is not None:
        try:
            return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
        except (TypeError, ValueError):
            # A lone surrogate, an integer over 64 bits, too deep a nesting: the standard library can write these.
            pass
    return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def decode(data: bytes | str) -> Any:
    """What `encode` wrote."""
    if orjson is not None:
        try:
            return orjson.loads(data)
        except ValueError:
            pass
    return json.loads(data)


def dump(value: Any, deflate_from: int = DEFLATE_FROM) -> bytes:
    """JSON bytes, deflated when that may pay. `load` reads both."""
    data = encode(value)
    return b"z" + zlib.compress(data, 1) if len(data) >= deflate_from else data


def load(data: bytes) -> Any:
    return decode(zlib.decompress(memoryview(data)[1:]) if data[:1] == b"z" else data)


def pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def pack_floats(values: Sequence[float]) -> bytes:
    """Four bytes a number where they hold it exactly (engines compute in float32), eight otherwise; the first byte says which."""
    n = len(values)
    try:
        narrow = struct.pack(f"<{n}f", *values)
        if struct.unpack(f"<{n}f", narrow) == tuple(values):
            return b"f" + narrow
    except OverflowError:
        pass
    return b"d" + struct.pack(f"<{n}d", *values)


def unpack_floats(data: bytes) -> tuple[float, ...]:
    kind = data[:1].decode()
    return struct.unpack(f"<{(len(data) - 1) // (4 if kind == 'f' else 8)}{kind}", memoryview(data)[1:])


def _plain(value: Any) -> Any:
    """Stands in for what JSON does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value, key=repr)
    dumped: Callable[[], Any] | None = getattr(value, "model_dump", None)
    if callable(dumped) and not isinstance(value, type):
        return dumped()
    return str(value)


def read_call(row: Sequence[Any]) -> Call:
    id, index, policy, version, agent, episode, finish_reason, started, ended, prompt_ids, completion_ids, logprobs, payload = row
    texts: Mapping[str, Any] = load(payload)
    return Call(
        id=id, policy=policy, version=version, prompt_ids=unpack_ids(prompt_ids), completion_ids=unpack_ids(completion_ids),
        logprobs=unpack_floats(logprobs), finish_reason=finish_reason, index=index, agent=agent, episode=episode, started=started,
        ended=ended, text=texts["text"], sampling=texts["sampling"],
        messages=tuple(texts["messages"]), tool_calls=tuple(texts["tool_calls"]),
        last_version=texts.get("last_version"),
    )  # fmt: skip


def read_episode(row: Sequence[Any]) -> Episode:
    episode = from_json(Episode, load(row[0]))
    return episode if row[1] is None else replace(episode, outcome=from_json(Outcome, load(row[1])))


def write_steps(trace: EpisodeTrace) -> dict[str, Any]:
    """The steps of an episode as JSON data. Each distinct message is held once: a conversation costs its length, not its square."""
    seen: dict[bytes, int] = {}
    messages: list[Any] = []
    actions = []
    for action in trace.actions:
        data = to_json(replace(action, messages=()))
        places = []
        for message in action.messages:
            key = dump(message)
            place = seen.setdefault(key, len(messages))
            if place == len(messages):
                messages.append(message)
            places.append(place)
        if places:
            data["messages"] = places
        actions.append(data)
    return {
        "transitions": [to_json(t) for t in trace.transitions],
        "messages": messages,
        "actions": actions,
        "edges": [list(e) for e in trace.edges],
    }


Steps = tuple[tuple[Transition, ...], tuple[Action, ...], tuple[tuple[int, int], ...]]


def read_steps(data: Mapping[str, Any]) -> Steps:
    messages = data["messages"]
    actions = []
    for action in data["actions"]:
        if "messages" in action:
            action["messages"] = [messages[i] for i in action["messages"]]
        actions.append(from_json(Action, action))
    edges = tuple((a, b) for a, b in data["edges"])
    return tuple(from_json(Transition, t) for t in data["transitions"]), tuple(actions), edges
