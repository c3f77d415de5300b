"""`EvidenceCoach`: a score from what the action did, with no model and no randomness.

It runs small rules (`mappa_graph.coach.rules`) over the case; each says how many points its evidence is worth and where it bounds
the score: `score = clamp(base + sum of deltas)`, then raised to the highest floor, then lowered to the lowest ceiling, in 0..10.
It takes microseconds, so it can score every action of every iteration, and it is the measuring stick for LLM coaches, which may
be swayed by what an agent says; this one looks at what its code did. `OutcomeCoach` is the control of every experiment with a
coach: each action gets the episode's grade, and nothing is known of who earned it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence

from ..errors import CoachError, ConfigError
from ..record import Verdict
from .base import Case
from .rules import DEFAULT_RULES, Finding, Rule

__all__ = ["DEFAULT_RULES", "EvidenceCoach", "Finding", "OutcomeCoach", "Rule"]


class EvidenceCoach:
    """Scores by rules.

    Args:
        rules: what to look at; the default is `DEFAULT_RULES`.
        extra: rules added to them (an environment's own).
        base: the score of an action of which nothing is found, 0..10.
        name: shown with each verdict, with a hash of the rules behind it.
    """

    def __init__(
        self, rules: Sequence[Rule] = DEFAULT_RULES, *, extra: Sequence[Rule] = (), base: float = 5.0, name: str = "evidence"
    ) -> None:
        if not 0.0 <= base <= 10.0:
            raise ConfigError(f"the base score of coach {name!r} is {base!r}", hint="give a number in 0..10")
        self.rules: tuple[Rule, ...] = (*rules, *extra)
        self.base = base
        self.name = name
        self.version = _version(self.rules, base)

    async def score(self, case: Case) -> Verdict:
        """The verdict of a case. Raises `CoachError` naming the rule, if one fails or returns something else than findings."""
        return self.judge(case)

    def judge(self, case: Case) -> Verdict:
        """As `score`, without a loop."""
        started = time.perf_counter()
        findings = self.findings(case)
        coach = f"{self.name}@{self.version}"
        void = [f for f in findings if f.void]
        if void:
            return Verdict(None, error="; ".join(f.reason for f in void), coach=coach, duration_s=time.perf_counter() - started)
        return Verdict(
            score=combine(findings, self.base),
            reason="; ".join(f.reason for f in findings) or "nothing to go by: no execution, no artifact, no outcome",
            blame=tuple(dict.fromkeys(name for f in findings for name in f.blame)),
            coach=coach,
            duration_s=time.perf_counter() - started,
        )

    def findings(self, case: Case) -> list[Finding]:
        """What each rule found, in the order of the rules."""
        found: list[Finding] = []
        for rule in self.rules:
            name = rule_name(rule)
            try:
                said = rule(case)
                each = () if said is None else (said,) if isinstance(said, Finding) else tuple(said)
            except Exception as error:
                raise CoachError(f"rule {name!r} of coach {self.name!r} failed on action {case.action_id!r}: {error!r}") from error
            found.extend(_checked(finding, name, self.name) for finding in each)
        return found


def combine(findings: Sequence[Finding], base: float = 5.0) -> float:
    """The score of some findings: base plus deltas, clamped to 0..10, then floors, then ceilings."""
    score = min(10.0, max(0.0, base + sum(f.delta for f in findings)))
    score = max([score, *(f.floor for f in findings if f.floor is not None)])
    score = min([score, *(f.ceiling for f in findings if f.ceiling is not None)])
    return min(10.0, max(0.0, score))


class OutcomeCoach:
    """Gives every action ten times the episode's outcome: the outcome-only control.

    Works in hindsight only (`when="episode"`): a case without an outcome gets no verdict.
    """

    def __init__(self, name: str = "outcome") -> None:
        self.name = name

    async def score(self, case: Case) -> Verdict:
        """Ten times `case.outcome.value`, or no verdict."""
        if case.outcome is None:
            return Verdict(None, error="the case has no outcome; this coach works in hindsight only: when='episode'", coach=self.name)
        return Verdict(10.0 * case.outcome.value, reason=case.outcome.reason or "the episode's outcome", coach=self.name)


def rule_name(rule: Rule) -> str:
    """The name a rule is shown by."""
    return getattr(rule, "__name__", None) or type(rule).__name__


def _checked(finding: object, rule: str, coach: str) -> Finding:
    if not isinstance(finding, Finding):
        raise CoachError(f"rule {rule!r} of coach {coach!r} returned {finding!r}", hint="return a Finding, a list of Findings, or None")
    for what, value in (("delta", finding.delta), ("floor", finding.floor), ("ceiling", finding.ceiling)):
        if value is not None and not math.isfinite(value):
            raise CoachError(f"rule {rule!r} of coach {coach!r} gave {what}={value!r}", hint="give a finite number")
    if finding.rule:
        return finding
    return Finding(finding.reason, finding.delta, finding.floor, finding.ceiling, finding.blame, rule, finding.void)


def _version(rules: Sequence[Rule], base: float) -> str:
    """Eight hex digits that change with the rules' names or code, or with the base."""
    digest = hashlib.sha256(repr(base).encode())
    for rule in rules:
        code = getattr(rule, "__code__", None)
        digest.update(f"{getattr(rule, '__module__', '')}.{rule_name(rule)}".encode())
        digest.update(
            b"" if code is None else code.co_code + repr([c for c in code.co_consts if isinstance(c, str | int | float)]).encode()
        )
    return digest.hexdigest()[:8]
