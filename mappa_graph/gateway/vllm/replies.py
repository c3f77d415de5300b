"""Where vLLM's replies differ from OpenAI's, they are put right here: errors' codes, and the order of alternatives."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeVar

from ..engine import Chunk, Completion, RequestRefused

R = TypeVar("R", Completion, Chunk)
MOST_ALTERNATIVES = 21
"""What a server of ours gives at most: OpenAI's 20, and the sampled one."""


def in_openais_words(error: RequestRefused) -> RequestRefused:
    """A prompt that is too long, by the code that OpenAI's clients know it by."""
    if error.status == 400 and error.body and b"maximum context length" in error.body:
        try:
            told = str(json.loads(error.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            told = error.body.decode("utf-8", "replace")
        return RequestRefused(told, status=400, code="context_length_exceeded", param="messages", headers=error.headers)
    return error


def asked_of_vllm(alternatives: int | None) -> int | None:
    """How many alternatives to ask for: vLLM counts the sampled token among them, likely or not, so that one more is needed."""
    return alternatives + 1 if alternatives else alternatives


def most_likely(made: R, alternatives: int | None) -> R:
    """With the `alternatives` most likely ones of each token, the likeliest first."""
    if not alternatives or not isinstance(made.content_logprobs, list):
        return made
    entries: list[Any] = []
    for entry in made.content_logprobs:
        ordered = sorted(entry["top_logprobs"], key=lambda other: -float(other["logprob"]))
        entries.append({**entry, "top_logprobs": ordered[:alternatives]})
    return replace(made, content_logprobs=entries)
