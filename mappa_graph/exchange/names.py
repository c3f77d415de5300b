"""What a trace is known by in a run's folder: names and ids from data, made safe to be written down and compared.

An id joins records, so two that differ must stay so: one that holds a secret becomes the redacted text with a hash after it. What is only
ever compared (a thread, the state of a trace) is kept as a hash. The one thing to know: whatever asks the ledger must go through
the same object as what wrote to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..codec import encode
from ..record import EpisodeTrace
from .ledger import Rated
from .spans import Notes, name_of, safe_name


class Names:
    """Ids, threads and feedback as the ledger may hold them; `redact` is the importer's hook, or None."""

    def __init__(self, redact: Callable[[Any], Any] | None) -> None:
        self._redact = redact

    def id(self, id: Any) -> str:
        """An id of a trace or session."""
        name = name_of(id)
        clean = self._cleaned({"id": name})["id"]
        return name if clean == name else f"{clean}-{_hash(name)[:12]}"

    def spans(self, spans: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The spans of a trace with ids that hold no secret; nearly always they are as they were."""
        if self._redact is None:
            return spans
        new = {id: clean for s in spans if (id := s.get("id")) and isinstance(id, str) and (clean := self.id(id)) != name_of(id)}
        if not new:
            return spans
        return [{**s, **{k: new[s[k]] for k in ("id", "parent_id") if isinstance(s.get(k), str) and s[k] in new}} for s in spans]

    def thread(self, thread: Any) -> str | None:
        return None if not thread else _hash(name_of(thread))

    def rated(self, found: Sequence[Rated]) -> list[Rated]:
        """Feedback without secrets. An action's id is redacted as the store does it, so that the two still meet."""
        if self._redact is None:
            return list(found)
        return [self._one(one) for one in found]

    def _one(self, one: Rated) -> Rated:
        texts = self._cleaned({"comment": one.comment, "key": one.key, "text": one.value, "agent": one.agent})
        return replace(
            one, action=str(self._cleaned({"id": one.action})["id"]), id=self.id(one.id), agent=str(texts["agent"]), key=str(texts["key"]),
            value=texts["text"], comment=texts["comment"],
        )  # fmt: skip

    def _cleaned(self, given: dict[str, Any]) -> Mapping[str, Any]:
        """Each field redacted; of one that the hook took away, or made no text of, nothing is kept."""
        if self._redact is None:
            return given
        made = self._redact(dict(given))
        found = made if isinstance(made, Mapping) else {}
        return {name: clean if isinstance(clean := found.get(name), str) else None for name in given}


def digest_of(spans: Sequence[Mapping[str, Any]]) -> str:
    """Says whether a trace has changed since: a hash of what its spans say, in whatever order they came.

    What a span was given is left out: what was said before it is what other spans say. Where none does, as in a chat, whose users' and
    tools' messages are no spans, the source hashes it as `content`.
    """
    return hashlib.blake2b(b"\0".join(sorted(map(encode, map(_ordered, spans)))), digest_size=16).hexdigest()


def _ordered(span: Mapping[str, Any]) -> Mapping[str, Any]:
    feedback = span.get("feedback")
    said = {name: span.get(name) for name in ("id", "outputs", "error")}
    if "content" in span:
        said["content"] = span["content"]
    return {**said, "ended": span.get("end") is not None, "feedback": sorted(map(encode, feedback or ()))}


def named(trace: EpisodeTrace, notes: Notes) -> EpisodeTrace:
    """A trace whose agents and policies have names that may become those of folders; what was mended is counted."""
    actions = []
    for action in trace.actions:
        agent, policy = safe_name(action.agent, notes), safe_name(action.policy, notes)
        actions.append(action if (agent, policy) == (action.agent, action.policy) else replace(action, agent=agent, policy=policy))
    return trace if all(a is b for a, b in zip(actions, trace.actions, strict=True)) else replace(trace, actions=tuple(actions))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
