"""OpenAI's formats of chat and plain completions: request bodies into `Request`s, completions and chunks into reply bodies, errors.

Nothing here does I/O. A reply holds what the client asked for and no more: token ids and log-probs are taken from the engine for
every call, kept with the call, and left out of the reply unless the request named them. What marks a reply for the join with a trace: its
`id` is the call's, a stream's first delta carries the same id, and `model` names the version that answered.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from ..codec import decode, encode
from ..record import Call, FinishReason
from .engine import Chunk, Completion, Request, RequestRefused

Kind = Literal["chat", "text"]
_MAX_N = 128
# What the gateway reads itself; everything else of a body goes on to the engine in `Request.extra`.
_OWN = frozenset(
    {
        "model", "messages", "tools", "n", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed",
        "logprobs", "top_logprobs", "stream", "stream_options", "return_token_ids",
    }
)  # fmt: skip
_OWN_OF_TEXT = _OWN | {"prompt"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client wants back."""

    model: str
    stream: bool
    usage: bool
    """A usage chunk at a stream's end."""
    logprobs: bool
    token_ids: bool
    kind: Kind = "chat"


def parse(raw: bytes, kind: Kind = "chat") -> tuple[dict[str, Any], Asked]:
    """A request body, checked for shape. Raises `RequestRefused` (400)."""
    try:
        body = decode(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused(f"the request body is a JSON {type(body).__name__}, not an object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RequestRefused(f"model is {model!r}; it names a policy", param="model")
    if kind == "text" and not (isinstance(prompt := body.get("prompt"), str | list) and prompt):
        raise RequestRefused("prompt must be a text, a list of token ids, or a list of either", param="prompt")
    if kind == "chat" and not _are_messages(body.get("messages")):
        raise RequestRefused("messages must be a list of at least one {role, content} object", param="messages")
    options = body.get("stream_options") or {}
    stream = bool(body.get("stream"))
    usage = stream and isinstance(options, dict) and bool(options.get("include_usage"))
    logprobs = bool(body.get("logprobs")) or (kind == "text" and body.get("logprobs") == 0)
    return body, Asked(model, stream, usage, logprobs, bool(body.get("return_token_ids")), kind)


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    for message in value:  # noqa: SIM110  a generator costs more than the check
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
    return True


def request(body: Mapping[str, Any], policy: str, version: int, kind: Kind = "chat") -> Request:
    """The engine's request. Raises `RequestRefused` (400) for a value out of range."""
    stop = body.get("stop") or ()
    if stop:
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(s, str) for s in stop):
            raise RequestRefused(f"stop is {body.get('stop')!r}; give a string, or at most 16 of them", param="stop")
    tools = body.get("tools") or ()
    if tools and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise RequestRefused("tools must be a list of objects", param="tools")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    # A chat says in two fields what a plain completion says in one: that it wants log-probs, and of how many alternatives.
    top = "logprobs" if kind == "text" else "top_logprobs"
    wants_logprobs = body.get(top) is not None if kind == "text" else bool(body.get("logprobs"))
    own = _OWN if kind == "chat" else _OWN_OF_TEXT
    max_tokens, seed = _number(body, limit, None, 1, math.inf, whole=True), _number(body, "seed", None, -math.inf, math.inf, whole=True)
    return Request(
        policy=policy,
        version=version,
        messages=body["messages"] if kind == "chat" else (),
        prompt=body["prompt"] if kind == "text" else None,
        tools=tools,
        n=int(_number(body, "n", 1, 1, _MAX_N, whole=True)),
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", 1.0, 1e-9, 1.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, math.inf, whole=True))),
        max_tokens=None if max_tokens is None else int(max_tokens),
        stop=tuple(stop),
        seed=None if seed is None else int(seed),
        top_logprobs=int(_number(body, top, 0, 0, 20, whole=True)) if wants_logprobs else None,
        extra={key: value for key, value in body.items() if key not in own},
    )


@overload
def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float, *, whole: bool = False) -> float: ...
@overload
def _number(body: Mapping[str, Any], name: str, default: None, low: float, high: float, *, whole: bool = False) -> float | None: ...
def _number(body: Mapping[str, Any], name: str, default: float | None, low: float, high: float, *, whole: bool = False) -> float | None:
    value = body.get(name)
    if value is None:
        return default
    kind = "a whole number" if whole else "a number"
    fits = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and (not whole or value.is_integer()))
    if isinstance(value, bool) or not fits or not low <= value <= high:
        span = f" in {low:g}..{high:g}" if math.isfinite(low) and math.isfinite(high) else f" from {low:g} up" if math.isfinite(low) else ""
        raise RequestRefused(f"{name} is {value!r}; it must be {kind}{span}", param=name)
    return value if isinstance(value, int) else float(value)


def _new_id() -> str:
    """Begins with the time: ids that come one after another lie side by side in the store's index, which halves what a write costs."""
    return f"chatcmpl-{time.time_ns():016x}{os.urandom(8).hex()}"


@dataclass(slots=True)
class Exchange:
    """One request on its way: turns what the engine gives into calls to keep and bytes to send."""

    asked: Asked
    request: Request
    agent: str | None = None
    episode: str | None = None
    id: str = field(default_factory=_new_id)
    started: float = field(default_factory=time.time)

    @property
    def served(self) -> str:
        return f"{self.request.policy}@v{self.request.version}"

    def calls(self, completions: Sequence[Completion]) -> list[Call]:
        ended = time.time()
        sampling = self._sampling()
        return [
            Call(
                id=self.id,
                index=c.index,
                policy=self.request.policy,
                version=self.request.version,
                prompt_ids=c.prompt_ids,
                completion_ids=c.completion_ids,
                logprobs=c.logprobs,
                finish_reason=c.finish_reason,
                text=c.text,
                sampling=sampling,
                messages=self.request.messages if self.request.prompt is None else _as_messages(self.request.prompt),
                tool_calls=c.tool_calls,
                agent=self.agent,
                episode=self.episode,
                started=self.started,
                ended=ended,
            )
            for c in completions
        ]

    def _sampling(self) -> dict[str, Any]:
        r = self.request
        values = {
            "temperature": r.temperature, "top_p": r.top_p, "top_k": r.top_k or None, "max_tokens": r.max_tokens, "n": r.n,
            "seed": r.seed, "stop": list(r.stop) or None, "tools": list(r.tools) or None,
            "endpoint": None if r.prompt is None else "/completions", **r.extra,
        }  # fmt: skip
        return {name: value for name, value in values.items() if value is not None}

    def reply(self, completions: Sequence[Completion]) -> bytes:
        """The body of a whole reply."""
        if self.asked.kind == "text":
            return self._text_reply(completions)
        choices = []
        for c in completions:
            message: dict[str, Any] = {"role": "assistant", "content": c.text if c.text or not c.tool_calls else None, **c.extra}
            if c.tool_calls:
                message["tool_calls"] = c.tool_calls
            choice: dict[str, Any] = {"index": c.index, "message": message, "logprobs": None, "finish_reason": c.finish_reason}
            if self.asked.logprobs:
                choice["logprobs"] = {"content": c.content_logprobs or []}
            if self.asked.token_ids:
                choice["token_ids"] = c.completion_ids
            choices.append(choice)
        made = {**self._head("chat.completion"), "choices": choices, "usage": usage(completions)}
        if self.asked.token_ids and completions:
            made["prompt_token_ids"] = completions[0].prompt_ids
        return encode(made)

    def _text_reply(self, completions: Sequence[Completion]) -> bytes:
        choices = []
        for c in completions:
            choice = {**c.extra, "index": c.index, "text": c.text, "logprobs": c.content_logprobs, "finish_reason": c.finish_reason}
            if self.asked.token_ids:
                choice |= {"token_ids": c.completion_ids, "prompt_token_ids": c.prompt_ids}
            choices.append(choice)
        return encode({**self._head("text_completion"), "choices": choices, "usage": usage(completions)})

    def _text_event(self, chunk: Chunk) -> bytes:
        choice = {
            "index": chunk.index,
            "text": chunk.delta.get("content", ""),
            "logprobs": chunk.content_logprobs,
            "finish_reason": chunk.finish_reason,
        }
        if self.asked.token_ids:
            choice["token_ids"] = chunk.token_ids
            if chunk.prompt_ids is not None:
                choice["prompt_token_ids"] = chunk.prompt_ids
        return sse({**self._head("text_completion"), "choices": [choice], **({"usage": None} if self.asked.usage else {})})

    def event(self, chunk: Chunk, *, first: bool) -> bytes:
        """One server-sent event; the first of each index marks the stream with role and id."""
        if self.asked.kind == "text":
            return self._text_event(chunk)
        delta: dict[str, Any] = dict(chunk.delta)
        if first:
            delta = {"role": "assistant", "id": self.id, "content": "", **delta}
        choice: dict[str, Any] = {"index": chunk.index, "delta": delta, "logprobs": None, "finish_reason": chunk.finish_reason}
        if self.asked.logprobs and chunk.content_logprobs is not None:
            choice["logprobs"] = {"content": chunk.content_logprobs}
        if self.asked.token_ids:
            choice["token_ids"] = chunk.token_ids
        made = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.asked.token_ids and chunk.prompt_ids is not None:
            made["prompt_token_ids"] = chunk.prompt_ids
        if self.asked.usage:
            made["usage"] = None
        return sse(made)

    def usage_event(self, completions: Sequence[Completion], counted: Mapping[str, Any] | None) -> bytes:
        kind = "text_completion" if self.asked.kind == "text" else "chat.completion.chunk"
        return sse({**self._head(kind), "choices": [], "usage": counted or usage(completions)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(self.started), "model": self.served}


def _as_messages(prompt: Any) -> tuple[dict[str, Any], ...]:
    """A plain completion's prompt where a chat has its messages; a prompt given as ids is in the call's ids alone."""
    texts = [prompt] if isinstance(prompt, str) else [text for text in prompt if isinstance(text, str)]
    return tuple({"role": "user", "content": text} for text in texts)


class Collected:
    """One index of a stream put together again, for the record."""

    __slots__ = ("finish_reason", "ids", "index", "logprobs", "prompt_ids", "text", "tool_calls")

    def __init__(self, index: int) -> None:
        self.index = index
        self.prompt_ids: tuple[int, ...] = ()
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.text: list[str] = []
        self.tool_calls: dict[int, dict[str, Any]] = {}
        self.finish_reason: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        if chunk.prompt_ids is not None:
            self.prompt_ids = chunk.prompt_ids
        self.ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        content = chunk.delta.get("content")
        if content:
            self.text.append(content)
        for piece in chunk.delta.get("tool_calls") or ():
            self._add_tool_call(piece)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        if not chunk.whole:
            self.ids.clear()
            self.logprobs.clear()

    def _add_tool_call(self, piece: Mapping[str, Any]) -> None:
        call = self.tool_calls.setdefault(
            piece.get("index", 0), {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def completion(self, unfinished: FinishReason) -> Completion:
        return Completion(
            index=self.index,
            prompt_ids=self.prompt_ids,
            completion_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            text="".join(self.text),
            finish_reason=self.finish_reason or unfinished,
            tool_calls=tuple(self.tool_calls[i] for i in sorted(self.tool_calls)),
        )


def usage(completions: Sequence[Completion]) -> Mapping[str, Any]:
    if completions and completions[0].usage is not None:
        return completions[0].usage
    prompt = len(completions[0].prompt_ids) if completions else 0
    completion = sum(len(c.completion_ids) for c in completions)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def sse(data: Any) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def error_body(message: str, *, type: str, code: str | None = None, param: str | None = None) -> bytes:
    return encode({"error": {"message": message, "type": type, "param": param, "code": code}})
