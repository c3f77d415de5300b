"""Several coaches as one: a panel, a cascade, and evidence as a bound on an opinion.

Each is a coach itself, so they nest: `Bounded(Cascade(cheap, strong), EvidenceCoach())`. A coach that gives no verdict takes no part;
where nobody is left there is no verdict. In hindsight (`score_episode`) each coach is asked in the way it can be asked.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ..errors import CoachError, ConfigError
from ..record import Verdict
from .base import Case, Coach, score_episode
from .evidence import EvidenceCoach


class Panel:
    """The median, or the weighted mean, of several coaches.

    Args:
        coaches: asked at once.
        how: "median" or "mean".
        weights: one for each coach; they weigh the mean, and the median too. Default: equal.
        quorum: how many of them must give a score for there to be a verdict.

    The verdict's `usage["disagreement"]` is the highest score less the lowest, `usage["votes"]` how many gave one; blame is what more
    than half of the voters blame.
    """

    def __init__(
        self,
        coaches: Sequence[Coach],
        *,
        how: Literal["median", "mean"] = "median",
        weights: Sequence[float] | None = None,
        quorum: int = 1,
        name: str = "panel",
    ) -> None:
        if not coaches:
            raise ConfigError("a panel needs coaches", hint="Panel([EvidenceCoach(), LLMCoach(...)])")
        if how not in ("median", "mean"):
            raise ConfigError(f"a panel can't combine by {how!r}", hint="median or mean")
        weights = list(weights) if weights is not None else [1.0] * len(coaches)
        if len(weights) != len(coaches) or any(w <= 0 for w in weights):
            raise ConfigError(f"weights {weights!r} for {len(coaches)} coaches", hint="give one number above 0 for each coach")
        if not 1 <= quorum <= len(coaches):
            raise ConfigError(f"a quorum of {quorum} with {len(coaches)} coaches", hint="give a number from 1 to the number of coaches")
        self.coaches, self.how, self.weights, self.quorum, self.name = tuple(coaches), how, weights, quorum, name

    async def score(self, case: Case) -> Verdict:
        return self._combine(await asyncio.gather(*(_asked(coach, case) for coach in self.coaches)))

    async def score_episode(self, cases: Sequence[Case]) -> Mapping[str, Verdict]:
        votes = await asyncio.gather(*(_asked_whole(coach, cases) for coach in self.coaches))
        return {case.action_id: self._combine([vote[case.action_id] for vote in votes]) for case in cases}

    def _combine(self, verdicts: Sequence[Verdict]) -> Verdict:
        voted = [(v.score, w, v) for v, w in zip(verdicts, self.weights, strict=True) if v.score is not None]
        duration = max((v.duration_s for v in verdicts), default=0.0)
        usage = add_usage(verdicts)
        if len(voted) < self.quorum:
            why = "; ".join(f"{v.coach or 'a coach'}: {v.error}" for v in verdicts if v.score is None)
            return Verdict(
                None,
                error=f"{len(voted)} of {len(self.coaches)} coaches gave a score, {self.quorum} are needed ({why})",
                coach=self.name,
                duration_s=duration,
                usage=usage,
            )
        scores = [s for s, _, _ in voted]
        total = sum(w for _, w, _ in voted)
        mean = sum(s * w for s, w, _ in voted) / total
        score = mean if self.how == "mean" else weighted_median([(s, w) for s, w, _ in voted])
        names = dict.fromkeys(name for _, _, v in voted for name in v.blame)
        blame = tuple(n for n in names if 2 * sum(w for _, w, v in voted if n in v.blame) > total)
        nearest = min(voted, key=lambda vote: (abs(vote[0] - score), -vote[1]))[2]
        return Verdict(
            score=min(10.0, max(0.0, score)),
            reason="\n".join(f"{v.coach or 'coach'} gave {s:g}: {v.reason}" for s, _, v in voted),
            blame=blame,
            better_action=nearest.better_action or next((v.better_action for _, _, v in voted if v.better_action), None),
            coach=f"{self.name}({', '.join(v.coach or 'coach' for _, _, v in voted)})",
            duration_s=duration,
            usage={**usage, "disagreement": max(scores) - min(scores), "votes": float(len(voted))},
        )


def is_unsure(verdict: Verdict) -> bool:
    """No score, or one in the middle of the scale (3.5 to 6.5), where a cheap coach knows least."""
    return verdict.score is None or 3.5 <= verdict.score <= 6.5


class Cascade:
    """A cheap coach first; a strong one where the cheap one is unsure.

    Args:
        first: asked of every case.
        second: asked where `unsure(first's verdict)` holds; its score stands. Where it gives none, the first one's score stands.
        unsure: default `is_unsure`.

    The verdict's `usage["escalated"]` is 1 where the second coach was asked.
    """

    def __init__(self, first: Coach, second: Coach, *, unsure: Callable[[Verdict], bool] = is_unsure, name: str = "cascade") -> None:
        self.first, self.second, self.unsure, self.name = first, second, unsure, name

    async def score(self, case: Case) -> Verdict:
        return await self._decide(case, await _asked(self.first, case))

    async def score_episode(self, cases: Sequence[Case]) -> Mapping[str, Verdict]:
        firsts = await _asked_whole(self.first, cases)
        done = await asyncio.gather(*(self._decide(case, firsts[case.action_id]) for case in cases))
        return {case.action_id: verdict for case, verdict in zip(cases, done, strict=True)}

    async def _decide(self, case: Case, first: Verdict) -> Verdict:
        if not self.unsure(first):
            return _as(first, first.score, f"{self.name}({first.coach})", {**first.usage, "escalated": 0.0})
        second = await _asked(self.second, case)
        usage = {**add_usage([first, second]), "escalated": 1.0}
        chosen = second if second.score is not None else first
        if first.score is not None and second.score is not None:
            usage["disagreement"] = abs(first.score - second.score)
        return _as(chosen, chosen.score, f"{self.name}({chosen.coach})", usage)


class Bounded:
    """A coach whose score can't leave the bounds that evidence sets.

    The floors and ceilings of the evidence coach's findings bound the score; its deltas don't count. What the bounds changed is said
    in the reason, and `usage["moved"]` is by how much. Where the evidence says that no score can be given, there is none.
    """

    def __init__(self, coach: Coach, evidence: EvidenceCoach | None = None, *, name: str | None = None) -> None:
        self.coach = coach
        self.evidence = evidence or EvidenceCoach()
        self.name = name or f"bounded({coach.name})"

    async def score(self, case: Case) -> Verdict:
        void = self._void(case)
        return void if void is not None else self._bound(case, await _asked(self.coach, case))

    async def score_episode(self, cases: Sequence[Case]) -> Mapping[str, Verdict]:
        done = {case.action_id: void for case in cases if (void := self._void(case)) is not None}
        asked = await _asked_whole(self.coach, cases) if len(done) < len(cases) else {}
        return {c.action_id: done.get(c.action_id) or self._bound(c, asked[c.action_id]) for c in cases}

    def _void(self, case: Case) -> Verdict | None:
        void = [f.reason for f in self.evidence.findings(case) if f.void]
        return Verdict(None, error="; ".join(void), coach=self.name) if void else None

    def _bound(self, case: Case, verdict: Verdict) -> Verdict:
        if verdict.score is None:
            return verdict
        findings = self.evidence.findings(case)
        floor = max((f.floor for f in findings if f.floor is not None), default=0.0)
        ceiling = min((f.ceiling for f in findings if f.ceiling is not None), default=10.0)
        score = min(max(verdict.score, floor), ceiling)
        usage = {**verdict.usage, "moved": score - verdict.score}
        if score == verdict.score:
            return _as(verdict, score, f"{self.name}({verdict.coach})", usage)
        side = [f for f in findings if (f.ceiling if score < verdict.score else f.floor) is not None]
        reason = f"{verdict.reason}\n(evidence moved {verdict.score:g} to {score:g}: {'; '.join(f.reason for f in side)})"
        blame = tuple(dict.fromkeys([*verdict.blame, *(name for f in side for name in f.blame)]))
        return Verdict(
            score=score,
            reason=reason,
            blame=blame,
            better_action=verdict.better_action,
            coach=f"{self.name}({verdict.coach})",
            duration_s=verdict.duration_s,
            usage=usage,
        )


def weighted_median(votes: Sequence[tuple[float, float]]) -> float:
    """The median of (score, weight) pairs; with equal weights the usual one, which is the mean of the two middle scores."""
    if len({w for _, w in votes}) == 1:
        return float(statistics.median(s for s, _ in votes))
    half = sum(w for _, w in votes) / 2
    seen = 0.0
    for score, weight in sorted(votes):
        seen += weight
        if seen >= half:
            return score
    raise CoachError("no votes to take a median of")


def add_usage(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Calls, tokens and money of several verdicts, added up."""
    keys = ("calls", "prompt_tokens", "completion_tokens", "usd")
    return {key: sum(v.usage.get(key, 0.0) for v in verdicts) for key in keys if any(key in v.usage for v in verdicts)}


async def _asked(coach: Coach, case: Case) -> Verdict:
    """A coach's verdict; one that fails in the ways a coach may has none."""
    try:
        return await coach.score(case)
    except CoachError as error:
        return Verdict(None, error=str(error), coach=coach.name)


async def _asked_whole(coach: Coach, cases: Sequence[Case]) -> Mapping[str, Verdict]:
    """A coach's verdicts on an episode, with one for every case."""
    try:
        found = await score_episode(coach, cases)
    except CoachError as error:
        return {case.action_id: Verdict(None, error=str(error), coach=coach.name) for case in cases}
    missing = Verdict(None, error="the coach left this action out", coach=coach.name)
    return {case.action_id: found.get(case.action_id, missing) for case in cases}


def _as(verdict: Verdict, score: float | None, coach: str, usage: Mapping[str, float]) -> Verdict:
    return Verdict(
        score=score,
        reason=verdict.reason,
        blame=verdict.blame,
        better_action=verdict.better_action,
        coach=coach,
        error=verdict.error,
        duration_s=verdict.duration_s,
        usage=usage,
    )
