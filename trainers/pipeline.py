"""Rollouts of iterations, one after the other; with `loop.pipeline`, the next ones run while the trainer works.

Which weights act is fixed by the iteration's number, never by which side was faster. Without the pipeline iteration k acts with version
k-1, the weights that its update starts from. With it, rollouts k+1 begin when update k begins, and update k's weights are published
only after both have ended: iteration 1 acts with version 0, and iteration k with version k-2, one behind. The loss corrects for that by the
importance weight `min(pi_old / pi_engine, cap)`.

A checkpoint of iteration k is written after rollouts k+1 have ended, so the store holds them when a run continues from it, and they are
taken from there, made by the same weights as in a run that was never interrupted. (Episodes that failed are tried again with the
weights of now; and a run that was complete and is given more iterations has nothing ahead: its next rollouts act with its newest weights.)
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from mappa_graph.record import EpisodeTrace

from .batch import Sample

Rollout = Callable[[int], Awaitable[list[EpisodeTrace]]]


class Rollouts:
    """Gives iterations' episodes. Use it as an async context manager; leaving it stops what still runs ahead.

    Args:
        rollout: makes an iteration's episodes.
        last: the last iteration; none is begun after it.
        ahead: whether the next iteration's may run beside the training.
    """

    def __init__(self, rollout: Rollout, *, last: int, ahead: bool) -> None:
        self._rollout = rollout
        self._last = last
        self._ahead = ahead
        self._running: tuple[int, asyncio.Task[list[EpisodeTrace]]] | None = None

    async def take(self, iteration: int) -> list[EpisodeTrace]:
        """An iteration's episodes: those that were made ahead, or made now."""
        running, self._running = self._running, None
        if running is None:
            return await self._rollout(iteration)
        number, task = running
        assert number == iteration, "iterations are taken in order"
        return await task

    def begin(self, iteration: int) -> None:
        """Starts an iteration's rollouts, where they may run ahead."""
        if self._ahead and iteration <= self._last:
            self._running = iteration, asyncio.create_task(self._start(iteration), name=f"rollout {iteration}")

    async def _start(self, iteration: int) -> list[EpisodeTrace]:
        return await self._rollout(iteration)

    async def settle(self) -> None:
        """Waits until nothing runs ahead. A failure is kept for `take`, so that the update it ran beside is not lost with it."""
        if self._running is not None:
            await asyncio.wait([self._running[1]])

    async def __aenter__(self) -> Rollouts:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._running is not None:
            task = self._running[1]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def fresh(
    samples: Sequence[Sample], traces: Sequence[EpisodeTrace], version: int, most: int
) -> tuple[list[Sample], Counter[str], dict[str, dict[str, Any]]]:
    """Leaves out samples whose call was made with weights more than `most` versions older than `version`, the trainer's.

    Returns the samples that stay; how many are `stale`; and by agent `staleness_mean` and `staleness_max`, in versions, over all of its
    samples, with how many were `stale`.
    """
    made: Mapping[tuple[str, str], int] = {(t.episode.id, a): call.version for t in traces for a, call in t.calls.items()}
    kept: list[Sample] = []
    ages: defaultdict[str, list[int]] = defaultdict(list)
    for sample in samples:
        age = version - made[sample.episode, sample.action_id]
        ages[sample.agent].append(age)
        if age <= most:
            kept.append(sample)
    by_agent = {
        agent: {"staleness_mean": sum(old) / len(old), "staleness_max": max(old), "stale": sum(a > most for a in old)}
        for agent, old in ages.items()
    }
    left_out = Counter({"stale": len(samples) - len(kept)}) if len(kept) < len(samples) else Counter()
    return kept, left_out, by_agent
