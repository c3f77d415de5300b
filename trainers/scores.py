"""What is done with a batch's scores before returns are computed, and what is measured of them.

`calibrate` takes the offsets of strata out; `measure` counts what coaching cost and how scores lie by stratum and agent; `Watch` looks
for reward hacking and says each warning once. The one thing to know: `metrics.jsonl` and the store hold the scores as the coach gave
them; only returns are made from calibrated ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mappa_graph.coach import Calibrator, HackingWatch, by_stratum, signs
from mappa_graph.coach.alarms import Signs
from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError
from mappa_graph.record import EpisodeTrace, Verdict

USAGE = ("calls", "prompt_tokens", "completion_tokens", "usd", "cached")


def check_strata(mode: str, tasks: Sequence[Task]) -> None:
    """Raises `ConfigError` if calibration can't take effect: all tasks lie in one stratum."""
    strata = {task.stratum for task in tasks}
    if mode != "none" and len(strata) < 2:
        raise ConfigError(
            f"coach.calibrate {mode!r} can't take effect: all training tasks have the stratum {next(iter(strata), '')!r}",
            hint="give tasks a stratum, Task(id, prompt, stratum='regression'), or set coach.calibrate to none",
        )


def calibrate(traces: Sequence[EpisodeTrace], calibrator: Calibrator) -> list[EpisodeTrace]:
    """The traces with their scores calibrated by the tasks' strata. Discarded actions give no return, and take no part."""
    if calibrator.mode == "none":
        return list(traces)
    places = [
        (i, action.id, verdict)
        for i, trace in enumerate(traces)
        for action in trace.actions
        if action.kept and (verdict := trace.verdicts.get(action.id)) is not None and verdict.score is not None
    ]
    scores = calibrator([v.score for _, _, v in places], [traces[i].episode.stratum for i, _, _ in places])
    verdicts: list[dict[str, Verdict]] = [dict(trace.verdicts) for trace in traces]
    for (i, action_id, verdict), score in zip(places, scores, strict=True):
        verdicts[i][action_id] = replace(verdict, score=score)
    return [replace(trace, verdicts=given) for trace, given in zip(traces, verdicts, strict=True)]


def asked(trace: EpisodeTrace, unit: str) -> list[Verdict]:
    """An episode's verdicts as they were asked for: one that several actions of a transition share is there once."""
    seen: dict[Any, Verdict] = {}
    for action in trace.actions:
        verdict = trace.verdicts.get(action.id)
        if verdict is not None:
            seen.setdefault(action.id if unit == "action" else (action.transition_id, action.agent), verdict)
    return list(seen.values())


def measure(traces: Sequence[EpisodeTrace], unit: str) -> dict[str, Any]:
    """The `coach` part of a row of `metrics.jsonl`: what an iteration's scores cost, how they lie by stratum and by agent, and the signs
    by which hacking is seen. Money in USD, seconds of all requests added up; a number that there is none of is None."""
    verdicts = [v for trace in traces for v in asked(trace, unit)]
    scores: list[float | None] = []
    strata: list[str] = []
    agents: list[str] = []
    outcomes: list[float | None] = []
    for trace in traces:
        for action in trace.actions:
            verdict = trace.verdicts.get(action.id)
            scores.append(None if verdict is None else verdict.score)
            strata.append(trace.episode.stratum)
            agents.append(action.agent)
            outcomes.append(None if trace.episode.outcome is None else trace.episode.outcome.value)
    return {
        "episodes": len(traces),
        **{key: round(sum(v.usage.get(key, 0.0) for v in verdicts), 6) for key in USAGE},
        "seconds": round(sum(v.duration_s for v in verdicts), 3),
        "disagreement": _known(_mean(v.usage["disagreement"] for v in verdicts if "disagreement" in v.usage)),
        "by_stratum": _strata(scores, strata, outcomes),
        "by_agent": _strata(scores, agents, outcomes),
        "signs": {key: _known(value) for key, value in asdict(signs(traces)).items()},
    }


def _strata(scores: Sequence[float | None], names: Sequence[str], outcomes: Sequence[float | None]) -> dict[str, dict[str, Any]]:
    found = by_stratum(scores, names, outcomes)
    return {s.name: {k: _known(v) for k, v in asdict(s).items() if k != "name"} for s in found}


def per_episode(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Calls, tokens, money and time of coaching for one episode, over the `coach` parts of some rows."""
    rows = list(rows)
    episodes = max(1, sum(row["episodes"] for row in rows))
    total = {key: sum(row[key] for row in rows) for key in (*USAGE, "seconds")}
    tokens = total["prompt_tokens"] + total["completion_tokens"]
    each = {"calls": total["calls"], "tokens": tokens, "usd": total["usd"], "seconds": total["seconds"]}
    return {key: round(value / episodes, 6) for key, value in each.items()}


class Watch:
    """Warnings about the scores: of reward hacking over the iterations, and of bias between strata.

    Its memory is the history's rows, so a run that is continued sees what an uninterrupted one would.
    """

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._hacking = HackingWatch()
        self._said: set[tuple[str, str]] = set()
        for row in history:
            if row.get("coach"):
                self.see(row["coach"])

    def see(self, coach: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
        """Takes the `coach` part of a row; returns all alarms of now, and the texts of the warnings that are new."""
        now = Signs(**{key: math.nan if value is None else value for key, value in coach["signs"].items()})
        alarms = [asdict(alarm) for alarm in self._hacking.see(now)]
        found = [(("alarm", a["kind"]), a["message"]) for a in alarms]
        found += [(("bias", name), s["warning"]) for name, s in coach["by_stratum"].items() if s["warning"]]
        new = [text for key, text in found if key not in self._said]
        self._said.update(key for key, _ in found)
        return alarms, new


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def _known(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 6) if math.isfinite(value) else None
