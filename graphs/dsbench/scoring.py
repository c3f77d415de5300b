"""What a valid submission is worth: the measures of one run, all by scikit-learn.

Classification: `accuracy`, `f1` (binary F1 of the positive label where a target has two labels, macro F1 otherwise; `f1_binary` or
`f1_macro` says which), and `roc_auc` where probabilities were given. Regression: `mae`, `rmse`, and both as a percentage of the range
(largest minus smallest) of the true values, `mae_percent` and `rmse_percent`; per target, then the mean over targets. `competition` is the
metric that the task names, with `competition_higher_better` 1 or 0; it is absent where the metric is not known or not defined for these
predictions.

`quality` is one number in 0..1 that both kinds share. A failed run is charged accuracy 0.5, F1 0 and errors of 50% of range; quality is
the distance from there to perfect:
    classification   (max(0, 2 accuracy - 1) + f1) / 2
    regression       1 - (min(rmse_percent, 50) + min(mae_percent, 50)) / 100
so a failed run has 0, a perfect one 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError

from .answers import Answers
from .competition import f1, find, roc_auc, words
from .submission import Predictions, label_keys, label_of

THRESHOLD = 0.5
"""Probability of the positive label from which on a prediction counts as that label."""
FAILED = {"accuracy": 0.5, "f1": 0.0, "rmse_percent": 50.0, "mae_percent": 50.0}
"""What a failed run is charged."""


def score(task: Task, predictions: Predictions, answers: Answers) -> dict[str, float]:
    """The measures of a submission; see the module. Raises `ConfigError` where scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401  (its absence must be an error, never an empty result)
    except ImportError as error:
        raise ConfigError("grading DSBench submissions needs scikit-learn", hint="pip install 'mappa-graph[dsbench]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metrics that are not defined for these values: they come out NaN, and are left out below
        regression = task.data["kind"] == "regression"
        measures = _regression(predictions, answers) if regression else _classification(task, predictions, answers)
        named = _competition(task, predictions, answers)
    measures.update(named)
    kept = {name: float(value) for name, value in measures.items() if math.isfinite(value)}
    return {**kept, "quality": quality(task.data["kind"], kept)}


def quality(kind: str, measures: Mapping[str, float]) -> float:
    """0 for a failed run to 1 for a perfect one; see the module."""
    if kind == "regression":
        return 1.0 - (min(measures["rmse_percent"], 50.0) + min(measures["mae_percent"], 50.0)) / 100.0
    return (max(0.0, 2.0 * measures["accuracy"] - 1.0) + measures["f1"]) / 2.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _regression(predictions: Predictions, answers: Answers) -> dict[str, float]:
    from sklearn.metrics import mean_absolute_error, root_mean_squared_error

    rows = []
    for target, given in predictions.items():
        truth = [float(v) for v in answers.truth[target]]
        span = max(truth) - min(truth)
        mae, rmse = float(mean_absolute_error(truth, given)), float(root_mean_squared_error(truth, given))
        rows.append((mae, rmse, _percent(mae, span), _percent(rmse, span)))
    return dict(zip(("mae", "rmse", "mae_percent", "rmse_percent"), map(_mean, zip(*rows, strict=True)), strict=True))


def _percent(error: float, span: float) -> float:
    """Of a truth that doesn't vary every error is the whole range."""
    if span > 0:
        return min(100.0 * error / span, 1e12)
    return 0.0 if error == 0 else 100.0


def _classification(task: Task, predictions: Predictions, answers: Answers) -> dict[str, float]:
    form = task.data["form"]
    if form == "probabilities":
        return _exclusive(predictions, answers)
    if form == "text":
        return _texts(predictions, answers)
    rows = [_one(task, target, given, answers.truth[target]) for target, given in predictions.items()]
    names = {name for row in rows for name in row}
    return {name: _mean([row[name] for row in rows if name in row and math.isfinite(row[name])] or [math.nan]) for name in sorted(names)}


def _one(task: Task, target: str, given: Sequence[Any], raw: Sequence[str]) -> dict[str, float]:
    """One label target; probabilities count as the positive label from `THRESHOLD` on, rankings by their first label."""
    from sklearn.metrics import accuracy_score

    labels, positive = _labels_of(task, target)
    truth = _truth(raw, labels)
    out: dict[str, float] = {}
    chosen: Sequence[str]
    if task.data["form"] == "probability":
        negative = next((label for label in labels if label != positive), "")
        chosen = [positive if p >= THRESHOLD else negative for p in given]
        out["roc_auc"] = roc_auc([int(t == positive) for t in truth], given)
    elif task.data["form"] == "ranking":
        chosen = [g[0] for g in given]
    else:
        chosen = given
    binary = len(labels) == 2
    out["accuracy"] = float(accuracy_score(truth, chosen))
    out["f1"] = out["f1_binary" if binary else "f1_macro"] = f1(truth, chosen, labels, positive if binary else None)
    return out


def _labels_of(task: Task, target: str) -> tuple[list[str], str]:
    labels = list((task.data.get("labels") or {}).get(target, ()))
    return labels, (task.data.get("positive") or {}).get(target) or (labels[-1] if labels else "1")


def _truth(raw: Sequence[str], labels: Sequence[str]) -> list[str]:
    known = label_keys(labels)
    return [label_of(v, known) or v for v in raw]


def _exclusive(predictions: Predictions, answers: Answers) -> dict[str, float]:
    """One truth over several columns of probabilities: the largest is the prediction."""
    from sklearn.metrics import accuracy_score, f1_score

    truth, shares = _matrix(predictions, answers)
    chosen = [max(range(len(row)), key=row.__getitem__) for row in shares]
    # Each class against the rest, averaged; NaN, so left out, where a class never occurs in the truth.
    area = _mean([roc_auc([int(t == i) for t in truth], [row[i] for row in shares]) for i in range(len(predictions))])
    macro = float(f1_score(truth, chosen, average="macro", zero_division=0))
    return {"accuracy": float(accuracy_score(truth, chosen)), "f1": macro, "f1_macro": macro, "roc_auc": area}


def _matrix(predictions: Predictions, answers: Answers) -> tuple[list[int], list[list[float]]]:
    """Which column is true in each row, and each row's probabilities scaled to add up to 1 (all alike where they are all 0)."""
    columns: list[Sequence[Any]] = list(predictions.values())
    truths = [[float(v) for v in answers.truth[t]] for t in predictions]
    truth = [max(range(len(row)), key=row.__getitem__) for row in zip(*truths, strict=True)]
    shares = []
    for row in zip(*columns, strict=True):
        total = math.fsum(row)
        shares.append([x / total for x in row] if total > 0 else [1.0 / len(row)] * len(row))
    return truth, shares


def _texts(predictions: Predictions, answers: Answers) -> dict[str, float]:
    """Free text: the same text is right, and F1 is that of the words, row by row."""
    rights, overlaps = [], []
    for target, given in predictions.items():
        for said, wanted in zip(given, answers.truth[target], strict=True):
            a, b = words(str(said)), words(wanted)
            rights.append(float(str(said).strip() == wanted.strip()))
            overlaps.append(2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0)
    return {"accuracy": _mean(rights), "f1": _mean(overlaps)}


def _competition(task: Task, predictions: Predictions, answers: Answers) -> dict[str, float]:
    metric = find(task.data.get("metric"))
    if metric is None:
        return {}
    form = task.data["form"]
    values = []
    try:
        if form == "probabilities":
            from sklearn.metrics import log_loss

            truth, shares = _matrix(predictions, answers)
            values.append(float(log_loss(truth, shares, labels=list(range(len(predictions))))))
        else:
            for target, given in predictions.items():
                labels, positive = _labels_of(task, target)
                raw = answers.truth[target]
                if form == "number":
                    wanted: Sequence[Any] = [float(v) for v in raw]
                elif form == "probability":
                    wanted = [int(t == positive) for t in _truth(raw, labels)]
                else:
                    wanted = _truth(raw, labels)
                values.append(metric.compute(wanted, given, labels, positive if len(labels) == 2 else None))
    except ValueError:  # e.g. the logarithm of a negative truth: the metric has no value here
        return {}
    return {"competition": _mean(values), "competition_higher_better": float(metric.higher_better)}
