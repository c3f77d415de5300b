"""A submission as text, read with suspicion: right columns, every id exactly once, and every prediction of the task's form.

The text is an agent's and may be anything. It is decoded and parsed as CSV here, in bounded time and memory, and by nothing that could run
it: bytes, rows, fields and numbers have a length limit before they are looked at, and the time taken grows with the length of the text
alone. Each way to be wrong is one of the constants below. A refusal's detail counts, and names only what the task itself says (columns) and
row numbers; the submission's own text is never quoted, as refusals are shown to coaches and in reports.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NO_SUBMISSION = "no_submission"
EMPTY = "empty"
TOO_LARGE = "too_large"
WRONG_ENCODING = "wrong_encoding"
NOT_CSV = "not_csv"
MISSING_COLUMN = "missing_column"
EXTRA_COLUMN = "extra_column"
DUPLICATE_COLUMN = "duplicate_column"
RAGGED_ROW = "ragged_row"
TOO_MANY_ROWS = "too_many_rows"
DUPLICATE_IDS = "duplicate_ids"
UNKNOWN_IDS = "unknown_ids"
MISSING_IDS = "missing_ids"
MISSING_VALUE = "missing_value"
NOT_NUMBER = "not_number"
NOT_FINITE = "not_finite"
HUGE_NUMBER = "huge_number"
NEGATIVE_VALUE = "negative_value"
NOT_PROBABILITY = "not_probability"
UNKNOWN_LABEL = "unknown_label"
BAD_RANKING = "bad_ranking"
SAMPLE_UNCHANGED = "sample_unchanged"

REASONS: Mapping[str, str] = {
    NO_SUBMISSION: "there is no submission.csv",
    EMPTY: "the file is empty",
    TOO_LARGE: "the file has more bytes than a submission of this task can need",
    WRONG_ENCODING: "the file is not UTF-8 text",
    NOT_CSV: "the file is not CSV with a header line",
    MISSING_COLUMN: "a column is not in the header",
    EXTRA_COLUMN: "the header has columns that the task does not ask for",
    DUPLICATE_COLUMN: "the header names a column twice",
    RAGGED_ROW: "a row has more or fewer fields than the header",
    TOO_MANY_ROWS: "there are many more rows than test ids",
    DUPLICATE_IDS: "ids occur more than once",
    UNKNOWN_IDS: "ids are not among the test file's",
    MISSING_IDS: "ids of the test file have no row",
    MISSING_VALUE: "predictions are left empty",
    NOT_NUMBER: "predictions are not numbers",
    NOT_FINITE: "predictions are NaN or infinite",
    HUGE_NUMBER: "predictions are too large to be computed with",
    NEGATIVE_VALUE: "predictions are below 0, which the metric has no score for",
    NOT_PROBABILITY: "predictions are not probabilities between 0 and 1",
    UNKNOWN_LABEL: "predictions are none of the known labels",
    BAD_RANKING: "predictions are not one to three different known labels with spaces between them",
    SAMPLE_UNCHANGED: "every prediction is the sample submission's placeholder",
}
"""Every reason a submission can be refused for, and what it says."""

LARGEST = 1e30
"""Largest size of a number: its square, summed over any number of rows, is still finite."""
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"([+-]?\d{1,32})(?:\.0{1,18})?", re.ASCII)
_PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})", re.ASCII)
_NAN = frozenset(("nan", "+nan", "-nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"))
_NUMBER_CHARS = 64
_FIELD_CHARS = 2000
_BASE_BYTES = 64 * 1024
_FIELD_BYTES = 128
_SLACK = 1e-6
"""How far rounding may take a probability out of 0..1."""
_TRUE_FALSE = {"true": "True", "false": "False"}


class RefusedError(Exception):
    """A submission that can't be graded. `reason` is one of `REASONS`, `detail` says where, without quoting the text."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail or REASONS[reason]}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Form:
    """What a task wants of a submission; see `tasks` for the fields' meaning."""

    id_column: str
    ids: tuple[str, ...]
    targets: tuple[str, ...]
    form: str
    labels: Mapping[str, Sequence[str]]
    placeholder: Mapping[str, str]
    non_negative: bool = False

    @property
    def max_bytes(self) -> int:
        """Most bytes that are looked at: generous for any way to write the ids and predictions."""
        longest = max(map(len, self.ids)) * 4 + len(self.targets) * (self._field_bytes + 4) + 8
        return _BASE_BYTES + len(self.ids) * longest

    @property
    def _field_bytes(self) -> int:
        known = max((len(label) * 4 for labels in self.labels.values() for label in labels), default=0)
        return _FIELD_CHARS if self.form == "text" else max(_FIELD_BYTES, 3 * known + 16)


Predictions = Mapping[str, Sequence[str] | Sequence[float] | Sequence[tuple[str, ...]]]


def read(text: str | bytes | None, form: Form) -> Predictions:
    """For each target the predictions in the order of `form.ids`: labels, texts, numbers, or tuples of labels.

    Raises `RefusedError` for whatever is wrong first, in the order of `REASONS`.
    """
    rows = _rows(_decoded(text, form), form)
    where = _matched([row[0] for row in rows], form.ids)
    columns = {target: [rows[at][i + 1] for at in where] for i, target in enumerate(form.targets)}
    if all(value == form.placeholder.get(target) for target, values in columns.items() for value in values):
        raise RefusedError(SAMPLE_UNCHANGED)
    return {target: _converted(values, target, form) for target, values in columns.items()}


def _decoded(text: str | bytes | None, form: Form) -> str:
    if text is None:
        raise RefusedError(NO_SUBMISSION)
    limit = form.max_bytes
    if len(text) > limit:
        raise RefusedError(TOO_LARGE, f"the file has more than {limit} bytes")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            raise RefusedError(WRONG_ENCODING) from None
    text = text.removeprefix("\ufeff")
    if "\0" in text or "\ufffd" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise RefusedError(WRONG_ENCODING)
    if not text.strip():
        raise RefusedError(EMPTY)
    return text


def _rows(text: str, form: Form) -> list[list[str]]:
    """The wanted fields of every row, id first."""
    wanted = (form.id_column, *form.targets)
    most = 2 * len(form.ids) + 100
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    kept: list[list[str]] = []
    places: list[int] | None = None
    width = 0
    try:
        for number, row in enumerate(reader, start=1):
            if not any(field.strip() for field in row):
                continue
            if places is None:
                places, width = _header([name.strip() for name in row], wanted), len(row)
                continue
            if len(row) != width:
                raise RefusedError(RAGGED_ROW, f"row {number} has {len(row)} fields, the header {width}")
            if len(kept) >= most:
                raise RefusedError(TOO_MANY_ROWS, f"more than {most} rows for {len(form.ids)} ids")
            kept.append([row[i].strip() for i in places])
    except csv.Error:
        raise RefusedError(NOT_CSV, f"line {reader.line_num} can't be read as CSV") from None
    if places is None:
        raise RefusedError(EMPTY)
    return kept


def _header(names: list[str], wanted: Sequence[str]) -> list[int]:
    if not set(names) & set(wanted):
        raise RefusedError(NOT_CSV, f"the first line names none of the columns {_listed(wanted)}")
    absent = [name for name in wanted if name not in names]
    if absent:
        raise RefusedError(MISSING_COLUMN, f"{_listed(absent)} not in the header")
    double = [name for name in wanted if names.count(name) > 1]
    if double:
        raise RefusedError(DUPLICATE_COLUMN, f"{_listed(double)} more than once in the header")
    if len(names) > len(wanted):
        raise RefusedError(EXTRA_COLUMN, f"the header has {len(names)} columns, wanted are only {_listed(wanted)}")
    return [names.index(name) for name in wanted]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(n) for n in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _matched(given: Sequence[str], ids: Sequence[str]) -> list[int]:
    """For each of the task's ids, in order, which row has it. Integer ids also match as 12.0, which pandas writes after a merge."""
    integers = all(_PLAIN_INTEGER.fullmatch(one) for one in ids)
    row_of: dict[str, int] = {}
    repeated = 0
    for at, one in enumerate(given):
        key = _integer(one) if integers else one
        repeated += key in row_of
        row_of.setdefault(key, at)
    if repeated:
        raise RefusedError(DUPLICATE_IDS, f"{repeated} rows repeat an id")
    known = set(ids)
    unknown = sum(one not in known for one in row_of)
    if unknown:
        raise RefusedError(UNKNOWN_IDS, f"{unknown} of {len(row_of)} ids are not among the test file's")
    absent = sum(one not in row_of for one in ids)
    if absent:
        raise RefusedError(MISSING_IDS, f"{absent} of {len(ids)} ids of the test file have no row")
    return [row_of[one] for one in ids]


def _integer(text: str) -> str:
    found = _INTEGER.fullmatch(text) if len(text) <= _NUMBER_CHARS else None
    return text if found is None else str(int(found[1]))


def _converted(values: Sequence[str], target: str, form: Form) -> Sequence[str] | Sequence[float] | Sequence[tuple[str, ...]]:
    blank = sum(not v for v in values)
    if blank and form.form != "text":
        raise RefusedError(MISSING_VALUE, f"{blank} of {len(values)} predictions of {target!r} are empty")
    if form.form == "text":
        if any(len(v) > _FIELD_CHARS for v in values):
            raise RefusedError(TOO_LARGE, f"a prediction of {target!r} has more than {_FIELD_CHARS} characters")
        return list(values)
    if form.form == "label":
        return _labels(values, target, form.labels[target])
    if form.form == "ranking":
        return _rankings(values, target, form.labels[target])
    numbers = [_number(v, i, target) for i, v in enumerate(values, start=1)]
    if form.form in ("probability", "probabilities"):
        outside = sum(not -_SLACK <= x <= 1 + _SLACK for x in numbers)
        if outside:
            raise RefusedError(NOT_PROBABILITY, f"{outside} of {len(numbers)} predictions of {target!r} are not between 0 and 1")
        return [min(max(x, 0.0), 1.0) for x in numbers]
    if form.non_negative and (below := sum(x < 0 for x in numbers)):
        raise RefusedError(
            NEGATIVE_VALUE, f"{below} of {len(numbers)} predictions of {target!r} are below 0, which the metric has no score for"
        )
    return numbers


def _number(text: str, row: int, target: str) -> float:
    if text.lower() in _NAN:
        raise RefusedError(NOT_FINITE, f"prediction {row} of {target!r} is NaN or infinite")
    if len(text) > _NUMBER_CHARS or not _NUMBER.fullmatch(text):
        if _NUMBER.fullmatch(text[:4096]) and len(text) <= 4096:
            raise RefusedError(HUGE_NUMBER, f"prediction {row} of {target!r} has more than {_NUMBER_CHARS} characters")
        raise RefusedError(NOT_NUMBER, f"prediction {row} of {target!r} is not a number")
    value = float(text)
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise RefusedError(HUGE_NUMBER, f"prediction {row} of {target!r} is larger than {LARGEST:g}")
    return value


def label_of(text: str, known: Mapping[str, str]) -> str | None:
    """The known label that a text means, given `label_keys` of the labels: the same text, the same number (1.0 for 1), or true for True."""
    if text in known:
        return known[text]
    if text.lower() in _TRUE_FALSE:
        return known.get(_TRUE_FALSE[text.lower()])
    if len(text) <= _NUMBER_CHARS and _NUMBER.fullmatch(text):
        return known.get(_numeric_key(text))
    return None


def label_keys(labels: Sequence[str]) -> dict[str, str]:
    """Every way to write each label -> the label; numbers by value, wherever no two labels have the same."""
    keys: dict[str, str] = {}
    numeric = [(label, _numeric_key(label)) for label in labels if len(label) <= _NUMBER_CHARS and _NUMBER.fullmatch(label)]
    if len({key for _, key in numeric}) == len(numeric):
        keys.update({key: label for label, key in numeric})
    keys.update({label: label for label in labels})
    return keys


def _numeric_key(text: str) -> str:
    return f"number {float(text)!r}"


def _labels(values: Sequence[str], target: str, labels: Sequence[str]) -> list[str]:
    known = label_keys(labels)
    found = [label_of(v, known) for v in values]
    unknown = sum(label is None for label in found)
    if unknown:
        raise RefusedError(UNKNOWN_LABEL, f"{unknown} of {len(values)} predictions of {target!r} are none of its {len(labels)} labels")
    return [label for label in found if label is not None]


def _rankings(values: Sequence[str], target: str, labels: Sequence[str]) -> list[tuple[str, ...]]:
    known = label_keys(labels)
    out = []
    for row, value in enumerate(values, start=1):
        parts = value.split(None, 3)
        found = [label_of(p, known) for p in parts]
        if len(parts) > 3 or None in found or len(set(found)) != len(found):
            raise RefusedError(BAD_RANKING, f"prediction {row} of {target!r} is not one to three different labels with spaces between them")
        out.append(tuple(label for label in found if label is not None))
    return out
