"""Scoring what is already recorded: `score_pending`, and the share of unscored actions at which a run must stop.

An action without a score in the store is pending: its coach failed, ran out of budget, or was never asked. A pass writes each verdict
as soon as it is there, so it can be killed and begun again at any moment and goes on where it stopped. The one thing to know: a
verdict without a score doesn't replace anything; it is written only so that its cause can be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from ..errors import CoachError, ConfigError
from ..record import Action, EpisodeTrace, Verdict
from .base import AgentCard, Case, Coach, score_episode
from .case import Cases

When = Literal["completed", "generated", "episode"]
Unit = Literal["action", "transition"]

_MOST_CAUSES = 100


class Store(Protocol):
    """What a pass needs of a trace store."""

    def traces(self, *, split: str | None = None, iteration: int | None = None) -> Iterator[EpisodeTrace]: ...

    def add_verdicts(self, episode_id: str, verdicts: Mapping[str, Verdict]) -> None: ...


@dataclass(frozen=True, slots=True)
class Pass:
    """What a scoring pass did."""

    episodes: int = 0
    pending: int = 0
    """Actions without a score before it."""
    scored: int = 0
    unscored: int = 0
    calls: float = 0.0
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    usd: float = 0.0
    seconds: float = 0.0
    """Time of all requests added up."""
    causes: Mapping[str, int] | None = None
    """Why there was no score, and how often."""

    def per_episode(self) -> dict[str, float]:
        """Calls, tokens, money and time for one episode."""
        n = max(1, self.episodes)
        return {
            "calls": self.calls / n,
            "tokens": (self.prompt_tokens + self.completion_tokens) / n,
            "usd": self.usd / n,
            "seconds": self.seconds / n,
        }


class UnscoredWatch:
    """Stops a run whose coach gives too few scores: a coach that is down must not look like one that has nothing to say.

    Args:
        most: largest share of unscored actions, 0..1.
        least: actions that must have been seen before it can stop anything.
    """

    def __init__(self, most: float = 0.2, *, least: int = 20) -> None:
        if not 0.0 <= most <= 1.0:
            raise ConfigError(f"the share of unscored actions is {most!r}", hint="give a number in 0..1")
        self.most, self.least = most, least
        self.seen = self.unscored = 0
        self._last = ""

    def add(self, verdict: Verdict | None) -> None:
        """Counts an action. Raises `CoachError` when the share passes the threshold; None is an action that has no verdict at all."""
        self.seen += 1
        if verdict is None or verdict.score is None:
            self.unscored += 1
            self._last = (verdict.error or "") if verdict is not None else "no verdict"
        if self.seen >= self.least and self.unscored > self.most * self.seen:
            raise CoachError(
                f"the coach gave no score for {self.unscored} of {self.seen} actions, more than {self.most:.0%}; last cause: {self._last}",
                hint="mend the coach and score what is pending: `mappa-graph coach RUN`",
            )


async def score_pending(
    store: Store,
    coach: Coach,
    team: Sequence[AgentCard],
    *,
    when: When = "completed",
    unit: Unit = "action",
    environment: str = "",
    reveal_reference: bool = True,
    split: str | None = None,
    iteration: int | None = None,
    concurrency: int = 8,
    watch: UnscoredWatch | None = None,
    again: bool = False,
    nodes: bool = False,
    progress: Callable[[Verdict], Any] | None = None,
) -> Pass:
    """Scores the actions in a store that have no score, and writes each verdict as it comes.

    Args:
        store: a `TraceStore`.
        coach: who scores.
        team: the environment's agents (`environment.team`).
        when: "episode" scores in hindsight; "completed" with what had happened by then; "generated" before tools had answered.
        unit: "transition" gives a node attempt one score, shared by its actions.
        split, iteration: which episodes; default all.
        concurrency: actions (or, in hindsight, episodes) at once.
        watch: stops the pass when too many actions get no score.
        again: also those that have a score already.
        nodes: also node attempts without a marked call: kept for the record by the transition's id, and never trained on.
        progress: called with every verdict.

    Raises `CoachError` if the watch stops it; what was scored by then is in the store.
    """
    if unit == "transition" and when == "generated":
        raise ConfigError("unit 'transition' can't be scored with when 'generated'", hint="use when 'completed' or 'episode'")
    slots = asyncio.Semaphore(concurrency)
    totals = _Totals()
    options: dict[str, Any] = {"environment": environment, "reveal_reference": reveal_reference}

    def case_of(cases: Cases, ids: Sequence[str], *, hindsight: bool = False) -> Case:
        return cases.action(ids[0], hindsight=hindsight) if unit == "action" else cases.attempt(ids, hindsight=hindsight)

    def early(cases: Cases, ids: Sequence[str]) -> Case:
        return as_generated(case_of(cases, ids))

    def keep(trace: EpisodeTrace, found: Sequence[tuple[Sequence[str], Verdict]]) -> None:
        """Writes what came at once, at once."""
        new = {id: verdict for ids, verdict in found for id in ids}
        old = {id: trace.verdicts[id].score for id in new if id in trace.verdicts}
        store.add_verdicts(trace.episode.id, {id: v for id, v in new.items() if v.score is not None or old.get(id) is None})
        for ids, verdict in found:
            totals.add(verdict, len(ids))
            if progress is not None:
                progress(verdict)
        if watch is not None:
            for verdict in new.values():
                watch.add(verdict)

    async def one(trace: EpisodeTrace, action_ids: Sequence[str], make: Callable[[], Case]) -> None:
        # A case holds all steps before it, so those of a long episode must not all wait in memory.
        async with slots:
            keep(trace, [(action_ids, await _asked(coach, make()))])

    async def whole(trace: EpisodeTrace, episode: Cases, wanted: Sequence[str]) -> None:
        async with slots:
            groups = attempts(trace) if unit == "transition" else [[action.id] for action in _in_order(trace)]
            due = set(wanted)
            if getattr(coach, "score_episode", None) is None:
                for group in groups:
                    if ids := [i for i in group if i in due]:
                        keep(trace, [(ids, await _asked(coach, case_of(episode, group, hindsight=True)))])
                return
            cases = [([i for i in ids if i in due], case_of(episode, ids, hindsight=True)) for ids in groups]
            try:
                found = await score_episode(coach, [case for _, case in cases])
            except CoachError as error:
                found = {case.action_id: Verdict(None, error=str(error), coach=coach.name) for _, case in cases}
            left_out = Verdict(None, error="the coach left it out", coach=coach.name)
            keep(trace, [(ids, found.get(case.action_id) or left_out) for ids, case in cases if ids])

    for batch in _batches(store.traces(split=split, iteration=iteration), concurrency):
        jobs = []
        for trace in batch:
            episode = Cases(trace, team, **options)
            for transition in unmarked(trace, again=again) if nodes else ():
                jobs.append(one(trace, [transition], partial(episode.transition, transition)))
            wanted = pending_actions(trace, again=again)
            if not wanted:
                continue
            totals.episodes += 1
            totals.pending += len(wanted)
            if when == "episode":
                jobs.append(whole(trace, episode, wanted))
            elif unit == "transition":
                pending = set(wanted)
                for ids in attempts(trace):
                    if due := [i for i in ids if i in pending]:
                        jobs.append(one(trace, due, partial(case_of, episode, ids)))
            else:
                made = case_of if when == "completed" else early
                jobs += [one(trace, [action_id], partial(made, episode, [action_id])) for action_id in wanted]
        await _together(jobs)
    return totals.result()


def pending_actions(trace: EpisodeTrace, *, again: bool = False) -> list[str]:
    """Ids of an episode's actions that have no score (or of all of them), in order."""
    return [a.id for a in _in_order(trace) if again or a.id not in trace.verdicts or trace.verdicts[a.id].score is None]


def unmarked(trace: EpisodeTrace, *, again: bool = False) -> list[str]:
    """Ids of an episode's node attempts without a marked call that have no score (or of all of them)."""
    acted = {action.transition_id for action in trace.actions}
    scored = {id for id, verdict in trace.verdicts.items() if verdict.score is not None}
    return [t.id for t in trace.transitions if t.id not in acted and (again or t.id not in scored)]


def attempts(trace: EpisodeTrace) -> list[list[str]]:
    """Ids of the actions that share a score where the unit is a transition: those of one agent in one node attempt, in order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for action in _in_order(trace):
        groups.setdefault((action.transition_id, action.agent), []).append(action.id)
    return list(groups.values())


def as_generated(case: Case) -> Case:
    """A case as it was when the model had just answered: no execution, and no file of its own."""
    return Case(
        **{name: getattr(case, name) for name in Case.__dataclass_fields__ if name not in ("executions", "files_after", "after", "outcome")}
    )


def better_actions(traces: Iterable[EpisodeTrace]) -> Iterator[dict[str, Any]]:
    """The better actions that coaches proposed, as preference rows: `{prompt, chosen, rejected, agent, score, action, episode}`.

    `prompt` is the messages the agent saw; `chosen` the proposal, `rejected` what it wrote (thinking included). For supervised
    training take `prompt` and `chosen`.
    """
    for trace in traces:
        for action in sorted(trace.actions, key=lambda a: a.order):
            verdict = trace.verdicts.get(action.id)
            if verdict is None or not verdict.better_action or verdict.better_action == action.output:
                continue
            yield {
                "prompt": [dict(message) for message in action.messages],
                "chosen": verdict.better_action,
                "rejected": action.output,
                "agent": action.agent,
                "score": verdict.score,
                "action": action.id,
                "episode": trace.episode.id,
            }


class _Totals:
    def __init__(self) -> None:
        self.episodes = self.pending = self.scored = self.unscored = 0
        self.usage = dict.fromkeys(("calls", "prompt_tokens", "completion_tokens", "usd"), 0.0)
        self.seconds = 0.0
        self.causes: dict[str, int] = {}

    def add(self, verdict: Verdict, actions: int) -> None:
        if verdict.score is None:
            self.unscored += actions
            cause = verdict.error or "no cause given"
            if cause not in self.causes and len(self.causes) >= _MOST_CAUSES:
                cause = "other causes"  # a cause may name its action: there could be as many as actions
            self.causes[cause] = self.causes.get(cause, 0) + actions
        else:
            self.scored += actions
        for key in self.usage:
            self.usage[key] += verdict.usage.get(key, 0.0)
        self.seconds += verdict.duration_s

    def result(self) -> Pass:
        return Pass(
            episodes=self.episodes,
            pending=self.pending,
            scored=self.scored,
            unscored=self.unscored,
            seconds=self.seconds,
            causes=self.causes,
            **self.usage,
        )


async def _asked(coach: Coach, case: Case) -> Verdict:
    try:
        return await coach.score(case)
    except CoachError as error:
        return Verdict(None, error=str(error), coach=coach.name)


async def _together(jobs: Sequence[Any]) -> None:
    """Runs all; the first failure cancels the rest and is raised by itself."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _batches(traces: Iterable[EpisodeTrace], size: int) -> Iterator[list[EpisodeTrace]]:
    batch: list[EpisodeTrace] = []
    for trace in traces:
        batch.append(trace)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def _in_order(trace: EpisodeTrace) -> list[Action]:
    return sorted(trace.actions, key=lambda action: action.order)
