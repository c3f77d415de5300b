"""Preferences: which of two actions at the same state was better.

Two sources, and for KTO a third. *Siblings* are samples of one task by one agent that saw exactly the same (the same prompt ids, or the
same messages and tools where there are none): the best scored against the worst. *Coach* is the better action that a coach proposed
against what the agent did. *Scores* labels single actions by thresholds. The one thing to know: the same text may have been scored more
than once at a state; its score is then the mean, so that no text is ever preferred to itself.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..codec import encode, pack_ids
from ..errors import ConfigError
from ..record import Action, EpisodeTrace

Source = Literal["siblings", "coach", "scores"]


@dataclass(frozen=True)
class Pairs:
    """How preferences are made. Raises `ConfigError` for what can't take effect."""

    sources: tuple[Source, ...] = ("siblings", "coach")
    min_margin: float = 1.0
    """Points by which the better sibling must be ahead, > 0."""
    per_state: int = 1
    """Most pairs of siblings from one state: best with worst, second best with second worst, and so on."""
    good: float = 7.0
    bad: float = 3.0
    """KTO by scores: good from here on, bad down from here, and what lies between is left out."""

    def __post_init__(self) -> None:
        unknown = [s for s in self.sources if s not in ("siblings", "coach", "scores")]
        if unknown or not self.sources:
            raise ConfigError(f"preferences from {unknown or 'nowhere'}", hint="name some of: siblings, coach, scores")
        if not 0.0 < self.min_margin <= 10.0:
            raise ConfigError(f"the smallest margin is {self.min_margin!r}", hint="give points in 0..10, above 0")
        if self.per_state < 1:
            raise ConfigError(f"{self.per_state} pairs a state", hint="give 1 or more")
        if not 0.0 <= self.bad < self.good <= 10.0:
            raise ConfigError(f"good from {self.good!r} and bad to {self.bad!r}", hint="give 0 <= bad < good <= 10")

    def describe(self) -> dict[str, Any]:
        described = asdict(self) | {"sources": list(self.sources)}
        unused = [*(["good", "bad"] if "scores" not in self.sources else []),
                  *(["min_margin", "per_state"] if "siblings" not in self.sources else [])]  # fmt: skip
        return {name: value for name, value in described.items() if name not in unused}


@dataclass(frozen=True, slots=True)
class Sibling:
    """A distinct completion at a state, with the mean of its scores."""

    key: int
    """Where its row lies."""
    score: float


def state_of(trace: EpisodeTrace, action: Action, prompt: Any, tools: Any) -> bytes:
    """What two actions must share to be siblings: 16 bytes of task, agent and what the agent saw."""
    call, episode = trace.calls.get(action.id), trace.episode
    digest = hashlib.blake2b(digest_size=16)
    for part in (
        task_of(trace).encode("utf-8", "surrogatepass"),
        action.agent.encode("utf-8", "surrogatepass"),
        episode.environment.encode("utf-8", "surrogatepass"),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    seen = pack_ids(call.prompt_ids) if call is not None and call.prompt_ids else encode([prompt, tools])
    digest.update(seen)
    return digest.digest()


def task_of(trace: EpisodeTrace) -> str:
    """What names the task: its id; else its text; else the episode, which is then a task of its own."""
    episode = trace.episode
    return episode.task_id or (f"text:{episode.task}" if episode.task else f"episode:{episode.id}")


def best_and_worst(siblings: Iterable[Sibling], pairs: Pairs) -> Iterator[tuple[Sibling, Sibling]]:
    """Pairs (better, worse) of one state's siblings, which come in the order of their scores, best first.

    Holds `per_state` siblings of either end, however many there are.
    """
    top: list[Sibling] = []
    bottom: deque[Sibling] = deque(maxlen=pairs.per_state)
    for sibling in siblings:
        if len(top) < pairs.per_state:
            top.append(sibling)
        bottom.append(sibling)
    used: set[int] = set()
    for better, worse in zip(top, reversed(bottom), strict=False):
        if better.score - worse.score < pairs.min_margin or better.key in used or worse.key in used:
            return
        used |= {better.key, worse.key}
        yield better, worse


def labels(score: float, pairs: Pairs) -> bool | None:
    """KTO's label of a score; None between the thresholds."""
    return True if score >= pairs.good else False if score <= pairs.bad else None


def pair(about: dict[str, Any], source: Source, better: Sequence[Any], worse: Sequence[Any]) -> dict[str, Any]:
    """The columns of a pair beside its texts; `better` and `worse` are (score or None, action)."""
    known = better[0] is not None and worse[0] is not None
    return {
        "agent": about["agent"], "task_id": about["task_id"], "stratum": about["stratum"], "source": source,
        "margin": (better[0] - worse[0]) / 10.0 if known else 0.0, "chosen_score": better[0], "rejected_score": worse[0],
        "chosen_action": better[1], "rejected_action": worse[1],
    }  # fmt: skip
