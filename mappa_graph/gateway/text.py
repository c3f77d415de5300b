"""Text around tokens, without torch: chat messages for a template, tokens back to text, stop strings, tool calls in the text.

`TextStream` is the one place where tokens become text while they come: what it has given out is never taken back, so it holds what
could still be the start of a stop string, of a tool call, or of a character whose last bytes are missing.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .engine import RequestRefused

TOOL_CALL = "<tool_call>"
_TOOL_CALLS = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 24


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI messages as chat templates want them: text content, tool arguments as objects.

    Raises `RequestRefused` for content that is not text.
    """
    plain = []
    for place, message in enumerate(messages):
        made = dict(message)
        if made.get("role") == "developer":
            made["role"] = "system"
        content = made.get("content")
        if isinstance(content, list):
            made["content"] = "".join(_part(part, place) for part in content)
        elif content is None:
            made["content"] = ""
        calls = made.get("tool_calls")
        if calls:
            made["tool_calls"] = [_call(call) for call in calls]
        plain.append(made)
    return plain


def _part(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "refusal", None):
        return str(part.get("text", part.get("refusal", "")))
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestRefused(f"messages[{place}].content has a part of type {kind!r}; this engine serves text only", param="messages")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            # What an agent wrote as arguments need not be JSON; the template then shows it as the text it is.
            function["arguments"] = arguments
    return {**call, "function": function}


def split_tool_calls(text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Text before the first `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and the calls in OpenAI's shape.

    A block that is not such JSON leaves the whole text as it is, without calls: what the agent wrote stays to be seen.
    """
    calls = []
    for body in _TOOL_CALLS.findall(text):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return text, ()
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, ()
        arguments = call.get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": call["name"], "arguments": arguments}}
        )
    return (text[: text.index(TOOL_CALL)], tuple(calls)) if calls else (text, ())


class TextStream:
    """Tokens to text, as they come.

    Args:
        decode: ids -> text, special tokens left out.
        stop: strings that end the text; the text is cut before the first of them.
        marker: a string from which on `push` gives nothing out any more (the rest waits for `finish`).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), marker: str | None = None) -> None:
        self._decode = decode
        self._stop = tuple(s for s in stop if s)
        self._marker = marker
        self._guards = (*self._stop, marker) if marker else self._stop
        self._window: list[int] = []
        self._settled = 0
        """Characters of the window's text that are in `text`."""
        self._base = 0
        """Tokens of the window that only give context to the others (a decoder may treat the first token of a text apart)."""
        self.text = ""
        self.given = 0
        """Characters of `text` that were given out."""
        self.stopped = False

    def push(self, id: int) -> str:
        """Takes a token, and returns the text that may be given out now."""
        self._window.append(id)
        seen = self._decode(self._window)
        broken = seen.endswith(_BROKEN)
        # The bytes of a character that is still incomplete show as one replacement character at the very end.
        ready = len(seen) - 1 if broken else len(seen)
        if ready > self._settled:
            self._grow(seen[self._settled : ready])
            self._settled = ready
        if not broken:
            self._window = self._window[self._base :]
            self._base = len(self._window)
            self._settled = len(self._decode(self._window))
        elif len(self._window) > _WINDOW:
            self._cut(seen)
        return self._release()

    def finish(self) -> str:
        """The rest of the text, `marker` or not."""
        if not self.stopped:
            seen = self._decode(self._window)
            self._grow(seen[self._settled :])
        rest = self.text[self.given :]
        self.given = len(self.text)
        return rest

    def _grow(self, piece: str) -> None:
        if self.stopped or not piece:
            return
        start = len(self.text)
        self.text += piece
        hits = [at for s in self._stop if (at := self.text.find(s, max(0, start - len(s) + 1))) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            self.stopped = True

    def _release(self) -> str:
        end = len(self.text)
        if self._marker is not None and (at := self.text.find(self._marker, max(0, self.given - len(self._marker)))) >= 0:
            end = at
        elif not self.stopped:
            end -= held_back(self.text, self._guards)
        piece = self.text[self.given : end]
        self.given = max(self.given, end)
        return piece

    def _cut(self, seen: str) -> None:
        """Shortens a window that went on without a whole character at its end: random bytes would make it grow for ever."""
        for keep in range(4, 8):
            head = self._decode(self._window[:-keep])
            if head + self._decode(self._window[-keep:]) == seen and len(head) <= self._settled:
                self._window = self._window[-keep:]
                self._settled -= len(head)
                self._base = 0
                return


def held_back(text: str, guards: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the start of one of `guards`."""
    longest = 0
    for guard in guards:
        for size in range(min(len(guard) - 1, len(text)), longest, -1):
            if text.endswith(guard[:size]):
                longest = size
                break
    return longest
