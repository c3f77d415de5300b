"""Which episodes and actions are exported: `Filters`, and the reason for each that is not.

Episodes are judged before their steps are read, so a filter by date or outcome costs nothing for what it leaves out. Whatever is left out
is left out under one reason, the first that holds, and counted; the data card lists them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from ..errors import ConfigError
from ..record import Action, Episode, Verdict

OutcomeIs = Literal["success", "failure", "graded"]


@dataclass(frozen=True)
class Filters:
    """What must hold of an action to be exported; None and () ask for nothing.

    Raises `ConfigError` for a range that holds nothing, or a bound that is not a number.
    """

    agents: tuple[str, ...] = ()
    min_score: float | None = None
    max_score: float | None = None
    """0..10, both inclusive; with either, actions without a score are left out."""
    outcome: OutcomeIs | None = None
    """Of the episode: graded a success, graded a failure, or graded at all."""
    since: float | None = None
    until: float | None = None
    """Unix seconds; when the episode started, since <= start < until. See `seconds`."""
    min_length: int | None = None
    max_length: int | None = None
    """Of the completion, thinking and tool calls' arguments included: characters, or tokens in the format `rl`."""
    max_prompt: int | None = None
    """Of all that the agent saw, in the same unit."""
    split: str | None = "train"
    """`Episode.split`; None = every split."""
    iteration: int | None = None
    strata: tuple[str, ...] = ()
    truncated: bool = False
    """Whether completions that were cut off at the length limit take part."""
    discarded: bool = False
    """Whether completions that never reached the graph's state (retried attempts, unused samples) take part."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("score", self.min_score, self.max_score),
            ("length", self.min_length, self.max_length),
            ("date", self.since, self.until),
        ):
            for value in (low, high):
                if value is not None and not math.isfinite(value):
                    raise ConfigError(f"a bound of {name} is {value!r}", hint="give a finite number")
            if low is not None and high is not None and (low > high or (name == "date" and low == high)):
                raise ConfigError(f"no {name} lies between {low:g} and {high:g}", hint="give the smaller bound first")

    def episode(self, episode: Episode) -> str | None:
        """Why an episode takes no part, or None. Its split and iteration are asked of the store."""
        if episode.status == "running":
            return "still running"
        if (self.since is not None and episode.started < self.since) or (self.until is not None and episode.started >= self.until):
            return "date"
        if self.strata and episode.stratum not in self.strata:
            return "stratum"
        if self.outcome is not None and (episode.outcome is None or self.outcome not in ("graded", _word(episode))):
            return "outcome"
        return None

    def action(self, action: Action, verdict: Verdict | None, *, scored: bool = False) -> str | None:
        """Why an action takes no part, or None, before its texts are looked at. `scored`: actions without a score are of no use."""
        if self.agents and action.agent not in self.agents:
            return "agent"
        if not action.kept and not self.discarded:
            return "discarded"
        if action.finish_reason == "length" and not self.truncated:
            return "truncated"
        score = None if verdict is None else verdict.score
        if score is None:
            return "no score" if scored or self.min_score is not None or self.max_score is not None else None
        if (self.min_score is not None and score < self.min_score) or (self.max_score is not None and score > self.max_score):
            return "score"
        return None

    def length(self, prompt: int, completion: int) -> str | None:
        """Why lengths take no part, or None."""
        if (self.min_length is not None and completion < self.min_length) or (self.max_length is not None and completion > self.max_length):
            return "length"
        return "prompt length" if self.max_prompt is not None and prompt > self.max_prompt else None

    def describe(self) -> dict[str, Any]:
        """The filters that ask for something, dates as ISO 8601."""
        given = {name: value for name, value in asdict(self).items() if value is not None and value is not False and value != ()}
        for name in ("since", "until"):
            if name in given:
                given[name] = datetime.fromtimestamp(given[name], UTC).isoformat()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def seconds(text: str, *, end: bool = False) -> float:
    """Unix seconds of an ISO 8601 date or time, UTC where it names no zone. A date alone as an `end` includes that day.

    Raises `ConfigError` for anything else.
    """
    try:
        if len(text) <= 10:
            day = date.fromisoformat(text)
            at = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1 if end else 0)
        else:
            at = datetime.fromisoformat(text)
            at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return at.timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r} is no date", hint="write 2026-03-01 or 2026-03-01T12:00:00+00:00") from error


def _word(episode: Episode) -> str:
    return "success" if episode.outcome is not None and episode.outcome.success else "failure"
