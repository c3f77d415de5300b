"""`CoachCallback`: records what a LangGraph app does, and has each agent's actions scored while the app goes on.

Attach it to any run: `config={"callbacks": [callback]}`. One callback serves any number of runs at once. It only copies what the events
carry; building the record, scoring and saving are a thread of their own (`mappa_graph.capture`), so the app neither waits for a coach
nor fails with one. A callback that can't record something counts it in `failures`, `unknown` or `orphans`: look at these first
when something seems to be missing.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from .agent import Agent
from .capture.judge import Judge, Unit, When
from .capture.structure import Structure
from .capture.tap import Tap
from .capture.team import Team
from .capture.worker import Begun, Worker
from .coach.base import AgentCard, Coach
from .errors import ConfigError
from .record import Episode, EpisodeStatus, EpisodeTrace, Outcome
from .store import TraceStore


class CoachCallback(Tap):
    """A LangChain callback handler for LangGraph apps.

    Args:
        coach: scores actions; None records only.
        store: where episodes are saved, a `TraceStore` or the path of one; None keeps a trace only until `finish` has returned it.
        agents: who acts: a list, or a mapping from globs of node paths (`"planner/**"`) for models that can't be marked.
        when: an action is scored once its tools have answered ("completed"), when its model has ("generated"), or in hindsight,
            when its episode is over and graded ("episode").
        unit: what gets one score: each action, or all that an agent did in one node attempt ("transition").
        environment: the name that a coach is shown and that episodes nobody began are stored with.
        team: the team as the coach is told of it; default: `agents`, and those that marks name.
        coach_sees_reference: whether the coach may see the task's reference.
        concurrency: how many verdicts are asked for at once.
        coach_timeout_s: for one verdict; an action whose verdict does not come in time has none, and why is recorded.
        graph: the compiled `StateGraph` that runs, for exact parents where nodes run side by side on branches of unequal length: no
            event tells of a static edge. Without it such a node follows all nodes of the step before that named no other.

    Attributes:
        failures: handler failures by type.
        unknown: calls that no agent could be found for, by node path and model: observed, neither scored nor trained on.
        orphans: model calls that no run of a graph could be found for.
    """

    def __init__(
        self,
        coach: Coach | None = None,
        *,
        store: TraceStore | str | Path | None,
        agents: Mapping[str, Agent] | Sequence[Agent] | None = None,
        when: When = "completed",
        unit: Unit = "action",
        environment: str = "",
        team: Sequence[AgentCard] = (),
        coach_sees_reference: bool = True,
        concurrency: int = 16,
        coach_timeout_s: float = 120.0,
        graph: Any | None = None,
    ) -> None:
        if when not in get_args(When):
            raise ConfigError(f"when={when!r} is not a time to coach", hint=f"one of {', '.join(get_args(When))}")
        if unit not in get_args(Unit):
            raise ConfigError(f"unit={unit!r} is not a unit to score", hint=f"one of {', '.join(get_args(Unit))}")
        if when == "generated" and unit == "transition":
            raise ConfigError('unit="transition" can\'t take effect with when="generated"', hint='use when="completed"')
        if concurrency < 1 or coach_timeout_s <= 0:
            raise ConfigError(f"concurrency={concurrency!r}, coach_timeout_s={coach_timeout_s!r}: both must be above zero")
        if coach is not None and not callable(getattr(coach, "score", None)):
            raise ConfigError(f"coach {coach!r} has no score method", hint="a coach has `async def score(case) -> Verdict`")
        known = Team(agents, team)
        self._owns_store = isinstance(store, str | Path)
        self.store = TraceStore(store) if isinstance(store, str | Path) else store
        judge = Judge(
            coach,
            known,
            when=when,
            unit=unit,
            environment=environment,
            coach_sees_reference=coach_sees_reference,
            concurrency=concurrency,
            timeout_s=coach_timeout_s,
        )
        # The worker's thread must not keep the callback alive.
        me = weakref.ref(self)

        def release(root: Any) -> None:
            tap = me()
            if tap is not None:
                tap.release(root)

        def failed(where: str, error: BaseException) -> None:
            tap = me()
            if tap is not None:
                tap._fail(where, error)

        self._worker = Worker(known, Structure(graph), judge, self.store, environment, release, failed)
        judge.note = self._worker.note
        super().__init__(self._worker.wake)
        self._worker.start(self)
        self._stop = weakref.finalize(self, self._worker.stop)

    def begin(self, episode: Episode) -> None:
        """Tells what is known of a run before it starts; its `run_id` in the config is `UUID(episode.id)`. From any thread.

        An episode that was begun is saved by `finish`, not by itself.
        """
        self.events.append(Begun(episode))
        self._wake()

    async def finish(
        self, episode_id: str, outcome: Outcome | None = None, status: EpisodeStatus | None = None, error: str | None = None
    ) -> EpisodeTrace:
        """Waits for the episode's verdicts, saves it in one transaction, and lets go of it.

        `status` and `error` default to how the run ended. The trace's `calls` are those that the store has. Raises `EpisodeError` for
        an episode that was neither begun nor seen, `StoreError` when it can't be saved.
        """
        return await asyncio.wrap_future(self._worker.submit(lambda: self._worker.finish(episode_id, outcome, status, error)))

    def forget(self, episode_id: str) -> None:
        """Drops an episode unsaved."""

        async def drop() -> None:
            self._worker.forget(episode_id)

        self._worker.submit(drop)

    async def drain(self) -> None:
        """Waits until all runs that have ended, and that `begin` did not announce, are scored and saved."""
        await asyncio.wrap_future(self._worker.submit(lambda: self._worker.drain(False)))

    def close(self) -> None:
        """Scores and saves all that is held, runs that have not ended included (as cancelled), and stops. Blocks until done."""
        if self._worker.running:
            self._worker.submit(lambda: self._worker.drain(True)).result()
        self._closed()

    async def aclose(self) -> None:
        """`close` for async code."""
        if self._worker.running:
            await asyncio.wrap_future(self._worker.submit(lambda: self._worker.drain(True)))
        self._closed()

    def _closed(self) -> None:
        self._stop()
        if self._owns_store and self.store is not None:
            self.store.close()

    @property
    def unknown(self) -> Counter[str]:
        return self._worker.team.unknown

    @property
    def orphans(self) -> int:
        return self._worker.orphans

    @property
    def agents_seen(self) -> Counter[str]:
        """Calls by agent: one that is missing here never acted, or its mark did not take effect."""
        return self._worker.team.acted

    async def __aenter__(self) -> CoachCallback:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __enter__(self) -> CoachCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
