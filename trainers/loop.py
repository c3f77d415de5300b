"""The on-policy loop: roll out, coach, train, publish, again.

`iterate` is the loop; it reads top to bottom. Everything it needs to continue after a crash is in the last checkpoint and the store:
episodes are durable as they end, a checkpoint is renamed into place after each update, and an iteration that was interrupted is run
again from its own episodes, which the store still has.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mappa_graph.coach import Calibrator
from mappa_graph.coach.base import Coach
from mappa_graph.config import RunConfig
from mappa_graph.display import Display
from mappa_graph.environment import Environment, Task
from mappa_graph.errors import CoachError, EpisodeError
from mappa_graph.evaluation import evaluate
from mappa_graph.gateway import Gateway
from mappa_graph.record import EpisodeTrace
from mappa_graph.rollout import Job, Runner, Sampling, failed_share, first_failure
from mappa_graph.store import TraceStore

from .batch import Sample, samples_from_trace
from .checkpoint import prune, save_checkpoint
from .metrics import count_scores, row_of, shuffle_scores, write_metrics
from .publishing import publish
from .scores import Watch, asked, calibrate, measure

if TYPE_CHECKING:
    from .trainer import ReinforceTrainer


@dataclass
class Progress:
    """What a checkpoint holds beside weights: where the run is, and what it has seen."""

    iteration: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    """The rows of `metrics.jsonl`."""
    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    best: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    """State of the coach's running calibration."""

    def to_json(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "history": self.history,
            "wall_s": dict(self.wall_s),
            "best": self.best,
            "calibration": self.calibration,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        wall_s = defaultdict(float, data["wall_s"])
        return cls(data["iteration"], list(data["history"]), wall_s, dict(data["best"]), dict(data.get("calibration", {})))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wall_s[what] += time.perf_counter() - start


@dataclass
class Run:
    """A run's parts, open and wired together."""

    config: RunConfig
    environment: Environment
    coach: Coach
    store: TraceStore
    gateway: Gateway
    runner: Runner
    trainer: ReinforceTrainer
    display: Display
    progress: Progress

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def policies(self) -> list[str]:
        return sorted({a.policy_name for a in self.environment.agents if a.trainable})


async def iterate(run: Run) -> None:
    """The loop. Each turn: roll out and coach, update every agent's weights, checkpoint, publish, evaluate."""
    config, progress = run.config, run.progress
    last = config.train.iterations
    calibrator = Calibrator(config.coach.calibrate)
    calibrator.restore(progress.calibration)
    watch = Watch(progress.history)
    if not progress.history:
        await _record(run, {"iteration": 0, "agents": {}, "rollout": None, "heldout": await _evaluate(run, 0)})
    while progress.iteration < last:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # asked for while something below was not listening
        iteration = progress.iteration + 1
        before = dict(progress.wall_s)

        with progress.timed("rollout"):
            traces = await _rollout(run, iteration)
        # The coach works beside the rollout, on its own thread: its time is counted apart, and is no part of the total.
        progress.wall_s["coach"] += sum(v.duration_s for t in traces for v in asked(t, config.coach.unit))
        samples, left_out = _samples(run, calibrate(traces, calibrator), iteration)
        progress.calibration = calibrator.state()
        with progress.timed("train"):
            if config.train.control == "no_training":
                update = None
            else:
                update = await asyncio.to_thread(run.trainer.update, samples)
        with progress.timed("publish"):
            await publish(run, iteration)

        progress.iteration = iteration
        every = config.evaluate.every
        due = iteration == last or (every and iteration % every == 0)
        heldout = await _evaluate(run, iteration) if due else None
        wall_s = {part: seconds - before.get(part, 0.0) for part, seconds in progress.wall_s.items()}
        versions = run.gateway.versions()
        coach = measure(traces, config.coach.unit)
        coach["alarms"], warnings = watch.see(coach)
        row = row_of(run.environment, versions, iteration, traces, samples, left_out, update, heldout, wall_s)
        await _record(run, {**row, "coach": coach})
        for warning in warnings:
            run.display.note(f"iteration {iteration}: {warning}")


async def _rollout(run: Run, iteration: int) -> list[EpisodeTrace]:
    config = run.config.rollout
    jobs = [
        Job(task, split="train", iteration=iteration, sample=s)
        for task in tasks_of(run.environment.split("train"), config.tasks, iteration, run.config.seed)
        for s in range(config.samples)
    ]
    run.display.status(f"iteration {iteration}: {len(jobs)} episodes")
    sampling = Sampling(config.temperature, config.top_p, config.max_tokens)
    traces = await run.runner.run(jobs, sampling, run.coach, progress=lambda n, m: run.display.progress(n, m, "episodes"))
    share = failed_share(traces)
    if share > config.max_failed_share:
        raise EpisodeError(
            f"iteration {iteration}: {share:.0%} of the episodes failed, more than rollout.max_failed_share {config.max_failed_share:.0%}",
            hint=f"the first: {first_failure(traces)}",
        )
    scored, unscored = count_scores(traces)
    if scored + unscored and unscored / (scored + unscored) > run.config.coach.max_unscored_share:
        first = next((v.error for t in traces for v in t.verdicts.values() if v.score is None), None)
        raise CoachError(
            f"iteration {iteration}: the coach gave no verdict on {unscored} of {scored + unscored} actions, "
            f"a larger share than coach.max_unscored_share {run.config.coach.max_unscored_share:.0%}",
            hint=f"the first cause: {first}. The episodes are kept: mend the coach, score them with `mappa-graph coach {run.folder}`, "
            "and the same command continues from here.",
        )
    return traces


def tasks_of(tasks: Sequence[Task], n: int, iteration: int, seed: int) -> list[Task]:
    """The `n` tasks of an iteration: epochs over all tasks, each in an order of its own, cut into iterations."""
    chosen: list[Task] = []
    position = (iteration - 1) * n
    while len(chosen) < n:
        epoch, offset = divmod(position + len(chosen), len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        chosen.extend(tasks[i] for i in order[offset : offset + n - len(chosen)])
    return chosen


def _samples(run: Run, traces: Sequence[EpisodeTrace], iteration: int) -> tuple[list[Sample], Counter[str]]:
    config = run.config.train
    if config.control == "shuffle_scores":
        traces = shuffle_scores(traces, seed=f"{run.config.seed}/{iteration}")
    samples: list[Sample] = []
    left_out: Counter[str] = Counter()
    for trace in traces:
        found, missing = samples_from_trace(
            trace, gamma=config.gamma, credit=config.credit, outcome_weight=config.outcome_weight, truncated=config.truncated
        )
        samples.extend(found)
        left_out.update(missing)
    return samples, left_out


async def _evaluate(run: Run, iteration: int) -> dict[str, Any]:
    config = run.config.evaluate
    ends = iteration in (0, run.config.train.iterations)
    n = config.tasks if ends else config.between_tasks or config.tasks
    run.display.status(f"evaluating on {n} held-out tasks")
    with run.progress.timed("evaluate"):
        found, _ = await evaluate(
            run.runner,
            split=config.split,
            tasks=n,
            samples=config.samples,
            temperature=config.temperature,
            max_tokens=run.config.rollout.max_tokens,
            iteration=iteration,
            progress=lambda k, m: run.display.progress(k, m, "held-out episodes"),
        )
    return found.to_dict()


async def _record(run: Run, row: dict[str, Any]) -> None:
    """Keeps a row: in the history, in a checkpoint, in `metrics.jsonl`, on the screen."""
    progress, config = run.progress, run.config
    progress.history.append(row)
    heldout = row.get("heldout")
    if heldout and heldout["accuracy"] > progress.best.get("accuracy", -1.0):
        progress.best = {"iteration": row["iteration"], "accuracy": heldout["accuracy"], "n": heldout["n"]}
    root = run.folder / "checkpoints"
    if row["iteration"] % config.checkpoint.every == 0 or row["iteration"] == config.train.iterations:
        with progress.timed("train"):
            await asyncio.to_thread(save_checkpoint, root, row["iteration"], run.trainer, progress.to_json())
            prune(root, config.checkpoint.keep_last, keep=[progress.best["iteration"]] if progress.best else [])
    write_metrics(run.folder / "metrics.jsonl", progress.history)
    run.display.iteration(row)
