"""From a submission's text to an outcome, outside the sandbox. Deterministic: no model, no coach.

A run succeeds if its submission is valid: matched by the id column, every id exactly once, right columns, known labels or finite numbers.
How good its predictions are is `Outcome.score` (`scoring.quality`, 0..1) and `Outcome.metrics`. A run that fails has score 0, no metrics,
and a reason that starts with one of `submission.REASONS`; what it is charged is for `metrics` to say. Prose is never searched for
predictions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mappa_graph.environment import Task
from mappa_graph.errors import TaskError
from mappa_graph.record import Outcome

from .answers import Answers, resolve
from .competition import find
from .scoring import score
from .submission import REASONS, Form, RefusedError, read

VALID = "valid"
"""How the reason of a successful run starts."""


def grade_submission(task: Task, text: str | bytes | None) -> Outcome:
    """The grade of `submission.csv`, given its text (or bytes), or None where there is no such file.

    Safe for any text, in any thread. Raises `TaskError` where the task is none of DSBench's or its answers are gone, and `ConfigError`
    where scikit-learn is not installed: neither is the team's fault.
    """
    answers = resolve(task)
    try:
        predictions = read(text, form_of(task, answers))
    except RefusedError as refused:
        return Outcome(success=False, score=0.0, reason=str(refused))
    metrics = score(task, predictions, answers)
    return Outcome(success=True, score=min(max(metrics["quality"], 0.0), 1.0), reason=_said(task, metrics), metrics=metrics)


def form_of(task: Task, answers: Answers) -> Form:
    """What a submission of the task must look like."""
    data = task.data
    try:
        metric = find(data.get("metric"))
        return Form(
            id_column=data["id_column"],
            ids=answers.ids,
            targets=tuple(data["targets"]),
            form=data["form"],
            labels={t: tuple(v) for t, v in (data.get("labels") or {}).items()},
            placeholder=dict(data.get("placeholder") or {}),
            non_negative=metric is not None and metric.non_negative,
        )
    except KeyError as error:
        raise TaskError(
            f"task {task.id!r} says nothing of its {error.args[0]}", hint="make DSBench tasks with dsbench.load_tasks"
        ) from None


def reason_name(outcome: Outcome | None) -> str:
    """The constant that an outcome's reason starts with: "valid", one of `REASONS`, or "no_outcome" for a run that was never graded."""
    if outcome is None:
        return "no_outcome"
    name = outcome.reason.split(":", 1)[0].strip()
    return name if name in _known() else "other"


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset((VALID, *REASONS))


def _said(task: Task, metrics: dict[str, float]) -> str:
    """A line for people: the competition's metric, where it is known, and the common ones."""
    parts: list[str] = []
    name: Any = task.data.get("metric")
    if "competition" in metrics:
        if name not in metrics:  # what is said below anyway
            parts.append(f"{name} {metrics['competition']:.4g}")
    elif find(name) is not None:
        parts.append(f"{name} is not defined for these predictions")
    elif name:
        parts.append(f"the competition's metric {name} is not computed here")
    if task.data["kind"] == "regression":
        parts.append(f"RMSE {metrics['rmse']:.4g} ({metrics['rmse_percent']:.3g}% of range)")
        parts.append(f"MAE {metrics['mae']:.4g} ({metrics['mae_percent']:.3g}% of range)")
    else:
        average = "binary " if "f1_binary" in metrics else "macro " if "f1_macro" in metrics else ""
        parts.append(f"accuracy {metrics['accuracy']:.4g}, {average}F1 {metrics['f1']:.4g}")
        if "roc_auc" in metrics:
            parts.append(f"ROC-AUC {metrics['roc_auc']:.4g}")
    return f"{VALID}: " + ", ".join(parts)
