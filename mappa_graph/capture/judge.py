"""`Judge`: has complete actions scored by the coach, a bounded number at once, each within its time.

Whatever a coach does wrong ends as a `Verdict` without a score that says why, and is noted once as a failure. A score is never made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from time import perf_counter, time
from typing import Any, Literal, TypeVar

from ..coach.base import AgentCard, Case, Coach, score_episode
from ..errors import CoachError
from ..record import EpisodeTrace, Failure, Verdict
from .model import Acted, Llm
from .recording import Recording
from .team import Team

When = Literal["completed", "episode", "generated"]
Unit = Literal["action", "transition"]
T = TypeVar("T")


class Judge:
    """Lives on the worker's loop."""

    def __init__(
        self,
        coach: Coach | None,
        team: Team,
        *,
        when: When,
        unit: Unit,
        environment: str,
        coach_sees_reference: bool,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        self.coach = coach
        self.when = when
        self.unit = unit
        self.note: Callable[[Failure], None] = lambda failure: None
        self._team = team
        self._environment = environment
        self._reveal = coach_sees_reference
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._running: dict[str, set[asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Holds a task until it is done: a loop holds its tasks only weakly."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def generated(self, recording: Recording, llm: Llm) -> None:
        """A model has answered: scores what it said now, where that is wanted."""
        if self.when == "generated":
            for action in llm.actions:
                self._submit(recording, [action])

    def complete(self, recording: Recording, action: Acted) -> None:
        """An action is complete: scores it now, or with the rest of its transition, or not yet."""
        if self.when == "episode":
            return
        if self.unit == "action":
            self._submit(recording, [action])
            return
        attempt = action.llm.attempt
        actions = [a for llm in attempt.llms for a in llm.actions]
        over = attempt.status not in ("running", "interrupted") or recording.ended is not None
        if over and all(a.complete for a in actions):
            for agent in dict.fromkeys(a.base.agent for a in actions):
                self._submit(recording, [a for a in actions if a.base.agent == agent])

    def _submit(self, recording: Recording, actions: Sequence[Acted]) -> None:
        due = [a for a in actions if not a.submitted and a.known and a.base.error is None and a.base.id not in recording.verdicts]
        if self.coach is None or not due:
            return
        for action in due:
            action.submitted = True
        trace = recording.partial()
        self._start(recording, self._score(recording, trace, due))

    def _start(self, recording: Recording, work: Coroutine[Any, Any, None]) -> None:
        task = self.keep(asyncio.get_running_loop().create_task(work, context=Context()))
        running = self._running.setdefault(recording.id, set())
        running.add(task)
        task.add_done_callback(running.discard)

    async def _score(self, recording: Recording, trace: EpisodeTrace, due: Sequence[Acted]) -> None:
        coach = self.coach
        assert coach is not None

        async def ask() -> Mapping[str, Verdict]:
            verdict = _checked(await coach.score(self._case(trace, due, hindsight=False)))
            return {a.base.id: verdict for a in due}

        async with self._slots:
            await self._ask(recording, [a.base.id for a in due], ask)

    def _case(self, trace: EpisodeTrace, due: Sequence[Acted], *, hindsight: bool) -> Case:
        from ..coach.case import case_for, transition_case

        first = due[0].base
        options: dict[str, Any] = {"environment": self._environment, "reveal_reference": self._reveal, "hindsight": hindsight}
        if self.unit == "action":
            return case_for(trace, first.id, self._cards, **options)
        ids = {a.base.id for a in due}
        mine = tuple(a for a in trace.actions if a.transition_id != first.transition_id or a.id in ids)
        return replace(transition_case(replace(trace, actions=mine), first.transition_id, self._cards, **options), action_id=first.id)

    @property
    def _cards(self) -> tuple[AgentCard, ...]:
        return self._team.cards

    async def finished(self, recording: Recording) -> None:
        """Waits for the verdicts of an episode that is over; in hindsight, has it scored now."""
        for action in recording.actions:
            if action.complete:
                self.complete(recording, action)
        while running := self._running.get(recording.id):
            await asyncio.wait(set(running))
        if self.when == "episode" and self.coach is not None and recording.ended != "interrupted":
            await self._hindsight(recording)

    async def _hindsight(self, recording: Recording) -> None:
        coach = self.coach
        due = [a for a in recording.actions if a.known and a.base.error is None and a.base.id not in recording.verdicts]
        if coach is None or not due:
            return
        groups = [[a] for a in due] if self.unit == "action" else _by_transition(due)
        trace = recording.trace()

        async def ask() -> Mapping[str, Verdict]:
            cases = [self._case(trace, group, hindsight=True) for group in groups]
            given = await score_episode(coach, cases)
            missing = Verdict(None, error="CoachError: the coach gave no verdict for this action", coach=_name(coach))
            out: dict[str, Verdict] = {}
            for group, case in zip(groups, cases, strict=True):
                verdict = given.get(case.action_id)
                out |= {a.base.id: missing if verdict is None else _checked(verdict) for a in group}
            return out

        whole = getattr(coach, "score_episode", None) is not None
        limit = self._timeout_s if whole else self._timeout_s * len(groups)
        async with self._slots:
            await self._ask(recording, [a.base.id for a in due], ask, limit)

    async def _ask(
        self,
        recording: Recording,
        ids: Sequence[str],
        ask: Callable[[], Coroutine[Any, Any, Mapping[str, Verdict]]],
        limit: float | None = None,
    ) -> None:
        limit = limit or self._timeout_s
        started = perf_counter()
        try:
            async with asyncio.timeout(limit) as clock:
                given = await ask()
        except Exception as error:  # noqa: BLE001  a coach is foreign code; its failure is data
            why = f"no verdict within {limit:g} s" if clock.expired() else str(error) or repr(error)
            given = self._no_verdict(recording, ids, type(error).__name__, why)
        took = perf_counter() - started
        for id, verdict in given.items():
            known = replace(verdict, coach=verdict.coach or _name(self.coach), duration_s=verdict.duration_s or took)
            recording.verdicts[id] = known

    def _no_verdict(self, recording: Recording, ids: Sequence[str], type: str, message: str) -> dict[str, Verdict]:
        self.note(Failure("coach", type, message, recording.id, time()))
        return {id: Verdict(None, error=f"{type}: {message}", coach=_name(self.coach)) for id in ids}

    def forget(self, recording: Recording) -> None:
        for task in self._running.pop(recording.id, ()):
            task.cancel()


def _by_transition(actions: Sequence[Acted]) -> list[list[Acted]]:
    groups: dict[tuple[str, str], list[Acted]] = {}
    for action in actions:
        groups.setdefault((action.base.transition_id, action.base.agent), []).append(action)
    return list(groups.values())


def _checked(verdict: object) -> Verdict:
    if not isinstance(verdict, Verdict):
        raise CoachError(f"the coach gave {verdict!r}, which is no Verdict", hint="return mappa_graph.Verdict(score=…)")
    return verdict


def _name(coach: Coach | None) -> str:
    return str(getattr(coach, "name", "") or type(coach).__name__)
