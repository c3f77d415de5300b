"""An upstream's whole reply, read for what a call keeps of it and no more.

For each token a server sends its text, its bytes and its alternatives beside its log-prob; made into objects that nobody looks at, they
would be most of what reading a reply costs. The one thing to know: what is not exactly in the expected shape is left to the general
reader, which knows what to make of it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..record import FinishReason
from .engine import Completion


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: tuple[_Entry, ...] | None = None


class _Choice(msgspec.Struct):
    index: int
    message: dict[str, Any]
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    logprobs: _Logprobs


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: tuple[int, ...]
    usage: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Reply)
LARGEST = 1 << 16
"""More completions than a request can ask for."""


def completions(body: bytes) -> list[Completion] | None:
    """The completions of a chat's reply with a log-prob for each token and no entries asked for; None for any other reply."""
    try:
        reply = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not reply.prompt_token_ids:
        return None
    made = []
    for i, choice in enumerate(reply.choices):
        entries, message = choice.logprobs.content or (), choice.message
        if len(entries) != len(choice.token_ids):
            return None
        message.pop("role", None)
        calls = message.pop("tool_calls", None) or ()
        if not 0 <= choice.index < LARGEST or not isinstance(calls, list | tuple):
            return None
        made.append(
            Completion(
                index=choice.index,
                prompt_ids=reply.prompt_token_ids,
                completion_ids=choice.token_ids,
                logprobs=tuple([entry.logprob for entry in entries]),
                text=message.pop("content", None) or "",
                tool_calls=tuple(calls),
                finish_reason=choice.finish_reason,
                extra=message,
                usage=None if i else reply.usage or None,
            )
        )
    return made
