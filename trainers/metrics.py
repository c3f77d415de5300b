"""What is counted of an iteration and of a run: rows of `metrics.jsonl`, `summary.json`, and the scores' shuffling control."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mappa_graph.environment import Environment
from mappa_graph.evaluation import behaviour, summarise
from mappa_graph.record import EpisodeTrace

from .batch import Sample

if TYPE_CHECKING:
    from .trainer import Update


@dataclass(frozen=True)
class Batch:
    """What an update is made from."""

    samples: Sequence[Sample]
    left_out: Counter[str]
    """How many actions are not in it, by reason."""
    ages: Mapping[str, Mapping[str, float]]
    """By agent, how many versions older than the trainer's the weights were that its samples were made with."""


def count_scores(traces: Sequence[EpisodeTrace]) -> tuple[int, int]:
    """How many actions have a score, and how many were to have one and don't."""
    scored = unscored = 0
    for trace in traces:
        if trace.episode.status != "done":
            continue
        for action in trace.actions:
            verdict = trace.verdicts.get(action.id)
            scored += verdict is not None and verdict.score is not None
            unscored += verdict is None or verdict.score is None
    return scored, unscored


def row_of(
    environment: Environment,
    versions: Mapping[str, int],
    iteration: int,
    traces: Sequence[EpisodeTrace],
    batch: Batch,
    update: Update | None,
) -> dict[str, Any]:
    """One row of `metrics.jsonl`, as far as rollout and update tell it."""
    acted = behaviour(traces)
    agents: dict[str, dict[str, Any]] = {}
    for agent in environment.agents:
        verdicts = [t.verdicts.get(a.id) for t in traces for a in t.actions if a.agent == agent.name]
        scores = [v.score for v in verdicts if v is not None and v.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        spread = (sum((s - mean) ** 2 for s in scores) / len(scores)) ** 0.5 if mean is not None else None
        agents[agent.name] = {
            "score_mean": mean,
            "score_std": spread,
            "scored": len(scores),
            "unscored": len(verdicts) - len(scores),
            "version": versions.get(agent.policy_name, 0),
            **acted.get(agent.name, {"actions": 0}),
            **batch.ages.get(agent.name, {}),
            **{k: v for k, v in (update.metrics if update else {}).get(agent.name, {}).items() if k not in {"actions"}},
        }
    rollout = summarise(traces, mode="rollout")
    done = [t for t in traces if t.episode.outcome is not None]
    right = sum(t.episode.outcome.success for t in done if t.episode.outcome is not None)
    return {
        "iteration": iteration,
        "agents": agents,
        "rollout": {
            "episodes": len(traces),
            "accuracy": right / len(traces) if traces else 0.0,
            "failures": rollout.failures,
            "by_stratum": rollout.by_stratum,
            "score": None if rollout.score is None else round(rollout.score.value, 4),
            "left_out": dict(batch.left_out),
        },
        "refused": dict(update.refused) if update else {},
        "tokens": {"trained": update.tokens if update else 0, "retokenised": retokenised(traces, batch.samples)},
    }


def retokenised(traces: Sequence[EpisodeTrace], samples: Sequence[Sample]) -> int:
    """How many trained tokens are not, one for one, the ids that the engine gave for that very call. Measured; to be 0."""
    calls = {(t.episode.id, action): call for t in traces for action, call in t.calls.items()}
    wrong = 0
    for sample in samples:
        call = calls.get((sample.episode, sample.action_id))
        theirs = () if call is None else tuple(call.prompt_ids) + tuple(call.completion_ids)
        ours = tuple(sample.prompt_ids) + tuple(sample.completion_ids)
        wrong += 0 if ours == theirs else len(sample.completion_ids)
    return wrong


def shuffle_scores(traces: Sequence[EpisodeTrace], *, seed: str) -> list[EpisodeTrace]:
    """The control of an experiment: each agent's scores permuted among its actions of the batch, so that the scores' distribution
    by agent stays and their meaning goes."""
    where: dict[str, list[tuple[int, str]]] = {}
    for i, trace in enumerate(traces):
        for action in trace.actions:
            verdict = trace.verdicts.get(action.id)
            if verdict is not None and verdict.score is not None:
                where.setdefault(action.agent, []).append((i, action.id))
    moved: list[dict[str, Any]] = [dict(t.verdicts) for t in traces]
    for agent, places in sorted(where.items()):
        order = list(places)
        random.Random(f"{seed}/{agent}").shuffle(order)
        for (i, action_id), (j, other) in zip(places, order, strict=True):
            moved[i][action_id] = traces[j].verdicts[other]
    return [replace(t, verdicts=v) for t, v in zip(traces, moved, strict=True)]


def plain(data: Any) -> Any:
    """The data with None for every number that is not finite: JSON has no word for it."""
    if isinstance(data, Mapping):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def write_metrics(path: Path, history: Sequence[Mapping[str, Any]]) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(row) + "\n" for row in history), encoding="utf-8")
    aside.replace(path)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
