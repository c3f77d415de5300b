"""The truth of a task's test rows. It lives on this side of the wall: nothing here is ever written where an agent can read it.

A task carries only a key, never the answers themselves, so that no record, report or prompt made from a task can hold them. `resolve` turns
the key of a task into its `Answers`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mappa_graph.environment import Task
from mappa_graph.errors import TaskError


@dataclass(frozen=True, slots=True)
class Answers:
    """`ids` in the order of the answers, and for each target one text per id, as the answer file wrote it."""

    ids: tuple[str, ...]
    truth: Mapping[str, tuple[str, ...]]


def resolve(task: Task) -> Answers:
    """The answers of a task. Raises `TaskError` where the task has no key, or its answer file is gone or no longer fits."""
    key = task.data.get("answers")
    kind, _, rest = key.partition(":") if isinstance(key, str) else ("", "", "")
    if kind == "builtin":
        from .builtin import build

        name, _, seed = rest.rpartition("@")
        return build(name, int(seed)).answers
    if kind == "file":
        return read_answers(rest, str(task.data["id_column"]), tuple(task.data["targets"]))
    raise TaskError(f"task {task.id!r} has no answers to be graded by", hint="make DSBench tasks with dsbench.load_tasks")


@lru_cache(maxsize=32)
def read_answers(path: str, id_column: str, targets: tuple[str, ...]) -> Answers:
    """The id and target columns of an answer CSV. Raises `TaskError` naming the file and the column or row that is wrong."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            header = [name.strip() for name in next(rows, [])]
            wanted = (id_column, *targets)
            absent = [name for name in wanted if name not in header]
            if absent:
                raise TaskError(f"the answer file {path!r} has no column {absent[0]!r}", hint=f"it has: {', '.join(header[:20])}")
            places = [header.index(name) for name in wanted]
            kept = [[row[i].strip() for i in places] for row in rows if row]
    except (OSError, UnicodeDecodeError, csv.Error, IndexError) as error:
        raise TaskError(f"the answer file {path!r} can't be read: {type(error).__name__}: {error}") from error
    if not kept:
        raise TaskError(f"the answer file {path!r} holds no rows")
    columns = list(zip(*kept, strict=True))
    if len(set(columns[0])) != len(columns[0]):
        raise TaskError(f"the answer file {path!r} repeats ids in its column {id_column!r}")
    return Answers(columns[0], dict(zip(targets, columns[1:], strict=True)))
