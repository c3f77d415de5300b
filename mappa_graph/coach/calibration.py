"""Bias of a coach between strata (task types, difficulties, agents): measured, warned of, and taken out before returns are computed.

A coach that scores one kind of task 1.5 points higher moves the weights toward whatever is done on that kind of task. Taking out each
stratum's mean is a baseline per stratum: it changes no comparison between two actions of one stratum, and leaves none between strata.
The one thing to know: whether a gap is bias can't be told from scores alone (the team may be better there). `by_stratum` takes
outcomes too, and then sets each score against what was really achieved.

    calibrator = Calibrator("stratum")
    scores = calibrator(scores, strata)       # before discounted_returns(scores, ...)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError
from .statistic import cohen_d, deviation, mean

Mode = Literal["none", "stratum", "running"]


class Calibrator:
    """Takes offsets between strata out of scores.

    Args:
        mode: "none" (scores stay), "stratum" (offsets of this batch), or "running" (offsets of an exponential mean over batches, for
            batches too small to tell).
        decay: of the running means, for each batch that holds the stratum.
        prior: how many scores' worth of doubt a stratum's offset starts with: n scores move it by n / (n + prior) of what they show.

    In and out are scores in 0..10, None where there is no verdict. The mean over all strata of the batch stays. Where a shifted score would
    leave 0..10, all are drawn toward the mean by one factor, which keeps their order and the strata's equality.
    """

    def __init__(self, mode: Mode = "stratum", *, decay: float = 0.9, prior: float = 0.0) -> None:
        if mode not in ("none", "stratum", "running"):
            raise ConfigError(f"calibrate is {mode!r}", hint="none, stratum or running")
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"the decay of running calibration is {decay!r}", hint="give a number in 0..1, below 1")
        if prior < 0:
            raise ConfigError(f"the prior of calibration is {prior!r}", hint="give a number from 0")
        self.mode, self.decay, self.prior = mode, decay, prior
        self._sums: dict[str, tuple[float, float]] = {}

    def __call__(self, scores: Sequence[float | None], strata: Sequence[str]) -> list[float | None]:
        """The calibrated scores of one batch; `strata` names each score's stratum."""
        if len(scores) != len(strata):
            raise ConfigError(f"{len(scores)} scores and {len(strata)} strata", hint="give the stratum of every score")
        known = [(s, name) for s, name in zip(scores, strata, strict=True) if s is not None]
        if self.mode == "none" or not known:
            return list(scores)
        groups: dict[str, list[float]] = {}
        for score, name in known:
            groups.setdefault(name, []).append(score)
        if self.mode == "running":
            levels = self._run(groups)
        else:
            levels = {name: (mean(values), float(len(values))) for name, values in groups.items()}
        level = sum(len(groups[name]) * levels[name][0] for name in groups) / len(known)
        offsets = {name: (at - level) * n / (n + self.prior) for name, (at, n) in levels.items()}
        moved = [None if s is None else s - offsets[name] for s, name in zip(scores, strata, strict=True)]
        return _fitted(moved)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"mode": self.mode, "sums": {name: list(pair) for name, pair in self._sums.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sums = {str(name): (float(total), float(n)) for name, (total, n) in state.get("sums", {}).items()}

    def _run(self, groups: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
        levels: dict[str, tuple[float, float]] = {}
        for name, values in groups.items():
            total, n = self._sums.get(name, (0.0, 0.0))
            total, n = total * self.decay + math.fsum(values), n * self.decay + len(values)
            self._sums[name] = (total, n)
            levels[name] = (total / n, n)
        return levels


def _fitted(scores: list[float | None]) -> list[float | None]:
    known = [s for s in scores if s is not None]
    level = min(10.0, max(0.0, mean(known)))
    factor = 1.0
    for s in known:
        room = 10.0 - level if s > level else level
        if abs(s - level) > room:
            factor = min(factor, room / abs(s - level))
    return [None if s is None else min(10.0, max(0.0, level + factor * (s - level))) for s in scores]


@dataclass(frozen=True, slots=True)
class Stratum:
    """How a coach scored one stratum."""

    name: str
    n: int
    mean: float
    deviation: float
    effect: float
    """Cohen's d of its scores against those of all other strata."""
    outcome: float | None = None
    """Mean outcome, 0..10, where outcomes were given."""
    excess: float | None = None
    """How much higher than the others it was scored, beyond what its outcomes explain, in points."""
    warning: str = ""


def by_stratum(
    scores: Sequence[float | None],
    strata: Sequence[str],
    outcomes: Sequence[float | None] | None = None,
    *,
    least: int = 8,
    large: float = 0.5,
    points: float = 0.5,
) -> list[Stratum]:
    """Scores by stratum, with a warning where a gap is large.

    Args:
        scores: 0..10, None skipped.
        strata: the stratum of each.
        outcomes: value 0..1 of each score's episode, None where it has none. With them the warning is about the excess over what the
            outcomes explain; without them about the bare gap, which may be the team's.
        least: strata with fewer scores get no warning.
        large: effect size from which a gap counts.
        points: gap in points from which it counts.
    """
    rows = [
        (s, name, None if outcomes is None else outcomes[i])
        for i, (s, name) in enumerate(zip(scores, strata, strict=True))
        if s is not None
    ]
    report: list[Stratum] = []
    for name in sorted({name for _, name, _ in rows}):
        mine = [s for s, n, _ in rows if n == name]
        others = [s for s, n, _ in rows if n != name]
        effect = cohen_d(mine, others)
        graded = [10.0 * o for _, n, o in rows if n == name and o is not None]
        beyond = [s - 10.0 * o for s, n, o in rows if n == name and o is not None]
        beyond_others = [s - 10.0 * o for s, n, o in rows if n != name and o is not None]
        excess = mean(beyond) - mean(beyond_others) if beyond and beyond_others else None
        warning = ""
        if len(mine) >= least and len(others) >= least and abs(effect) >= large:
            if excess is not None and abs(excess) >= points:
                way = "higher" if excess > 0 else "lower"
                warning = f"{name!r} is scored {abs(excess):.1f} points {way} than its outcomes explain; calibrate by stratum"
            elif excess is None and abs(mean(mine) - mean(others)) >= points:
                way = "higher" if effect > 0 else "lower"
                gap = abs(mean(mine) - mean(others))
                warning = f"{name!r} is scored {gap:.1f} points {way} than the rest (d {effect:+.1f}); outcomes would tell bias from skill"
        report.append(Stratum(name, len(mine), mean(mine), deviation(mine), effect, mean(graded) if graded else None, excess, warning))
    return report
