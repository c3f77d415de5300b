"""How good a team is on tasks it was not trained on: accuracy with an interval, and how its members behave.

The interval is Wilson's (E. B. Wilson, 1927), at 95%, over tasks: with several samples a task, the task's mean counts as one
observation, so repeated samples never narrow it by themselves.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .record import EpisodeTrace
from .rollout import Job, Runner, Sampling

Z95 = 1.959964


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """The 95% Wilson interval of a proportion `successes / n`; (0, 1) when nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


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
        }


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


def summarise(traces: Sequence[EpisodeTrace], *, mode: str, samples: int = 1) -> Evaluation:
    """The evaluation that a set of finished episodes amounts to."""
    by_task: dict[str, list[float]] = defaultdict(list)
    stratum_of: dict[str, str] = {}
    failures: Counter[str] = Counter()
    for trace in traces:
        episode = trace.episode
        by_task[episode.task_id].append(float(episode.outcome is not None and episode.outcome.success))
        stratum_of[episode.task_id] = episode.stratum
        if episode.status != "done":
            failures[(episode.error or episode.status).split(":")[0]] += 1
    means = {task: sum(v) / len(v) for task, v in by_task.items()}
    strata: dict[str, list[float]] = defaultdict(list)
    for task, mean in means.items():
        strata[stratum_of[task]].append(mean)
    n, total = len(means), sum(means.values())
    return Evaluation(
        accuracy=total / n if n else 0.0,
        n=n,
        ci95=wilson(total, n),
        mode=mode,
        samples=samples,
        by_stratum={k: sum(v) / len(v) for k, v in sorted(strata.items()) if k},
        agents=behaviour(traces),
        failures=dict(failures),
    )


async def evaluate(
    runner: Runner,
    *,
    split: str = "heldout",
    tasks: int | None = None,
    samples: int = 1,
    temperature: float = 0.6,
    max_tokens: int | None = None,
    iteration: int = 0,
    label: str = "",
    progress: Any = None,
) -> tuple[Evaluation, list[EpisodeTrace]]:
    """Runs the first `tasks` tasks of a split, uncoached, and sums them up.

    Episodes are stored under the split `split/mode` (with `label` where several evaluations share an iteration), so that
    a report can show them and none is ever trained on.
    """
    mode = "greedy" if temperature == 0 else f"sampled@{temperature:g}"
    chosen = runner.environment.split(split)[:tasks]
    name = "/".join(part for part in (split, mode, label) if part)
    jobs = [Job(task, split=name, iteration=iteration, sample=s) for task in chosen for s in range(samples)]
    traces = await runner.run(jobs, Sampling(temperature, max_tokens=max_tokens), progress=progress)
    return summarise(traces, mode=mode, samples=samples), traces
