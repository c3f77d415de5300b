"""From an episode to rows: what the one pass over the store makes of each action, or why it makes nothing of it.

A row is redacted before it leaves here. Actions that may have siblings wait in the work file, until all of their state are known.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..codec import decode, encode
from ..record import Action, EpisodeTrace
from . import formats
from .filters import Filters
from .formats import PAIRED, Format, Render
from .options import HELDOUT, TRAIN, Options
from .pairs import Source, labels, pair, state_of, task_of
from .redact import Redactor
from .rows import Row

Samples = Callable[[EpisodeTrace], tuple[Sequence[Any], Mapping[str, int]]]
"""`trainers.batch.samples_from_trace` with its options bound: what an on-policy trainer makes of an episode."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A scored completion whose siblings are not known yet; see `Rows.add_sibling`."""

    state: bytes
    head: dict[str, Any]
    side: str
    digest: bytes
    score: float
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """One side of a pair."""

    score: float | None
    messages: list[dict[str, Any]]
    action: str | None


class Maker:
    """Makes rows of one format; counts in `text_only` what had no tokens, by agent, and in `rich` whether a message was more than text."""

    def __init__(
        self, format: Format, filters: Filters, options: Options, redactor: Redactor, samples: Samples | None, render: Render | None
    ) -> None:
        self.format, self.filters, self.options, self.redactor = format, filters, options, redactor
        self.samples, self.render = samples, render
        self.dedupe = format != "rl" if options.dedupe is None else options.dedupe
        self.text_only: Counter[str] = Counter()
        self.rich = False

    def __call__(self, trace: EpisodeTrace) -> Iterator[Row | Waiting | str]:
        """Rows of an episode, in the order of its actions; a text says why there is none of an action."""
        return self._rl(trace) if self.format == "rl" else self._texts(trace)

    def _side(self, trace: EpisodeTrace) -> str:
        if not self.options.heldout:
            return TRAIN
        digest = hashlib.sha256(f"{self.options.salt}\0{task_of(trace)}".encode("utf-8", "surrogatepass")).digest()
        return HELDOUT if int.from_bytes(digest[:8], "big") < self.options.heldout * 2.0**64 else TRAIN

    def _texts(self, trace: EpisodeTrace) -> Iterator[Row | Waiting | str]:
        paired = self.format in PAIRED
        for action in sorted(trace.actions, key=lambda a: a.order):
            verdict = trace.verdicts.get(action.id)
            needs_score = paired and not (verdict is not None and verdict.better_action and "coach" in self.options.pairs.sources)
            reason = self.filters.action(action, verdict, scored=needs_score)
            if reason is not None:
                yield reason
                continue
            prompt = formats.conversation(action.messages)
            completion = formats.answer(action, self.options.thinking)
            if prompt is None or not prompt or completion is None:
                yield (
                    "no prompt" if prompt == [] else "more than text" if prompt is None else "call failed" if action.error else "no output"
                )
                continue
            reason = self.filters.length(formats.length(prompt), formats.length(completion))
            if reason is not None:
                yield reason
                continue
            if not _has_tokens(trace, action):
                self.text_only[self._name(action.agent)] += 1
            tools = formats.offered(trace, action)
            if paired:
                yield from self._preferences(trace, action, prompt, completion, tools)
            else:
                yield self._row(trace, action, prompt, completion, tools)

    def _row(self, trace: EpisodeTrace, action: Action, prompt: Any, completion: Any, tools: Any) -> Row:
        clean = self._clean({"prompt": prompt, "completion": completion, "tools": tools, **formats.about(trace, action)})
        prompt, completion, tools = clean.pop("prompt"), clean.pop("completion"), clean.pop("tools")
        digest = _digest(prompt, completion) if self.dedupe else None
        if self.render is not None:
            head, tail = self.render(prompt, completion, tools)
            texts: dict[str, Any] = {"text": head + tail} if self.format == "messages" else {"prompt": head, "completion": tail}
        else:
            texts = {"messages": [*prompt, *completion]} if self.format == "messages" else {"prompt": prompt, "completion": completion}
            texts["tools"] = formats.as_json(tools)
        return self._placed({**texts, **clean}, self._side(trace), digest)

    def _placed(self, data: dict[str, Any], side: str, digest: bytes | None, **more: Any) -> Row:
        if self.render is None and self.format != "rl" and not self.rich:
            messages = (m for name in ("messages", "prompt", "completion", "chosen", "rejected") for m in data.get(name, ()))
            self.rich = any(len(message) > 2 for message in messages)
        balance = "" if self.options.balance is None else str(data.get(self.options.balance) or "")
        return Row(data, side, digest, balance, **more)

    def _clean(self, record: dict[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", self.redactor(record))

    def _name(self, name: str) -> str:
        """A name from data as counts and cards may hold it."""
        return str(formats.holdable(self.redactor.text(name)))

    # -- preferences

    def _preferences(self, trace: EpisodeTrace, action: Action, prompt: Any, completion: Any, tools: Any) -> Iterator[Row | Waiting | str]:
        pairs, verdict = self.options.pairs, trace.verdicts[action.id]
        about = formats.about(trace, action)
        state = state_of(trace, action, prompt, tools)
        better = [{"role": "assistant", "content": verdict.better_action}] if verdict.better_action else None
        clean = self._clean({"prompt": prompt, "completion": completion, "chosen": better, "tools": tools, **about})
        head = {name: clean[name] for name in ("prompt", "tools", "agent", "task_id", "stratum")}
        side = self._side(trace)
        own = End(verdict.score, clean["completion"], clean["action"])
        if "coach" in pairs.sources and better is not None and clean["chosen"] != clean["completion"]:
            yield from self.pair(head, side, "coach", End(None, clean["chosen"], None), own)
        if verdict.score is None:
            return
        if "scores" in pairs.sources and self.format == "kto":
            label = labels(verdict.score, pairs)
            yield "between good and bad" if label is None else self._labelled(head, side, "scores", own, label)
        if "siblings" in pairs.sources:
            data = {"messages": own.messages, "action": own.action}
            yield Waiting(state, head, side, _digest(own.messages), verdict.score, data)

    def pair(self, head: dict[str, Any], side: str, source: Source, better: End, worse: End) -> Iterator[Row]:
        """The rows of a pair: one, or for KTO one of each end."""
        if self.format == "kto":
            yield self._labelled(head, side, source, better, True)
            yield self._labelled(head, side, source, worse, False)
            return
        prompt, tools = head["prompt"], head["tools"]
        digest = _digest(prompt, better.messages, worse.messages) if self.dedupe else None
        columns = pair(head, source, (better.score, better.action), (worse.score, worse.action))
        if self.render is None:
            texts: dict[str, Any] = {"prompt": prompt, "chosen": better.messages, "rejected": worse.messages}
            texts["tools"] = formats.as_json(tools)
        else:
            sides = [self.render(prompt, end.messages, tools) for end in (better, worse)]
            shared = min((text for text, _ in sides), key=len)
            texts = {"prompt": shared, "chosen": "".join(sides[0])[len(shared) :], "rejected": "".join(sides[1])[len(shared) :]}
        yield self._placed({**texts, **columns}, side, digest)

    def _labelled(self, head: dict[str, Any], side: str, source: Source, end: End, label: bool) -> Row:
        prompt, tools = head["prompt"], head["tools"]
        if self.render is None:
            texts: dict[str, Any] = {"prompt": prompt, "completion": end.messages, "label": label, "tools": formats.as_json(tools)}
        else:
            before, said = self.render(prompt, end.messages, tools)
            texts = {"prompt": before, "completion": said, "label": label}
        columns = {name: head[name] for name in ("agent", "task_id", "stratum")}
        columns |= {"source": source, "score": end.score, "action": end.action}
        # The same text must not be both good and bad, so it is kept once even where duplicates are wanted.
        return self._placed({**texts, **columns}, side, _digest(prompt, end.messages), label=label)

    # -- tokens

    def _rl(self, trace: EpisodeTrace) -> Iterator[Row | Waiting | str]:
        assert self.samples is not None
        made, _ = self.samples(trace)
        by_action = {sample.action_id: sample for sample in made}
        for action in sorted(trace.actions, key=lambda a: a.order):
            verdict = trace.verdicts.get(action.id)
            reason = self.filters.action(action, verdict, scored=True)
            sample = by_action.get(action.id)
            if reason is None and not _has_tokens(trace, action):
                self.text_only[self._name(action.agent)] += 1
                reason = "no tokens: text only"
            elif reason is None and sample is None:
                reason = "untrainable" if not action.trainable else "discarded" if not action.kept else "call failed"
            if reason is None and sample is not None:
                reason = self.filters.length(len(sample.prompt_ids), len(sample.completion_ids))
            if reason is not None or sample is None:
                yield reason or "untrainable"
                continue
            call = trace.calls[action.id]
            seen = {"messages": [*action.messages, *call.messages], "completion": [action.output, call.text, action.tool_calls]}
            plain = decode(encode(seen))
            if self.redactor(plain) != plain:
                # Token ids spell out the text, so what may not be read may not be trained on either.
                yield "redacted: its tokens spell it out"
                continue
            data = {
                "prompt_ids": list(sample.prompt_ids), "completion_ids": list(sample.completion_ids),
                "logprobs": list(sample.engine_logprobs), "return": sample.ret, "temperature": sample.temperature,
                "truncated": sample.truncated, **self._clean(formats.about(trace, action)),
            }  # fmt: skip
            digest = _digest(data["prompt_ids"], data["completion_ids"]) if self.dedupe else None
            group = self._name({"batch": "", "agent": sample.agent, "stratum": sample.stratum}[self.options.normalise])
            yield self._placed(data, self._side(trace), digest, tokens=len(sample.completion_ids), value=sample.ret, grp=group)


def _has_tokens(trace: EpisodeTrace, action: Action) -> bool:
    call = trace.calls.get(action.id)
    return call is not None and bool(call.prompt_ids) and bool(call.completion_ids)


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(encode(parts), digest_size=16).digest()
