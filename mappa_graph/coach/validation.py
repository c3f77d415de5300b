"""Is a coach to be trusted? Measured against labels, against itself, and against where an action stands.

`validate` compares a coach's scores (and blame) with gold labels or human ratings; `self_agreement` asks it twice; `position_effects`
shows it the same episodes in another order; `summary` puts it into words. The one
thing to know: a coach that agrees with itself and not with the labels is a precise instrument for the wrong thing, so read the rank
correlation first.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CoachError, ConfigError
from ..record import Verdict
from .base import Case, Coach, score_episode
from .statistic import deviation, mean, pearson, spearman


@dataclass(frozen=True, slots=True)
class Label:
    """What a person, or a gold standard, says of an action."""

    score: float
    """0..10."""
    blame: tuple[str, ...] | None = None
    """Agents at fault; empty = nobody; None = not labelled."""


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin of the calibration curve: actions that the coach scored from `low` up to `high`."""

    low: float
    high: float
    n: int
    coach: float
    label: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """A coach against labels."""

    n: int
    """Labelled actions that got a score."""
    unscored: int
    rank: float
    """Spearman's rho of scores and labels; NaN where either doesn't vary."""
    rank_interval: tuple[float, float]
    """95 % interval of it (Fisher's z, with the variance of Bonett and Wright, 2000, for ranks)."""
    linear: float
    """Pearson's r."""
    error: float
    """Mean absolute error, points."""
    bias: float
    """Mean of score minus label, points."""
    curve: tuple[Bin, ...]
    bias_by_agent: Mapping[str, float]
    blame: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(blamed by the label, blamed by the coach) -> count, by agent; "" = nobody. One entry a labelled action: the first of each."""
    blame_accuracy: float = math.nan
    """Share of labelled actions whose set of blamed agents is the label's."""


@dataclass(frozen=True, slots=True)
class SelfAgreement:
    """A coach asked twice about the same cases."""

    n: int
    difference: float
    """Mean absolute difference of the two scores, points."""
    within_one: float
    """Share of actions whose scores differ by one point or less."""
    rank: float
    unscored: int


@dataclass(frozen=True, slots=True)
class PositionEffects:
    """A coach in hindsight, shown the actions of each episode forward and backward."""

    n: int
    first_over_last: float
    """Mean gain in points of an action for being shown in the first half instead of the second."""
    difference: float
    """Mean absolute difference of the two scores of an action, points."""
    trend: float
    """Rank correlation of an action's place in the episode with its score: not an error by itself, but one to look at."""


async def verdicts_of(coach: Coach, cases: Sequence[Case], *, concurrency: int = 8) -> list[Verdict]:
    """Verdicts in the order of the cases; a coach that fails on a case has none there."""
    slots = asyncio.Semaphore(concurrency)

    async def one(case: Case) -> Verdict:
        async with slots:
            try:
                return await coach.score(case)
            except CoachError as error:
                return Verdict(None, error=str(error), coach=coach.name)

    return list(await asyncio.gather(*(one(case) for case in cases)))


async def validate(coach: Coach, cases: Sequence[Case], labels: Mapping[str, Label], *, concurrency: int = 8) -> Agreement:
    """Scores the labelled cases and compares. `labels` are by action id; cases without one are left out.

    Raises `ConfigError` if no case has a label.
    """
    labelled = [case for case in cases if case.action_id in labels]
    if not labelled:
        raise ConfigError("none of the cases has a label", hint="labels are keyed by action id; `traces` lists the ids of a run")
    verdicts = await verdicts_of(coach, labelled, concurrency=concurrency)
    return compare(labelled, verdicts, labels)


def compare(cases: Sequence[Case], verdicts: Sequence[Verdict], labels: Mapping[str, Label], *, bins: int = 5) -> Agreement:
    """The agreement of verdicts with labels; the three go together by position and action id."""
    rows = [(c, v, labels[c.action_id]) for c, v in zip(cases, verdicts, strict=True) if v.score is not None]
    scores = [v.score for _, v, _ in rows if v.score is not None]
    gold = [label.score for _, _, label in rows]
    rank = spearman(scores, gold)
    agents = sorted({case.agent for case, _, _ in rows})
    blame: Counter[tuple[str, str]] = Counter()
    right = asked = 0
    for case, verdict, label in rows:
        if label.blame is None:
            continue
        said = blamed_agents(case, verdict)
        asked += 1
        right += set(said) == set(label.blame)
        blame[next(iter(label.blame), ""), next(iter(said), "")] += 1
    return Agreement(
        n=len(rows),
        unscored=len(cases) - len(rows),
        rank=rank,
        rank_interval=_interval(rank, len(rows)),
        linear=pearson(scores, gold),
        error=mean([abs(s - g) for s, g in zip(scores, gold, strict=True)]),
        bias=mean([s - g for s, g in zip(scores, gold, strict=True)]),
        curve=_curve(scores, gold, bins),
        bias_by_agent={
            agent: mean([s - g for s, g, (case, _, _) in zip(scores, gold, rows, strict=True) if case.agent == agent]) for agent in agents
        },
        blame=dict(blame),
        blame_accuracy=right / asked if asked else math.nan,
    )


def blamed_agents(case: Case, verdict: Verdict) -> list[str]:
    """The agents that a verdict blames: names as they are, action ids as the agent that acted."""
    acted = {case.action_id: case.agent, **{step.action_id: step.agent for step in (*case.before, *case.after)}}
    return list(dict.fromkeys(acted.get(name, name) for name in verdict.blame))


async def self_agreement(coach: Coach, cases: Sequence[Case], *, concurrency: int = 8) -> SelfAgreement:
    """Asks twice about each case. A coach's cache is passed by, where it has `without_cache`."""
    fresh = _fresh(coach)
    first = await verdicts_of(fresh, cases, concurrency=concurrency)
    second = await verdicts_of(fresh, cases, concurrency=concurrency)
    pairs = [(a.score, b.score) for a, b in zip(first, second, strict=True) if a.score is not None and b.score is not None]
    gaps = [abs(a - b) for a, b in pairs]
    return SelfAgreement(
        n=len(pairs),
        difference=mean(gaps),
        within_one=mean([float(gap <= 1.0) for gap in gaps]),
        rank=spearman([a for a, _ in pairs], [b for _, b in pairs]),
        unscored=len(cases) - len(pairs),
    )


async def position_effects(coach: Coach, episodes: Iterable[Sequence[Case]]) -> PositionEffects:
    """Scores each episode in hindsight twice, its actions shown forward and backward.

    Args:
        coach: one with `score_episode`; one without sees each case by itself and can have no effect of order.
        episodes: the cases of each episode, in the episode's order.
    """
    fresh = _fresh(coach)
    gains: list[float] = []
    gaps: list[float] = []
    places: list[float] = []
    scores: list[float] = []
    for cases in episodes:
        cases = list(cases)
        forward = await score_episode(fresh, cases)
        backward = await score_episode(fresh, cases[::-1])
        for i, case in enumerate(cases):
            a, b = forward[case.action_id].score, backward[case.action_id].score
            if a is None or b is None:
                continue
            gaps.append(abs(a - b))
            scores.append((a + b) / 2)
            places.append(i / max(1, len(cases) - 1))
            middle = (len(cases) - 1) / 2
            if i != middle:
                gains.append(a - b if i < middle else b - a)
    return PositionEffects(n=len(gaps), first_over_last=mean(gains), difference=mean(gaps), trend=spearman(places, scores))


def read_labels(path: str | Path) -> dict[str, Label]:
    """Labels from JSON lines of `{"action": id, "score": 0..10, "blame": [agents]}` (blame may be left out; a score of null is no label).

    Raises `ConfigError` naming the line.
    """
    labels: dict[str, Label] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the labels {str(path)!r}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row["score"] is None:
                continue
            score = float(row["score"])
            if not 0.0 <= score <= 10.0:
                raise ValueError(f"score {score} is outside 0..10")
            blame = row.get("blame")
            labels[str(row["action"])] = Label(score, None if blame is None else tuple(map(str, blame)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"line {number} of {str(path)!r} is no label: {error!r}", hint='write {"action": "<id>", "score": 7, "blame": ["solver"]}'
            ) from error
    return labels


def summary(agreement: Agreement | None = None, itself: SelfAgreement | None = None, position: PositionEffects | None = None) -> str:
    """The measurements as lines of text, with a word on what is wrong."""
    lines: list[str] = []
    if agreement is not None:
        low, high = agreement.rank_interval
        lines.append(f"against labels   {agreement.n} actions ({agreement.unscored} without a score)")
        lines.append(f"  rank correlation {agreement.rank:.2f} (95 % {low:.2f} to {high:.2f}), linear {agreement.linear:.2f}")
        lines.append(f"  mean error {agreement.error:.2f} points, bias {agreement.bias:+.2f}")
        lines += [f"  {b.low:g} to {b.high:g}: {b.n} actions, coach {b.coach:.1f}, label {b.label:.1f}" for b in agreement.curve]
        lines += [f"  bias on {agent}: {bias:+.2f}" for agent, bias in agreement.bias_by_agent.items()]
        if not math.isnan(agreement.blame_accuracy):
            lines.append(f"  blame right on {agreement.blame_accuracy:.0%}")
            lines += [
                f"    label {gold or 'nobody'} -> coach {said or 'nobody'}: {n}" for (gold, said), n in sorted(agreement.blame.items())
            ]
        if not agreement.rank >= 0.3:
            lines.append("  this coach hardly orders actions as the labels do: don't train on it")
    if itself is not None:
        lines.append(f"against itself   {itself.n} actions: {itself.difference:.2f} points apart, {itself.within_one:.0%} within one")
        if itself.difference > 1.5:
            lines.append("  its scores are noisy: lower the temperature, sharpen the prompt, or take the median of several")
    if position is not None:
        lines.append(f"order            {position.n} actions: {position.first_over_last:+.2f} points for being shown first")
        if abs(position.first_over_last) > 0.5:
            lines.append("  it favours a place in the list: score fewer actions a request, or action by action")
    return "\n".join(lines)


def _fresh(coach: Coach) -> Coach:
    without = getattr(coach, "without_cache", None)
    fresh: Coach = without() if without is not None else coach
    return fresh


def _curve(scores: Sequence[float], gold: Sequence[float], bins: int) -> tuple[Bin, ...]:
    out: list[Bin] = []
    for i in range(bins):
        low, high = 10.0 * i / bins, 10.0 * (i + 1) / bins
        inside = [(s, g) for s, g in zip(scores, gold, strict=True) if low <= s < high or (i == bins - 1 and s == 10.0)]
        if inside:
            out.append(Bin(low, high, len(inside), mean([s for s, _ in inside]), mean([g for _, g in inside])))
    return tuple(out)


def _interval(rank: float, n: int) -> tuple[float, float]:
    if math.isnan(rank) or n < 5:
        return math.nan, math.nan
    z = math.atanh(max(-0.999999, min(0.999999, rank)))
    half = 1.96 * math.sqrt((1 + rank**2 / 2) / (n - 3))
    return math.tanh(z - half), math.tanh(z + half)


def spread(verdicts: Iterable[Verdict]) -> tuple[float, float]:
    """Mean and deviation of the scores given: to see a coach drift when its model or prompt changes."""
    scores = [v.score for v in verdicts if v.score is not None]
    return mean(scores), deviation(scores)
