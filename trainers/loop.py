"""The on-policy loop: roll out, coach, train, publish, again.

`iterate` is the loop; it reads top to bottom. Everything it needs to continue after a crash is in the last checkpoint and the store:
episodes are durable as they end, a checkpoint is renamed into place after each update, and an iteration that was interrupted is run
again from its own episodes, which the store still has.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mappa_graph.coach import Calibrator
from mappa_graph.coach.base import Coach
from mappa_graph.config import RunConfig
from mappa_graph.display import Display
from mappa_graph.environment import Environment
from mappa_graph.errors import CoachError, ConfigError, EpisodeError
from mappa_graph.evaluation import evaluate, measurable, measured
from mappa_graph.gateway import Gateway
from mappa_graph.record import EpisodeTrace
from mappa_graph.rollout import Job, Runner, Sampling, failed_share, first_failure
from mappa_graph.store import TraceStore

from .batch import Sample, samples_from_trace
from .checkpoint import prune, save_checkpoint
from .guards import Alarm, Guard, keep_refused, refused_steps
from .metrics import Batch, count_scores, plain, row_of, shuffle_scores, write_metrics
from .pipeline import Rollouts, fresh
from .publishing import publish
from .sampling import tasks_of
from .scores import Watch, asked, calibrate, measure
from .stopping import better, still_stopped, stop_of
from .trackers import Trackers

if TYPE_CHECKING:
    from .trainer import ReinforceTrainer, Update

T = TypeVar("T")


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
    trackers: Trackers
    models: Mapping[str, Path]
    """Folder of each trained policy's first weights."""
    thread: ThreadPoolExecutor
    """One thread, for all that computes with the trainer."""

    async def on_thread(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Runs `work` on the trainer's thread.

        Always the same: what a thread has freed, the C library keeps for that thread, and the memory of an update, let go of on several
        threads in turn, would be held several times.
        """
        return await asyncio.get_running_loop().run_in_executor(self.thread, functools.partial(work, *args, **options))

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def policies(self) -> list[str]:
        return sorted({a.policy_name for a in self.environment.agents if a.trainable})


class Watches:
    """What looks at each row: the coach's scores for bias and hacking, the updates for alarms."""

    def __init__(self, config: RunConfig, history: Sequence[Mapping[str, Any]]) -> None:
        self._unit = config.coach.unit
        self._scores, self._updates = Watch(history), Guard(config.loop.alarms, history)

    def see(self, row: dict[str, Any], traces: Sequence[EpisodeTrace]) -> tuple[list[Alarm], list[str]]:
        """Puts what it sees into the row; returns the alarms about updates that are on, and what has to be said now."""
        row["coach"] = measure(traces, self._unit)
        row["coach"]["alarms"], warnings = self._scores.see(row["coach"])
        alarms, new = self._updates.see(row)
        row["alarms"] = [asdict(alarm) for alarm in alarms]
        return alarms, [*warnings, *(f"alarm {alarm.name}: {alarm.message}" for alarm in new)]


async def iterate(run: Run) -> None:
    """The loop. Each turn: roll out and coach, update every agent's weights, publish, evaluate, checkpoint."""
    config, progress = run.config, run.progress
    calibrator = Calibrator(config.coach.calibrate)
    calibrator.restore(progress.calibration)
    watches = Watches(config, progress.history)
    stop = still_stopped(config, progress.history)
    if not progress.history:
        await _record(run, {"iteration": 0, "agents": {}, "rollout": None, "heldout": await _evaluate(run, 0, final=True)})
    rollout = functools.partial(_rollout, run)
    async with Rollouts(rollout, last=config.train.iterations, ahead=config.loop.pipeline) as rollouts:
        while progress.iteration < config.train.iterations and stop is None:
            _heed_cancelling()
            iteration = progress.iteration + 1
            before = dict(progress.wall_s)

            with progress.timed("rollout"):
                traces = await rollouts.take(iteration)
            rollouts.begin(iteration + 1)
            # The coach works beside the rollout, on its own thread: its time is counted apart, and is no part of the total.
            progress.wall_s["coach"] += sum(v.duration_s for t in traces for v in asked(t, config.coach.unit))
            batch = _batch(run, calibrate(traces, calibrator), iteration)
            progress.calibration = calibrator.state()
            with progress.timed("train"):
                update = await _update(run, batch, iteration)
            with progress.timed("rollout"):
                await rollouts.settle()
            with progress.timed("publish"):
                await publish(run, iteration)

            progress.iteration = iteration
            row = row_of(run.environment, run.gateway.versions(), iteration, traces, batch, update)
            row["heldout"] = await _evaluate(run, iteration) if _due(config, iteration) else None
            alarms, news = watches.see(row, traces)
            stop = stop_of(config, progress.history, row, alarms)
            if stop is not None:
                row["stop"], row["heldout"] = stop, await _evaluate(run, iteration, final=True)
            row["wall_s"] = {part: round(seconds - before.get(part, 0.0), 3) for part, seconds in progress.wall_s.items()}
            await _record(run, row)
            for text in news:
                run.display.note(f"iteration {iteration}: {text}")
    if stop is not None:
        run.display.note(f"the run ended after iteration {progress.iteration}: {stop['message']}")


def _heed_cancelling() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError  # asked for while something below was not listening


async def _rollout(run: Run, iteration: int) -> list[EpisodeTrace]:
    config = run.config.rollout
    tasks = tasks_of(run.environment.split("train"), config.tasks, iteration, run.config.seed, run.config.loop)
    jobs: list[Job] = []
    drawn: Counter[str] = Counter()
    for task in tasks:  # a task that is drawn twice gets other samples the second time
        offset = drawn[task.id] * config.samples
        jobs += [Job(task, split="train", iteration=iteration, sample=offset + s) for s in range(config.samples)]
        drawn[task.id] += 1
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


def _batch(run: Run, traces: Sequence[EpisodeTrace], iteration: int) -> Batch:
    """What an update is made from. The trainer's weights are of version `iteration - 1`."""
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
    version = 0 if config.control == "no_training" else iteration - 1
    kept, stale, ages = fresh(samples, traces, version, run.config.loop.max_staleness)
    left_out.update(stale)
    return Batch(kept, left_out, ages)


async def _update(run: Run, batch: Batch, iteration: int) -> Update | None:
    """The update; a batch of which it refused a step is kept for `mappa-graph replay`."""
    if run.config.train.control == "no_training":
        return None
    update = await run.on_thread(run.trainer.update, batch.samples)
    if update.refused:
        before = run.folder / "checkpoints" / f"step-{iteration - 1:08d}"
        folder = await run.on_thread(
            keep_refused,
            run.folder / "refused",
            iteration,
            batch.samples,
            update.refused,
            checkpoint=iteration - 1 if before.is_dir() else None,
            models=run.models,
            settings=run.config.dump(),
            keep=run.config.loop.keep_refused,
            save=run.trainer.save,
        )
        why = "; ".join(f"{policy}: {reason}" for policy, reason in sorted(update.refused.items()))
        run.display.note(f"iteration {iteration}: refused ({why}). The batch is in {folder}; look into it: mappa-graph replay {run.folder}")
    return update


def _due(config: RunConfig, iteration: int) -> bool:
    every = config.evaluate.every
    return iteration == config.train.iterations or bool(every and iteration % every == 0)


async def _evaluate(run: Run, iteration: int, *, final: bool = False) -> dict[str, Any]:
    """Held-out evaluation: at a run's ends on all its tasks, else on `between_tasks`. An episode that was run already is not run again."""
    config = run.config.evaluate
    ends = final or iteration == run.config.train.iterations
    n = config.tasks if ends else config.between_tasks or config.tasks
    run.display.status(f"evaluating on {n} held-out tasks")
    with run.progress.timed("evaluate"):
        found, _ = await evaluate(
            run.runner,
            split=config.split,
            tasks=n,
            samples=config.samples,
            pass_ks=config.pass_at,
            temperature=config.temperature,
            max_tokens=run.config.rollout.max_tokens,
            iteration=iteration,
            progress=lambda k, m: run.display.progress(k, m, "held-out episodes"),
        )
    return found.to_dict()


def _choose_best(run: Run, row: Mapping[str, Any]) -> bool:
    """Whether the row's held-out metric is the best so far; remembers it. Raises `ConfigError` where there is no such metric."""
    config, best, heldout = run.config.evaluate, run.progress.best, row.get("heldout")
    if not heldout:
        return False
    value = measured(heldout, config.best_by)
    if value is None:
        # With no metric at all, the first weights may just never have got far enough to be measured.
        if not run.progress.history and heldout["metrics"]:
            raise ConfigError(
                f"evaluate.best_by {config.best_by!r} is not what the held-out evaluation measures",
                hint=f"it measures: {', '.join(measurable(heldout))}",
            )
        run.display.note(f"iteration {row['iteration']}: the evaluation has no {config.best_by}, by which the best checkpoint is chosen")
        return False
    if not better(value, best.get("value"), config):
        return False
    about = {"by": config.best_by, "is": config.best_is, "value": value, "accuracy": heldout["accuracy"], "n": heldout["n"]}
    run.progress.best = {"iteration": row["iteration"], **about}
    return True


async def _record(run: Run, row: dict[str, Any]) -> None:
    """Keeps a row: in the history, in a checkpoint, in `metrics.jsonl`, in the trackers, on the screen."""
    progress, config = run.progress, run.config
    row = plain(row)
    is_best = _choose_best(run, row)
    progress.history.append(row)
    root = run.folder / "checkpoints"
    at = row["iteration"]
    if is_best or "stop" in row or at % config.checkpoint.every == 0 or at == config.train.iterations:
        with progress.timed("train"):
            await run.on_thread(save_checkpoint, root, at, run.trainer, progress.to_json())
            kept = [progress.best["iteration"]] if progress.best else []
            prune(root, config.checkpoint.keep_last, keep=[*kept, *refused_steps(run.folder / "refused")])
    write_metrics(run.folder / "metrics.jsonl", progress.history)
    run.trackers.log(row)
    run.display.iteration(row)
