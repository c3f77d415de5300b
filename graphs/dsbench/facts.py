"""What is known of a task before anybody acts: its columns, its kind, how many rows there are. Never the answers.

Agents are told the facts in their prompts, and the coach finds them beside each execution, so that both know the same. They are plain
JSON. The task's own files are trusted and may be read here; what agents write is not (`box.py`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TypedDict

from mappa_graph.environment import Task

_ROWS = 3
_CELL = 24
_COLUMNS = 60
_COUNTED = 1024 * 1024


class Facts(TypedDict, total=False):
    """All fields may be missing: what is not known is neither told nor held against anybody."""

    kind: str
    """classification or regression."""
    id: str
    """The column that names the rows."""
    targets: list[str]
    labels: list[str]
    """The values that a target may have, where they are known."""
    metric: str
    form: str
    """What a prediction is: label, probability, number, …"""
    positive: str
    """Of a target with two labels, the one that probabilities are about."""
    train_rows: int
    test_rows: int


class Table(TypedDict):
    """A CSV file of the task, described."""

    rows: int | None
    """None: the file is too large to be counted each time."""
    columns: list[str]
    head: str


def table(data: bytes) -> Table:
    """A CSV file's columns, first lines and, up to 1 MiB, its number of rows. Only for files that come with the task: they are trusted."""
    return _whole(data) if len(data) <= _COUNTED else _read(data[:_COUNTED], count=False)


@lru_cache(maxsize=64)
def _whole(data: bytes) -> Table:
    return _read(data, count=True)


def _read(data: bytes, *, count: bool) -> Table:
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig", errors="replace")))
    header = next(reader, [])
    rows = (row for row in reader if row)
    head = [", ".join(_short(cell) for cell in row[:_COLUMNS]) for row in islice(rows, _ROWS)]
    return Table(rows=len(head) + sum(1 for _ in rows) if count else None, columns=header, head="\n".join(head))


def facts_of(task: Task, files: Mapping[str, bytes] | None = None) -> Facts:
    """The facts of a task, from its `data` and the tables among its sandbox files."""
    data = task.data
    facts = Facts()
    kind = str(data.get("kind") or task.stratum)
    if kind:
        facts["kind"] = kind
    if data.get("id_column"):
        facts["id"] = str(data["id_column"])
    if data.get("targets"):
        facts["targets"] = _names(data["targets"])
    labels = data.get("labels")
    if isinstance(labels, Mapping):
        labels = labels.get(facts.get("targets", [""])[0]) if len(labels) == 1 else None
    if labels:
        facts["labels"] = _names(labels)
    if data.get("metric"):
        facts["metric"] = str(data["metric"])
    if data.get("form"):
        facts["form"] = str(data["form"])
    positive = data.get("positive")
    positive = next(iter(positive.values()), None) if isinstance(positive, Mapping) else positive
    if positive is not None:
        facts["positive"] = str(positive)
    for name, key in (("train.csv", "train_rows"), ("test.csv", "test_rows")):
        rows = table(files[name])["rows"] if files and name in files else None
        if rows is not None:
            facts[key] = rows  # type: ignore[literal-required]
    return facts


def columns_due(facts: Facts) -> list[str]:
    """The columns of `submission.csv`: the id, then the targets; empty where they are not known."""
    return [facts["id"], *facts["targets"]] if "id" in facts and "targets" in facts else []


def _names(value: Sequence[object] | str) -> list[str]:
    return [value] if isinstance(value, str) else [str(one) for one in value]


def _short(cell: str) -> str:
    return cell if len(cell) <= _CELL else cell[: _CELL - 1] + "…"
