"""How good a team is over many runs: success rate and the fair metrics, by kind of task, with intervals.

A metric over the successful runs alone makes a team look better the more of its hard runs fail. The *fair* metrics are over all runs: a
failed one is charged accuracy 0.5 (chance), F1 0, and an RMSE and MAE of 50% of the target's range (the MAPPA paper, arXiv 2601.23228,
DSBench). Of R runs, S the successful ones:

    success_rate      = |S| / R
    fair_accuracy     = mean over classification runs of (accuracy_r if r in S else 0.5)
    fair_f1           = mean over classification runs of (f1_r if r in S else 0)
    fair_rmse_percent = mean over regression runs of (100 rmse_r / (max y - min y) if r in S else 50), fair_mae_percent likewise
    fair_score        = mean over the kinds there are of (mean over the kind's runs of `scoring.quality`, a failed run's being 0)

`fair_score` is in 0..1, higher is better, and weighs classification and regression alike however many runs each has: the number to choose a
checkpoint by. A percentage is not capped in the fair metrics (a valid run may do worse than a failed one), in `fair_score` it is at 50.

Intervals are 95%: Wilson's for the rate, and for means a seeded percentile bootstrap. Both resample tasks, not runs: several runs of one
task are one observation, as they are anything but independent.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mappa_graph.errors import ConfigError
from mappa_graph.evaluation import wilson
from mappa_graph.record import EpisodeTrace, Outcome

from .grading import reason_name
from .scoring import FAILED, quality

KINDS = ("classification", "regression")
FAIR = {"classification": ("accuracy", "f1"), "regression": ("rmse_percent", "mae_percent")}
SURVIVORS = {
    "classification": ("accuracy", "f1", "roc_auc"),
    "regression": ("mae", "rmse", "mae_percent", "rmse_percent"),
}
RESAMPLES = 1000


def summarise(
    outcomes_by_task: Mapping[str, Sequence[Outcome | None]],
    kinds: Mapping[str, str] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """The summary of all runs.

    Args:
        outcomes_by_task: task id -> the outcome of each of its runs; None for a run that was never graded (a crash), which failed.
        kinds: task id -> "classification" or "regression"; tasks of neither kind count in the success rate alone. Without it a task's
            kind is told from its successful runs, and one that never succeeded is a `ConfigError`: leaving it out would flatter the team.

    Returns:
        `runs`, `tasks`, `success_rate`, `fair_score`, and `reasons` (how often each reason occurred). Under `classification` and
        `regression`, where there are such runs: `runs`, `tasks`, `success_rate`, the kind's `fair_…` metrics (which the top level repeats),
        `fair_score`, and `successful`, the means over its successful runs alone and their number `n`. Beside every rate and fair metric
        `<name>_ci95`, a (low, high) pair.
    """
    tasks = {name: list(runs) for name, runs in outcomes_by_task.items() if len(runs)}
    every = [run for runs in tasks.values() for run in runs]
    out: dict[str, Any] = {"runs": len(every), "tasks": len(tasks), **_rate(tasks)}
    out["reasons"] = dict(Counter(reason_name(run) for run in every).most_common())
    kind_of = {name: _kind(name, runs, kinds) for name, runs in tasks.items()}
    by_kind = {kind: {name: runs for name, runs in tasks.items() if kind_of[name] == kind} for kind in KINDS}
    for kind, chosen in by_kind.items():
        if chosen:
            part = _of_kind(kind, chosen, seed, resamples)
            out[kind] = part
            out.update({key: value for key, value in part.items() if key.startswith("fair_") and not key.startswith("fair_score")})
    present = [kind for kind in KINDS if kind in out]
    if present:
        out["fair_score"] = sum(out[kind]["fair_score"] for kind in present) / len(present)
        means = [[_mean([_quality(kind, run) for run in runs]) for runs in by_kind[kind].values()] for kind in present]
        out["fair_score_ci95"] = _bootstrap(means, seed, resamples)
    return out


def per_task(outcomes_by_task: Mapping[str, Sequence[Outcome | None]]) -> dict[str, dict[str, Any]]:
    """One row a task: `runs`, `success_rate`, `score` (mean `Outcome.value`), `reasons`, and the mean of every metric that all its
    successful runs have, the competition's own (`competition`) among them. That one is never averaged over tasks, as its units differ."""
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in outcomes_by_task.items():
        if not runs:
            continue
        good = [run.metrics for run in runs if run is not None and run.success]
        common = set(good[0]).intersection(*good) if good else set()
        rows[name] = {
            "runs": len(runs),
            "success_rate": len(good) / len(runs),
            "score": _mean([run.value if run is not None else 0.0 for run in runs]),
            "reasons": dict(Counter(reason_name(run) for run in runs).most_common()),
            **{measure: _mean([metrics[measure] for metrics in good]) for measure in sorted(common)},
        }
    return rows


def environment_metrics(traces: Sequence[EpisodeTrace]) -> dict[str, float]:
    """The summary of an evaluation's episodes with flat names, e.g. `fair_f1`, `regression/success_rate`, `classification/fair_f1_low`.

    The kind is the episode's stratum. An episode without an outcome, or that did not end, is a failed run.
    """
    outcomes: dict[str, list[Outcome | None]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for trace in traces:
        outcomes[trace.episode.task_id].append(trace.episode.outcome if trace.episode.status == "done" else None)
        kinds[trace.episode.task_id] = trace.episode.stratum
    return flat(summarise(outcomes, kinds))


def flat(summary: Mapping[str, Any]) -> dict[str, float]:
    """A summary as name -> number: a kind's values under "classification/…", intervals as `_low` and `_high`, reasons as "reasons/…"."""
    out: dict[str, float] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            out.update({f"{name}/{inner}": number for inner, number in flat(value).items()})
        elif isinstance(value, tuple):
            stem = name.removesuffix("_ci95")
            out[f"{stem}_low"], out[f"{stem}_high"] = float(value[0]), float(value[1])
        else:
            out[name] = float(value)
    return out


def _kind(name: str, runs: Sequence[Outcome | None], kinds: Mapping[str, str] | None) -> str:
    if kinds is not None and kinds.get(name):
        return kinds[name]
    seen = {measure for run in runs if run is not None and run.success for measure in run.metrics}
    for kind in KINDS:
        if set(FAIR[kind]) <= seen:
            return kind
    if kinds is None:
        raise ConfigError(
            f"no run of task {name!r} tells whether it is classification or regression", hint="say so: summarise(…, kinds={…})"
        )
    return ""


def _of_kind(kind: str, tasks: Mapping[str, Sequence[Outcome | None]], seed: int, resamples: int) -> dict[str, Any]:
    every = [run for runs in tasks.values() for run in runs]
    out: dict[str, Any] = {"runs": len(every), "tasks": len(tasks), **_rate(tasks)}
    for name in FAIR[kind]:
        out[f"fair_{name}"] = _mean([_charged(name, run) for run in every])
        out[f"fair_{name}_ci95"] = _bootstrap([_weighted(tasks, name)], seed, resamples)
    out["fair_score"] = _mean([_quality(kind, run) for run in every])
    out["fair_score_ci95"] = _bootstrap([[_mean([_quality(kind, run) for run in runs]) for runs in tasks.values()]], seed, resamples)
    good = [run for run in every if _ok(run)]
    means: dict[str, float] = {"n": len(good)}
    for name in SURVIVORS[kind]:
        values = [run.metrics[name] for run in good if run is not None and name in run.metrics]
        if values:
            means[name] = _mean(values)
    out["successful"] = means
    return out


def _weighted(tasks: Mapping[str, Sequence[Outcome | None]], name: str) -> list[float]:
    return [_mean([_charged(name, run) for run in runs]) for runs in tasks.values()]


def _ok(run: Outcome | None) -> bool:
    return run is not None and run.success


def _charged(name: str, run: Outcome | None) -> float:
    return run.metrics[name] if run is not None and run.success and name in run.metrics else FAILED[name]


def _quality(kind: str, run: Outcome | None) -> float:
    return quality(kind, {name: _charged(name, run) for name in FAIR[kind]})


def _rate(tasks: Mapping[str, Sequence[Outcome | None]]) -> dict[str, Any]:
    """Success over all runs; the interval is over tasks, each with the share of its runs that succeeded."""
    every = [_ok(run) for runs in tasks.values() for run in runs]
    shares = [_mean([float(_ok(run)) for run in runs]) for runs in tasks.values()]
    return {"success_rate": _mean([float(ok) for ok in every]) if every else 0.0, "success_rate_ci95": wilson(sum(shares), len(shares))}


def _bootstrap(groups: Sequence[Sequence[float]], seed: int, resamples: int) -> tuple[float, float]:
    """95% percentile interval (Efron, 1979) of the mean of the groups' means; each group is resampled by itself (stratified)."""
    rng = random.Random(seed)
    means = sorted(_mean([_mean(rng.choices(group, k=len(group))) for group in groups]) for _ in range(resamples))
    return means[int(0.025 * (resamples - 1))], means[round(0.975 * (resamples - 1))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
