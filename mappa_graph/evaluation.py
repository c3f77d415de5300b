"""How good a team is on tasks it was not trained on: accuracy, score, pass@k and majority vote with intervals, and its members' behaviour.

The task is the unit of every interval: with several samples a task, the task's own value counts as one observation, so repeated samples
never narrow an interval by themselves. Proportions get Wilson's interval (E. B. Wilson, 1927), other means a bootstrap over tasks from
a fixed seed, both at 95%. An episode that failed counts: as wrong, with score 0, without a vote.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError
from .record import EpisodeTrace
from .rollout import Job, Runner, Sampling
from .sections.loop import ks_of

Z95 = 1.959964
RESAMPLES = 1000
Metrics = Callable[[Sequence[EpisodeTrace]], Mapping[str, float]]


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """The 95% Wilson interval of a proportion `successes / n`; (0, 1) when nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95% percentile interval of the mean of `values`, one a task (Efron, 1979); the same values give the same interval."""
    if not values:
        raise ValueError("there is no value to resample")
    rng = random.Random(seed)
    n = len(values)
    means = sorted(math.fsum(rng.choices(values, k=n)) / n for _ in range(resamples))
    return means[int(0.025 * (resamples - 1))], means[math.ceil(0.975 * (resamples - 1))]


def pass_at(n: int, c: int, k: int) -> float:
    """The chance that one of `k` samples is right, estimated without bias from `c` right ones of `n`: `1 - C(n-c, k) / C(n, k)`.

    Source: Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1. Raises `ValueError` unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right ones of {n} samples can't be estimated: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(votes: Sequence[tuple[str | None, float]]) -> float:
    """Whether the most frequent answer is right: 0..1, from `(answer, success)` of one task's samples.

    An episode without an answer doesn't vote. Of answers that tie each is as likely to be chosen, so the value is their mean; with
    no vote at all it is 0. Answers are equal when their texts are, spaces around them aside.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for answer, success in votes:
        if answer is not None and answer.strip():
            groups[answer.strip()].append(success)
    most = max(map(len, groups.values()), default=0)
    tied = [sum(g) / len(g) for g in groups.values() if len(g) == most]
    return sum(tied) / len(tied) if tied else 0.0


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks, with its 95% interval."""

    value: float
    ci95: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        return {"value": round(self.value, 4), "ci95": [round(x, 4) for x in self.ci95]}


@dataclass(frozen=True)
class Evaluation:
    """Accuracy over `n` tasks. An episode that failed counts as wrong, and is counted in `failures` as well."""

    accuracy: float
    n: int
    ci95: tuple[float, float]
    mode: str
    samples: int
    by_stratum: dict[str, float]
    agents: dict[str, dict[str, Any]]
    failures: dict[str, int] = field(default_factory=dict)
    score: Estimate | None = None
    """Mean of the outcomes' scores, 0..1; None when nothing was observed."""
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    majority: Estimate | None = None
    """None with one sample a task, or where no outcome names an answer."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """The environment's own, and means of the outcomes' metrics over the episodes that have them; None = not a finite number."""
    metrics_ci95: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of means of outcomes' metrics; the environment's own numbers have none."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "accuracy": round(self.accuracy, 4),
            "n": self.n,
            "ci95": [round(x, 4) for x in self.ci95],
            "mode": self.mode,
            "samples": self.samples,
            "by_stratum": {k: round(v, 4) for k, v in self.by_stratum.items()},
            "agents": self.agents,
            "failures": self.failures,
            "score": None if self.score is None else self.score.to_dict(),
            "pass_at": {str(k): v.to_dict() for k, v in self.pass_at.items()},
            "majority": None if self.majority is None else self.majority.to_dict(),
            "metrics": {k: None if v is None else round(v, 6) for k, v in self.metrics.items()},
            "metrics_ci95": {k: [round(x, 6) for x in v] for k, v in self.metrics_ci95.items()},
        }


def measured(evaluation: Mapping[str, Any], name: str) -> float | None:
    """The number called `name` in what `Evaluation.to_dict` gave: accuracy, score, majority, pass@K, or a metric. None = not there.

    A metric of the environment that has one of the first four names can't be asked for: those come first.
    """
    if name == "accuracy":
        return float(evaluation["accuracy"])
    if name in ("score", "majority"):
        part = evaluation.get(name)
    elif name.startswith("pass@"):
        part = (evaluation.get("pass_at") or {}).get(name.removeprefix("pass@"))
    else:
        part = {"value": (evaluation.get("metrics") or {}).get(name)}
    value = None if part is None else part.get("value")
    return None if value is None else float(value)


def measurable(evaluation: Mapping[str, Any]) -> list[str]:
    """Every name that `measured` knows in an evaluation."""
    names = ["accuracy", "score", "majority", *(f"pass@{k}" for k in evaluation.get("pass_at") or {}), *(evaluation.get("metrics") or {})]
    return [name for name in names if measured(evaluation, name) is not None]


def behaviour(traces: Iterable[EpisodeTrace]) -> dict[str, dict[str, Any]]:
    """Per agent: actions, mean completion length in tokens, truncated ones, tool use, how executions ended, error types."""
    rows: dict[str, dict[str, Any]] = {}
    lengths: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        for action in trace.actions:
            row = rows.setdefault(
                action.agent, {"actions": 0, "truncated": 0, "used_tool": 0, "executions": Counter(), "errors": Counter(), "failed": 0}
            )
            row["actions"] += 1
            row["truncated"] += action.finish_reason == "length"
            row["used_tool"] += bool(action.executions)
            row["failed"] += action.error is not None
            for execution in action.executions:
                row["executions"][execution.status] += 1
                if execution.error is not None:
                    row["errors"][execution.error.type] += 1
            call = trace.calls.get(action.id)
            if call is not None:
                lengths[action.agent].append(len(call.completion_ids))
    for agent, row in rows.items():
        row["length_mean"] = round(sum(lengths[agent]) / len(lengths[agent]), 2) if lengths[agent] else None
        row["tool_use"] = round(row.pop("used_tool") / row["actions"], 4)
        row["executions"] = dict(row["executions"])
        row["errors"] = dict(row["errors"])
    return rows


def summarise(
    traces: Sequence[EpisodeTrace], *, mode: str, samples: int = 1, pass_ks: Sequence[int] = (), metrics: Metrics | None = None
) -> Evaluation:
    """The evaluation that a set of finished episodes amounts to.

    Args:
        pass_ks: the k of pass@k; each task must have that many episodes.
        metrics: the environment's own, from the episodes.
    """
    by_task: dict[str, list[EpisodeTrace]] = defaultdict(list)
    failures: Counter[str] = Counter()
    for trace in traces:
        episode = trace.episode
        by_task[episode.task_id].append(trace)
        if episode.status != "done":
            failures[(episode.error or episode.status).split(":")[0]] += 1
    right = {task: [_success(t) for t in group] for task, group in by_task.items()}
    means = {task: sum(v) / len(v) for task, v in right.items()}
    strata: dict[str, list[float]] = defaultdict(list)
    for task, mean in means.items():
        strata[by_task[task][0].episode.stratum].append(mean)
    n, total = len(means), sum(means.values())
    scores = [sum(_value(t) for t in group) / len(group) for group in by_task.values()]
    own, intervals = _metrics(by_task, metrics)
    return Evaluation(
        accuracy=total / n if n else 0.0,
        n=n,
        ci95=wilson(total, n),
        mode=mode,
        samples=samples,
        by_stratum={k: sum(v) / len(v) for k, v in sorted(strata.items()) if k},
        agents=behaviour(traces),
        failures=dict(failures),
        score=Estimate(sum(scores) / n, bootstrap(scores)) if n else None,
        pass_at={k: _proportion([pass_at(len(v), int(sum(v)), k) for v in right.values()]) for k in pass_ks},
        majority=_majority(by_task),
        metrics=own,
        metrics_ci95=intervals,
    )


def _success(trace: EpisodeTrace) -> float:
    return float(trace.episode.outcome is not None and trace.episode.outcome.success)


def _value(trace: EpisodeTrace) -> float:
    return 0.0 if trace.episode.outcome is None else trace.episode.outcome.value


def _proportion(values: Sequence[float]) -> Estimate:
    return Estimate(sum(values) / len(values) if values else 0.0, wilson(sum(values), len(values)))


def _majority(by_task: Mapping[str, Sequence[EpisodeTrace]]) -> Estimate | None:
    votes = {
        task: [(None if t.episode.outcome is None else t.episode.outcome.answer, _success(t)) for t in group]
        for task, group in by_task.items()
    }
    if max(map(len, votes.values()), default=0) < 2 or all(answer is None for group in votes.values() for answer, _ in group):
        return None
    return _proportion([majority(group) for group in votes.values()])


def _metrics(
    by_task: Mapping[str, Sequence[EpisodeTrace]], own: Metrics | None
) -> tuple[dict[str, float | None], dict[str, tuple[float, float]]]:
    """Numbers beside accuracy: means over tasks of the outcomes' metrics, then the environment's own, which win."""
    values: dict[str, list[float]] = defaultdict(list)
    for group in by_task.values():
        found: dict[str, list[float]] = defaultdict(list)
        for trace in group:
            for name, value in (trace.episode.outcome.metrics if trace.episode.outcome else {}).items():
                if math.isfinite(value):
                    found[name].append(float(value))
        for name, numbers in found.items():
            values[name].append(sum(numbers) / len(numbers))
    out: dict[str, float | None] = {name: sum(v) / len(v) for name, v in sorted(values.items())}
    intervals = {name: bootstrap(v) for name, v in sorted(values.items())}
    if own is not None and by_task:
        for name, value in _asked(own, [t for group in by_task.values() for t in group]).items():
            out[name] = value if math.isfinite(value) else None
            intervals.pop(name, None)
    return out, intervals


def _asked(own: Metrics, traces: Sequence[EpisodeTrace]) -> dict[str, float]:
    try:
        given = own(traces)
        return {str(name): float(value) for name, value in given.items()}
    except Exception as error:
        raise ConfigError(
            f"the environment's metrics failed on {len(traces)} episodes: {type(error).__name__}: {error}",
            hint="Environment.metrics takes a list of EpisodeTrace, failed ones among them, and gives a mapping from names to numbers",
        ) from error


async def evaluate(
    runner: Runner,
    *,
    split: str = "heldout",
    tasks: int | None = None,
    samples: int = 1,
    pass_ks: tuple[int, ...] | None = None,
    temperature: float = 0.6,
    max_tokens: int | None = None,
    iteration: int = 0,
    label: str = "",
    progress: Any = None,
) -> tuple[Evaluation, list[EpisodeTrace]]:
    """Runs the first `tasks` tasks of a split, uncoached, and sums them up.

    Episodes are stored under the split `split/mode` (with `label` where several evaluations share an iteration), so that
    a report can show them and none is ever trained on. `pass_ks` None reports pass@1 and pass@`samples`.
    """
    ks = ks_of(samples, pass_ks)
    if ks and ks[-1] > samples:
        raise ConfigError(
            f"pass@{ks[-1]} can't be estimated from {samples} samples a task", hint="raise samples, or lower evaluate.pass_at"
        )
    mode = "greedy" if temperature == 0 else f"sampled@{temperature:g}"
    chosen = runner.environment.split(split)[:tasks]
    name = "/".join(part for part in (split, mode, label) if part)
    jobs = [Job(task, split=name, iteration=iteration, sample=s) for task in chosen for s in range(samples)]
    traces = await runner.run(jobs, Sampling(temperature, max_tokens=max_tokens), progress=progress)
    own = getattr(runner.environment, "metrics", None)
    return summarise(traces, mode=mode, samples=samples, pass_ks=ks, metrics=own), traces
