"""The text that agents are given of a task: what to predict, how it is graded, the files, the columns, and the form of a submission.

Everything in it is read from the training file or stated by the task; nothing is read from the answers. Long runs of columns that
differ by a number only (`pixel_0` … `pixel_63`) take one line, so that a small model's context is not spent on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .competition import Metric

if TYPE_CHECKING:
    import pandas as pd

MAX_COLUMNS = 40
"""Lines of the column table; further columns are counted."""
_RUN = 6
_SHOWN = 6


def column_table(frame: pd.DataFrame, *, skip: Sequence[str] = (), notes: Mapping[str, str] | None = None) -> str:
    """One line a column of a training frame: type, missing values, range or values, and what it means where that is known."""
    notes = notes or {}
    names = [str(c) for c in frame.columns if c not in skip]
    lines: list[str] = []
    done: set[str] = set()
    for name in names:
        if name in done:
            continue
        run = _run_of(name, names)
        if len(run) >= _RUN:
            done.update(run)
            part = frame[run]
            kinds = sorted({_kind(part[c]) for c in run})
            span = f", {_short(part.min().min())} to {_short(part.max().max())}" if set(kinds) <= {"integer", "number"} else ""
            label = f"{run[0]} … {run[-1]} ({len(run)} columns)"
            lines.append(f"- {label}: {' or '.join(kinds)}{_missing(int(part.isna().sum().sum()))}{span}{_note(notes, name)}")
        else:
            column = frame[name]
            lines.append(f"- {name}: {_kind(column)}{_missing(int(column.isna().sum()))}{_values(column)}{_note(notes, name)}")
    if len(lines) > MAX_COLUMNS:
        lines[MAX_COLUMNS:] = [f"- … and {len(lines) - MAX_COLUMNS} more columns"]
    return "\n".join(lines)


def _run_of(name: str, names: Sequence[str]) -> list[str]:
    found = re.fullmatch(r"(.*?)(\d+)", name)
    return [n for n in names if re.fullmatch(re.escape(found[1]) + r"\d+", n)] if found and found[1] else [name]


def _kind(column: pd.Series) -> str:
    from pandas.api import types

    if types.is_bool_dtype(column):
        return "true or false"
    if types.is_integer_dtype(column):
        return "integer"
    if types.is_numeric_dtype(column):
        return "number"
    values = column.dropna().astype(str).head(50)
    if len(values) and values.str.fullmatch(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?").all():
        return "date"
    return "text"


def _missing(count: int) -> str:
    return f", {count} missing" if count else ""


def _values(column: pd.Series) -> str:
    present = column.dropna()
    if not len(present):
        return ""
    if _kind(column) in ("integer", "number"):
        return f", {_short(present.min())} to {_short(present.max())}"
    if _kind(column) == "date":
        return f", {present.min()} to {present.max()}"
    values = sorted({_clean(str(v)) for v in present.unique()[:500]})
    if len(values) <= _SHOWN:
        return ", one of " + ", ".join(values)
    return f", {present.nunique()} values such as " + ", ".join(values[:3])


def _note(notes: Mapping[str, str], name: str) -> str:
    return f" ({notes[name]})" if name in notes else ""


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) or hasattr(value, "dtype") else str(value)


def _clean(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 30 else text[:27] + "…"


def metric_line(metric: Metric | None, name: str) -> str:
    """How a submission is scored, or that the competition's metric is not known here."""
    if metric is None:
        return f"Metric: {name} (not computed here; accuracy and F1, or RMSE and MAE, are)" if name else "Metric: none is named"
    return f"Metric: {metric.title}; {'higher' if metric.higher_better else 'lower'} is better"


def submission_rules(
    id_column: str,
    targets: Sequence[str],
    form: str,
    labels: Mapping[str, Sequence[str]] | None,
    positive: Mapping[str, str] | None,
    metric: Metric | None,
) -> str:
    """The form that grading holds a submission to, in words."""
    shown = ",".join((id_column, *targets)) if len(targets) <= 10 else f"{id_column} and the {len(targets)} target columns"
    lines = [
        f"Write submission.csv: a header line {shown} and no other column (save it without the index), then one line for each id of "
        "test.csv, every id exactly once, in any order."
    ]
    for target in targets:
        known = list((labels or {}).get(target, ()))
        some = ", ".join(known[:30]) + (", …" if len(known) > 30 else "")
        if form == "label":
            counted = f" F1 is that of {positive[target]}." if positive and target in positive else ""
            lines.append(f"{target}: one of the labels {some}.{counted}")
        elif form == "ranking":
            lines.append(f"{target}: up to three different labels, the likeliest first, with spaces between them: {some}.")
        elif form == "probability" and positive and target in positive:
            lines.append(f"{target}: the probability, between 0 and 1, that it is {positive[target]}.")
    if form == "probability" and not positive:
        lines.append("Each target: a probability between 0 and 1.")
    elif form == "probabilities":
        lines.append("Each column: the probability, between 0 and 1, of its class; they are scaled to add up to 1 in every row.")
    elif form == "number":
        least = ", 0 or more" if metric is not None and metric.non_negative else ""
        lines.append(f"{'Each target' if len(targets) > 1 else targets[0]}: a finite number{least}.")
    elif form == "text":
        lines.append(f"{targets[0]}: the text.")
    return "\n".join(lines)
