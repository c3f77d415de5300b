"""When a run ends before its last iteration: the held-out metric rises no more, or an alarm says stop.

A stop is written into the row of its iteration. The same command on the same folder keeps to it as long as the setting behind it
is what it was; with another (or none) the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mappa_graph.config import RunConfig
from mappa_graph.evaluation import measured
from mappa_graph.sections.loop import EvaluateConfig

from .guards import Alarm


def better(value: float, best: float | None, config: EvaluateConfig, by: float = 0.0) -> bool:
    """Whether a held-out value beats the best one so far by more than `by`."""
    if best is None:
        return True
    return value - best > by if config.best_is == "max" else best - value > by


def stop_of(
    config: RunConfig, history: Sequence[Mapping[str, Any]], row: Mapping[str, Any], alarms: Iterable[Alarm]
) -> dict[str, Any] | None:
    """Why the run ends after `row`, the latest, with `history` before it: `{"by", "message", "setting"}`; None = it goes on."""
    for alarm in alarms:
        if alarm.action == "stop":
            name = f"loop.alarms.{alarm.name}"
            message = f"alarm {alarm.name}: {alarm.message} (threshold {alarm.threshold:g}); set {name}.action to warn to go on"
            return {"by": alarm.name, "message": message, "setting": _setting(config, name)}
    early = config.loop.early_stop
    if early is None or not row.get("heldout"):
        return None
    best, since = None, 0
    values = [measured(r["heldout"], config.evaluate.best_by) for r in (*history, row) if r.get("heldout")]
    for value in values:
        if value is not None and better(value, best, config.evaluate, early.min_delta if best is not None else 0.0):
            best, since = value, 0
        else:
            since += 1
    if since < early.patience or best is None:
        return None
    message = (
        f"early stop: held-out {config.evaluate.best_by} has not got better than {best:.4g} in {since} evaluations; "
        "raise loop.early_stop.patience, or set loop.early_stop to null, to go on"
    )
    return {"by": "early_stop", "message": message, "setting": _setting(config, "loop.early_stop")}


def still_stopped(config: RunConfig, history: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The stop of the last row, if it holds under the config of now."""
    stop = history[-1].get("stop") if history else None
    if stop is None:
        return None
    name = "loop.early_stop" if stop["by"] == "early_stop" else f"loop.alarms.{stop['by']}"
    return dict(stop) if _setting(config, name) == stop["setting"] else None


def _setting(config: RunConfig, name: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in name.split("."):
        value = None if value is None else value.get(part)
    return value
