"""DSBench tasks: the built-in ones, which need no download, and the public benchmark's, from a folder that the user has filled.

A task is a plain `Task`. Its `data` says all that grading needs but the answers: `kind`, `id_column`, `targets`, `labels` (the known labels
of each target, or None), `positive` (of a target with two labels), `metric`, `form` (what a prediction is, `competition.Form`),
`placeholder` (what the sample submission holds), `files` and `answers` (keys, not contents). `sandbox_files` gives what an episode's
sandbox is filled with; the answers are never among it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mappa_graph.environment import Task
from mappa_graph.errors import TaskError

FILES = ("train.csv", "test.csv", "sample_submission.csv", "description.txt")
"""What every sandbox begins with."""


class LoadedTasks(list[Task]):
    """Tasks, with `notes`: what was passed over, and what about a task was found out instead of being given."""

    def __init__(self, tasks: Sequence[Task] = (), notes: Sequence[str] = ()) -> None:
        super().__init__(tasks)
        self.notes = tuple(notes)


def load_tasks(
    folder: str | Path | None = None,
    *,
    split: str = "train",
    seed: int = 0,
    tasks_file: str | Path | None = None,
    prompts_file: str | Path | None = None,
    missing: Literal["error", "skip"] = "error",
) -> LoadedTasks:
    """The tasks of a split: "train", "heldout" or "all".

    Args:
        folder: where the public benchmark lies (see `public`); None for the built-in tasks.
        seed: of the built-in tasks' rows, ids and train/test split.
        tasks_file: the public task list; default: `dsbench_modeling_*.json` or `data.json` in the folder.
        prompts_file: the cleaned prompts; default: `dsbench_modeling_cleaned_prompts.json` in the folder, where there is one.
        missing: "error" raises one `TaskError` that names every missing file of every task; "skip" passes over the tasks that lack a
            file and says so in `.notes`.
    """
    if folder is None:
        from .builtin import tasks

        return LoadedTasks(tasks(split, seed))
    from .public import load

    found, notes = load(Path(folder), split=split, tasks_file=tasks_file, prompts_file=prompts_file, missing=missing)
    return LoadedTasks(found, notes)


def sandbox_files(task: Task) -> dict[str, bytes]:
    """The files that an episode's sandbox begins with: `train.csv`, `test.csv`, `sample_submission.csv` and `description.txt`.

    Raises `TaskError` for a task that is none of DSBench's, or whose files have gone since it was loaded.
    """
    files = task.data.get("files")
    if not isinstance(files, dict):
        raise TaskError(f"task {task.id!r} has no files for a sandbox", hint="make DSBench tasks with dsbench.load_tasks")
    if task.id.startswith("builtin/"):
        from .builtin import build

        name, _, seed = str(task.data["answers"]).removeprefix("builtin:").rpartition("@")
        return dict(build(name, int(seed)).files)
    from .public import contents

    return contents(task)
