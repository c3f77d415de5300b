"""An upstream's stream of server-sent events, as few `Chunk`s as say the same.

Nothing is held back: what has come together goes on together, at once. The one thing to know: under load a server's tokens come in
bursts, and each of them as an event of its own through parser, record and socket would be most of what a stream costs; so pieces of
one text that came together are one chunk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ..codec import decode
from ..errors import EngineError
from .engine import Chunk, Passed, Request


async def events(response: Passed) -> AsyncIterator[list[bytes]]:
    """The data of a stream's events up to `[DONE]`, those that came together in one list."""
    rest = b""
    async for part in response.pieces():
        data = rest + part if rest else part
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        told = [line[5:].strip() for line in data[:end].split(b"\n") if line.startswith(b"data:")]
        done = b"[DONE]" in told
        if done:
            del told[told.index(b"[DONE]") :]
        if told:
            yield told
        if done:
            return
    raise EngineError("the upstream's stream broke off before its end")


def tokens(choice: Mapping[str, Any], request: Request) -> tuple[Sequence[int], Sequence[float], Any]:
    """Ids, log-probs and OpenAI's log-prob entries of a choice; no ids at all where the two don't match."""
    told = choice.get("logprobs") or {}
    if request.prompt is None:
        entries = told.get("content") or []
        logprobs = [entry["logprob"] for entry in entries]
    else:
        entries, logprobs = told or None, told.get("token_logprobs") or []
    ids = choice.get("token_ids") or ()
    if len(ids) != len(logprobs) or None in logprobs:
        return (), (), entries
    return ids, logprobs, entries


def place(choice: Mapping[str, Any]) -> int:
    """A choice's index. Raises `ValueError` for what is none: it would fail in the store, with the calls of others beside it."""
    index = choice["index"]
    if type(index) is not int or not 0 <= index < 1 << 16:
        raise ValueError(f"the index of a choice is {index!r}"[:200])
    return index


def end_of(choice: Mapping[str, Any]) -> Any:
    """Why a choice ended, None where it goes on. Raises `ValueError` for what is no text."""
    reason = choice.get("finish_reason")
    if reason is not None and type(reason) is not str:
        raise ValueError(f"the finish_reason of a choice is {reason!r}"[:200])
    return reason


class Merger:
    """Turns what came together into chunks, and knows what a whole stream has said so far.

    Pieces of one text are one chunk. Anything else (tool calls, an end, another index) begins a chunk of its own.
    """

    def __init__(self, request: Request) -> None:
        self.prompt_ids: tuple[int, ...] | None = None
        self.usage: Mapping[str, Any] | None = None
        """The server's own count."""
        self.error: Any = None
        """What the server said instead of going on."""
        self.tokens = 0
        """Output tokens that came with a log-prob each."""
        self._request = request
        self._wanted = request.top_logprobs is not None
        # A plain completion's log-probs are an object of lists, with offsets: its pieces stay as they are.
        self._chat = request.prompt is None
        self._seen: set[int] = set()

    def chunks(self, together: Sequence[bytes]) -> list[Chunk]:
        """Events as they came. Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for what is no stream of completions."""
        runs: list[_Run] = []
        for data in together:
            # One by one: what is decoded is let go at once, and a burst of events costs no more memory than one.
            event = decode(data)
            if "error" in event:
                self.error = event["error"]
                break
            if "prompt_token_ids" in event and event["prompt_token_ids"] is not None:
                self.prompt_ids = tuple(event["prompt_token_ids"])
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices") or ():
                if not (runs and self._chat and runs[-1].take(choice, self._wanted)):
                    runs.append(self._begin(choice))
        chunks = [run.chunk(self._wanted) for run in runs]
        for chunk in chunks:
            self.tokens += len(chunk.token_ids)
        return chunks

    def _begin(self, choice: Mapping[str, Any]) -> _Run:
        if choice.get("prompt_token_ids") is not None:
            self.prompt_ids = tuple(choice["prompt_token_ids"])
        index = place(choice)
        first = index not in self._seen
        self._seen.add(index)
        told = choice.get("delta") or {} if self._chat else {"content": choice.get("text")}
        delta = {key: value for key, value in told.items() if key != "role" and value is not None}
        if delta.get("content") == "":
            del delta["content"]
        finish = end_of(choice)
        return _Run(index, delta, self.prompt_ids if first else None, finish, *tokens(choice, self._request))


class _Run:
    """A chunk that grows."""

    __slots__ = ("delta", "entries", "finish", "ids", "index", "logprobs", "name", "parts", "prompt_ids")

    def __init__(
        self,
        index: int,
        delta: dict[str, Any],
        prompt_ids: tuple[int, ...] | None,
        finish: Any,
        ids: Sequence[int],
        logprobs: Sequence[float],
        entries: Any,
    ) -> None:
        self.index = index
        self.delta = delta
        self.prompt_ids = prompt_ids
        self.finish = finish
        self.ids = list(ids)
        self.logprobs = list(logprobs)
        self.entries = entries
        # Where there are several fields, or none that is a text, nothing is taken in.
        self.name = next(iter(delta), "content") if len(delta) < 2 else ""
        self.parts = list(delta.values())

    def take(self, choice: Mapping[str, Any], wanted: bool) -> bool:
        """Takes more of the same text in, with its tokens; whether it was that."""
        delta = choice.get("delta")
        if not delta or len(delta) != 1 or choice["index"] != self.index or choice.get("finish_reason") is not None or self.finish:
            return False
        text = delta.get(self.name)
        if type(text) is not str:
            return False
        told = choice.get("logprobs")
        entries: Sequence[Any] = (told["content"] or ()) if told else ()
        ids: Sequence[int] = choice.get("token_ids") or ()
        if len(ids) != len(entries):
            return False
        self.parts.append(text)
        if len(ids) == 1:
            self.ids.append(ids[0])
            self.logprobs.append(entries[0]["logprob"])
        else:
            self.ids += ids
            self.logprobs += [entry["logprob"] for entry in entries]
        if wanted:
            self.entries += entries
        return True

    def chunk(self, wanted: bool) -> Chunk:
        known = None not in self.logprobs
        return Chunk(
            index=self.index,
            delta=self.delta if len(self.parts) == len(self.delta) else {self.name: "".join(self.parts)},
            token_ids=tuple(self.ids) if known else (),
            logprobs=tuple(self.logprobs) if known else (),
            prompt_ids=self.prompt_ids,
            finish_reason=self.finish,
            content_logprobs=self.entries if wanted else None,
        )
