"""The metrics that competitions name: what each asks a submission to hold, which way is better, and how it is computed.

scikit-learn and scipy compute all that they know; the few formulas they lack (SMAPE, MPA@3, the word Jaccard, MCRMSE, the normalised Gini
coefficient) are written out with their source. With several targets a metric is the mean over them, which is how Kaggle's
"mean column-wise" metrics are defined. A name that is not in the table is not guessed at: `find` gives None, and grading says so.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["label", "probability", "probabilities", "number", "ranking", "text"]
"""What a prediction column holds: a label, the probability of the positive label, one probability column for each class (with one truth
per row), a finite number, up to three labels best first, or free text."""
LABEL, PROBABILITY, NUMBER = "label", "probability", "number"
Column = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """`compute(truth, predicted, classes, positive)` is of one target. Truth and predictions are labels (str), 0/1 and probabilities, or
    floats."""

    name: str
    title: str
    form: Form
    higher_better: bool
    compute: Callable[[Column, Column, Sequence[str], str | None], float]
    non_negative: bool = False
    """Whether a prediction below 0 has no score (logarithms)."""
    exclusive: bool = False
    """Whether several target columns are the classes of one truth, not truths of their own."""


def _sklearn(name: str, **options: Any) -> Callable[..., float]:
    def compute(truth: Column, predicted: Column, classes: Sequence[str], positive: str | None) -> float:
        from sklearn import metrics

        return float(getattr(metrics, name)(truth, predicted, **options))

    return compute


def f1(truth: Column, predicted: Column, classes: Sequence[str], positive: str | None) -> float:
    """F1 of the positive label where there are two, otherwise the mean over the labels that occur in truth or predictions (macro)."""
    from sklearn.metrics import f1_score

    if positive is not None and len(classes) == 2:
        return float(f1_score(truth, predicted, average="binary", pos_label=positive, zero_division=0))
    return float(f1_score(truth, predicted, average="macro", zero_division=0))


def _average_f1(average: str) -> Callable[..., float]:
    return _sklearn("f1_score", average=average, zero_division=0)


def roc_auc(truth: Column, scores: Column, classes: Sequence[str] = (), positive: str | None = None) -> float:
    """Area under the ROC curve of 0/1 truths; NaN where the truth has one class only."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, scores)) if len(set(truth)) == 2 else float("nan")


def _gini(truth: Column, scores: Column, classes: Sequence[str], positive: str | None) -> float:
    # For 0/1 truths the normalised Gini coefficient is 2 AUC - 1 (Porto Seguro, "Evaluation").
    return 2 * roc_auc(truth, scores) - 1


def _log_loss(truth: Column, scores: Column, classes: Sequence[str], positive: str | None) -> float:
    from sklearn.metrics import log_loss

    return float(log_loss(truth, scores, labels=[0, 1]))


def _kappa(truth: Column, predicted: Column, classes: Sequence[str], positive: str | None) -> float:
    from sklearn.metrics import cohen_kappa_score

    try:  # quadratic weights need the labels' order as numbers ("10" after "9")
        return float(cohen_kappa_score([float(x) for x in truth], [float(x) for x in predicted], weights="quadratic"))
    except ValueError:
        return float(cohen_kappa_score(truth, predicted, weights="quadratic", labels=list(classes)))


def _smape(truth: Column, predicted: Column, classes: Sequence[str], positive: str | None) -> float:
    # 100/n sum |F - A| / ((|A| + |F|) / 2), with 0/0 = 0 (Kaggle, "Demand forecasting", "Evaluation").
    terms = [0.0 if a == f == 0 else abs(f - a) / ((abs(a) + abs(f)) / 2) for a, f in zip(truth, predicted, strict=True)]
    return 100.0 * sum(terms) / len(terms)


def _correlation(name: str) -> Callable[..., float]:
    def compute(truth: Column, predicted: Column, classes: Sequence[str], positive: str | None) -> float:
        stats = importlib.import_module("scipy.stats")
        if len(set(truth)) < 2 or len(set(predicted)) < 2:
            return 0.0  # a constant correlates with nothing
        return float(getattr(stats, name)(truth, predicted)[0])

    return compute


def _map_at_3(truth: Column, predicted: Column, classes: Sequence[str], positive: str | None) -> float:
    # Mean over rows of 1/rank of the true label among the first three, 0 where it is absent (Kaggle, playground S3E13, "Evaluation").
    total = sum(1.0 / (p.index(t) + 1) if t in p else 0.0 for t, p in zip(truth, predicted, strict=True))
    return total / len(truth)


def words(text: str) -> set[str]:
    return set(text.lower().split())


def _jaccard(truth: Column, predicted: Column, classes: Sequence[str], positive: str | None) -> float:
    # Mean over rows of |A and B| / |A or B| of the sets of words (Kaggle, tweet sentiment extraction, "Evaluation").
    def one(a: set[str], b: set[str]) -> float:
        return len(a & b) / len(a | b) if a or b else 1.0

    return sum(one(words(t), words(p)) for t, p in zip(truth, predicted, strict=True)) / len(truth)


_ALL = (
    Metric("accuracy", "accuracy", "label", True, _sklearn("accuracy_score")),
    Metric("balanced_accuracy", "balanced accuracy (the mean of the labels' recalls)", "label", True, _sklearn("balanced_accuracy_score")),
    Metric("f1", "F1 (of the positive label where there are two, macro otherwise)", "label", True, f1),
    Metric("f1_macro", "macro F1 (the mean of the labels' F1)", "label", True, _average_f1("macro")),
    Metric("f1_micro", "micro F1", "label", True, _average_f1("micro")),
    Metric("f1_weighted", "weighted F1", "label", True, _average_f1("weighted")),
    Metric("qwk", "quadratic weighted kappa", "label", True, _kappa),
    Metric("mcc", "Matthews correlation coefficient", "label", True, _sklearn("matthews_corrcoef")),
    Metric("roc_auc", "area under the ROC curve", "probability", True, roc_auc),
    Metric("normalized_gini", "normalised Gini coefficient", "probability", True, _gini),
    Metric("log_loss", "log loss", "probability", False, _log_loss, exclusive=True),
    Metric("brier", "Brier score", "probability", False, _sklearn("brier_score_loss")),
    Metric("average_precision", "average precision", "probability", True, _sklearn("average_precision_score")),
    Metric("map_at_3", "mean precision at 3 (one over the true label's rank)", "ranking", True, _map_at_3),
    Metric("jaccard", "word-level Jaccard score", "text", True, _jaccard),
    Metric("rmse", "root mean squared error", "number", False, _sklearn("root_mean_squared_error")),
    Metric("mcrmse", "mean column-wise root mean squared error", "number", False, _sklearn("root_mean_squared_error")),
    Metric("mse", "mean squared error", "number", False, _sklearn("mean_squared_error")),
    Metric("mae", "mean absolute error", "number", False, _sklearn("mean_absolute_error")),
    Metric("medae", "median absolute error", "number", False, _sklearn("median_absolute_error")),
    Metric("rmsle", "root mean squared logarithmic error", "number", False, _sklearn("root_mean_squared_log_error"), non_negative=True),
    Metric("mape", "mean absolute percentage error, as a fraction", "number", False, _sklearn("mean_absolute_percentage_error")),
    Metric("smape", "symmetric mean absolute percentage error, 0 to 200", "number", False, _smape),
    Metric("r2", "R2, the coefficient of determination", "number", True, _sklearn("r2_score")),
    Metric("explained_variance", "explained variance", "number", True, _sklearn("explained_variance_score")),
    Metric("pearson", "Pearson's correlation", "number", True, _correlation("pearsonr")),
    Metric("spearman", "Spearman's rank correlation", "number", True, _correlation("spearmanr")),
)
METRICS: Mapping[str, Metric] = {m.name: m for m in _ALL}
_ALIASES = {
    "auc": "roc_auc",
    "rocauc": "roc_auc",
    "auc_roc": "roc_auc",
    "area_under_the_roc_curve": "roc_auc",
    "gini": "normalized_gini",
    "normalised_gini": "normalized_gini",
    "logloss": "log_loss",
    "binary_cross_entropy": "log_loss",
    "brier_score": "brier",
    "acc": "accuracy",
    "macro_f1": "f1_macro",
    "micro_f1": "f1_micro",
    "weighted_f1": "f1_weighted",
    "quadratic_weighted_kappa": "qwk",
    "cohen_kappa": "qwk",
    "matthews_corrcoef": "mcc",
    "mpa_at_3": "map_at_3",
    "map3": "map_at_3",
    "mean_squared_error": "mse",
    "root_mean_squared_error": "rmse",
    "mean_absolute_error": "mae",
    "median_absolute_error": "medae",
    "root_mean_squared_log_error": "rmsle",
    "r2_score": "r2",
    "pearsonr": "pearson",
    "spearmanr": "spearman",
    "mean_columnwise_spearman": "spearman",
}


def find(name: str | None) -> Metric | None:
    """The metric of that name or a common alias of it, whatever its case and punctuation; None where it is not known."""
    plain = re.sub(r"[^a-z0-9]+", "_", (name or "").lower().replace("@", "_at_")).strip("_")
    return METRICS.get(_ALIASES.get(plain, plain))
