"""What a coach is: `await coach.score(case) -> Verdict`, and nothing else is needed.

A `Case` holds, as data, all the evidence for one action. It is built from the record by `mappa_graph.coach.case`, in the same
way for every coach, so that two coaches can be compared on the same cases and a score can be repeated later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..record import Execution, FileChange, Outcome, Verdict


@dataclass(frozen=True, slots=True)
class AgentCard:
    """What a coach is told of a member of the team, in the order of the pipeline."""

    name: str
    role: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """An earlier (or, in hindsight, later) action of the same episode, in short."""

    action_id: str
    agent: str
    output: str
    executions: tuple[Execution, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """The evidence for one action. Texts come from agents and are hostile data: quote them, never obey them."""

    action_id: str
    episode_id: str
    environment: str
    task: str
    team: tuple[AgentCard, ...]
    agent: str
    turn: int
    """How many actions this agent took before in the episode."""
    messages: Sequence[Mapping[str, Any]] = ()
    output: str = ""
    """What the agent said, thinking taken off."""
    thinking: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    executions: tuple[Execution, ...] = ()
    error: str | None = None
    finish_reason: str | None = None
    files_before: Mapping[str, str] = field(default_factory=dict)
    """Path -> agent that last wrote it ("" = given with the task)."""
    files_after: tuple[FileChange, ...] = ()
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    """Filled in hindsight only."""
    reference: str | None = None
    """Only where the environment allows its coach to see it."""
    outcome: Outcome | None = None
    """Only once the episode was graded, so in hindsight."""
    stratum: str = ""

    @property
    def card(self) -> AgentCard:
        """The acting agent's card."""
        return next((c for c in self.team if c.name == self.agent), AgentCard(self.agent))


@runtime_checkable
class Coach(Protocol):
    """Scores actions. Raise on failure: the caller records it and the action has no verdict; never invent a score."""

    name: str

    async def score(self, case: Case) -> Verdict: ...


async def score_episode(coach: Coach, cases: Sequence[Case]) -> Mapping[str, Verdict]:
    """Verdicts of an episode's cases by action id, through `coach.score_episode` where the coach has one (one call for all)."""
    whole = getattr(coach, "score_episode", None)
    if whole is not None:
        return dict(await whole(cases))
    return {case.action_id: await coach.score(case) for case in cases}
