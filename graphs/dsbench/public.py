"""The public DSBench modelling tasks, from files that the user has downloaded.

The folder holds task lists and, somewhere below it, the benchmark's unpacked `data.zip`:

    dsbench_modeling_train.json             {"prompt", "answer": null, "metadata": {"task_id", "data_type", "train_file", "test_file",
    dsbench_modeling_eval.json               "answer_dir", …}}, an object a line or one list; the second, where it is there, is held out
    dsbench_modeling_cleaned_prompts.json   task_id -> {"cleaned_prompt", "metric", "task_type", "target_column", "id_column"} (optional)
    data/data_resplit/<task_id>/train.csv
    data/data_resplit/<task_id>/test.csv
    data/answers/<task_id>/test_answer.csv

The benchmark repository's own list, `data.json`, with `data/task/<task_id>.txt`, will do in place of the first three.
A list's paths may begin anywhere ("./data/DSBench/data/…"): the longest end of one that exists below the folder is used.

What the lists get wrong is set right by the files themselves, and noted: which columns are ids and targets is read from the answer
file's header where the cleaned prompt's names aren't in it, and a target that isn't numeric is never regression. The sample submission is
always made here (`sample`). A target column that a test file holds is taken out before a sandbox sees it.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError, TaskError

from .answers import Answers, read_answers, resolve
from .competition import Form, Metric, find
from .describe import column_table, metric_line, submission_rules
from .lists import Entry, entries_of, find_file, kind_of, prompts_of, wanted_path
from .sample import placeholders, sample_submission

_LABELS_MAX = 1000
_TABLE_ROWS = 2000
_CHUNK = 200_000


def load(
    folder: Path,
    *,
    split: str,
    tasks_file: str | Path | None = None,
    prompts_file: str | Path | None = None,
    missing: Literal["error", "skip"] = "error",
) -> tuple[list[Task], list[str]]:
    """The tasks of a split and notes on them. Raises `TaskError` naming each missing file, `ConfigError` for an unknown split or mode."""
    if split not in ("train", "heldout", "all"):
        raise ConfigError(f"DSBench tasks have no split {split!r}", hint="they have: train, heldout, all")
    if missing not in ("error", "skip"):
        raise ConfigError(f"missing is {missing!r}", hint='use "error" or "skip"')
    if not folder.is_dir():
        raise TaskError(f"the DSBench folder {str(folder)!r} is not there", hint=_HOW)
    entries = entries_of(folder, split, tasks_file, prompts_of(folder, prompts_file))
    found: list[Task] = []
    notes: list[str] = []
    absent: list[str] = []
    for entry in entries:
        sought = {"train": entry.train, "test": entry.test, "answer": entry.answer}
        paths = {name: find_file(folder, path) for name, path in sought.items()}
        lacking = [f"{entry.name}: {wanted_path(path)}" for name, path in sought.items() if paths[name] is None]
        if lacking:
            absent += lacking
            continue
        found.append(_task(entry, {k: p for k, p in paths.items() if p is not None}, notes))
    if absent and (missing == "error" or not found):
        listed = "\n  ".join(absent)
        tasks = len({line.split(":")[0] for line in absent})
        raise TaskError(f"{len(absent)} files of {tasks} DSBench tasks are missing below {str(folder)!r}:\n  {listed}", hint=_HOW)
    notes += [f"passed over, file missing: {line}" for line in absent]
    return found, notes


_HOW = (
    "unpack the benchmark's data_modeling/data.zip (linked from https://github.com/LiqiangJing/DSBench) into the folder, "
    'or leave out the tasks that lack files with missing="skip"'
)


def contents(task: Task) -> dict[str, bytes]:
    """What a sandbox is given of a public task."""
    data = task.data
    files = data["files"]
    answers = resolve(task)
    try:
        train, test = Path(files["train.csv"]).read_bytes(), _without(Path(files["test.csv"]), data["targets"])
    except (OSError, ValueError) as error:
        raise TaskError(f"a file of DSBench task {task.id!r} can't be read: {error}") from error
    return {
        "train.csv": train,
        "test.csv": test,
        "sample_submission.csv": sample_submission(answers.ids, data["id_column"], data["placeholder"]),
        "description.txt": (task.prompt + "\n").encode(),
    }


def _without(test: Path, targets: Sequence[str]) -> bytes:
    """A test file without target columns; as it is where it has none."""
    if not set(_header(test)) & set(targets):
        return test.read_bytes()
    frame = _pandas().read_csv(test, dtype=str, keep_default_na=False)
    kept: bytes = frame[[c for c in frame.columns if c.strip() not in targets]].to_csv(index=False, lineterminator="\n").encode()
    return kept


def _task(entry: Entry, paths: Mapping[str, Path], notes: list[str]) -> Task:
    clean = entry.clean
    header = _header(paths["answer"])
    if len(header) < 2:
        raise TaskError(f"the answer file {str(paths['answer'])!r} needs an id and a target, and has {len(header)} columns")
    id_column, targets, fits = _columns(entry, header, notes)
    answers = read_answers(str(paths["answer"]), id_column, tuple(targets))
    name = str(clean.get("metric") or "")
    metric = find(name)
    if metric is None:
        notes.append(f"{entry.name}: " + (f"its metric {name!r} is not known here" if name else "no metric is named"))
    numeric = _numeric(entry, answers, paths["answer"])
    kind = kind_of(entry) or _told(answers, numeric)
    form = _form(metric, kind, len(targets), numeric)
    if kind == "regression" and form != "number":
        kind = "classification"
        notes.append(f"{entry.name}: listed as regression, but its targets are no numbers to be predicted; treated as classification")
    elif kind == "classification" and form == "number":
        kind = "regression"
        notes.append(f"{entry.name}: listed as classification, but {metric.name if metric else 'it'} wants numbers; treated as regression")
    frame = _head(paths["train"])
    if id_column not in _header(paths["test"]):
        notes.append(f"{entry.name}: its test file has no id column {id_column!r}; the ids are in sample_submission.csv alone")
    labels, positive, training = _labels(paths["train"], targets, answers, form)
    constant = placeholders(targets, form, labels, training)
    text = str(clean.get("cleaned_prompt") or "") if fits else ""
    if clean and not fits:
        notes.append(f"{entry.name}: its cleaned prompt speaks of other columns than its files; the original description is used")
    data: dict[str, Any] = {
        "kind": kind,
        "id_column": id_column,
        "targets": targets,
        "labels": labels,
        "positive": positive,
        "metric": metric.name if metric else name,
        "form": form,
        "placeholder": constant,
        "files": {
            "train.csv": str(paths["train"]),
            "test.csv": str(paths["test"]),
            "sample_submission.csv": "made",
            "description.txt": "made",
        },
        "answers": f"file:{paths['answer']}",
    }
    prompt = "\n".join(
        (
            (text or entry.prompt).strip(),
            "",
            metric_line(metric, name),
            "",
            "Files here: train.csv, test.csv, and sample_submission.csv, which has the ids and the form of a submission, and placeholders.",
            "",
            "Columns of train.csv:",
            column_table(frame),
            "",
            submission_rules(id_column, targets, form, labels, positive, metric),
        )
    )
    return Task(id=f"dsbench/{entry.name}", prompt=prompt, stratum=kind, data=data)


def _header(path: Path) -> list[str]:
    """The names in a CSV file's first line. Raises `TaskError` naming the file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [h.strip() for h in next(csv.reader(file), [])]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TaskError(f"the header of {str(path)!r} can't be read: {error}") from error


def _columns(entry: Entry, header: list[str], notes: list[str]) -> tuple[str, list[str], bool]:
    """Id column, targets, and whether the cleaned prompt's names were right. "30_labels" and the like stand for all other columns."""
    clean = entry.clean
    given = clean.get("target_column")
    wanted = [given] if isinstance(given, str) else [str(t) for t in given or ()]
    id_column = str(clean.get("id_column") or "")
    every = len(wanted) == 1 and wanted[0].endswith("_labels") and wanted[0] not in header
    fits = bool(clean) and (every or all(t in header for t in wanted))
    if id_column not in header:
        if id_column:
            notes.append(f"{entry.name}: the answers have no id column {id_column!r}; {header[0]!r} is used")
        id_column = header[0]
    if fits and not every:
        return id_column, wanted, True
    targets = [h for h in header if h != id_column]
    if not every:
        notes.append(f"{entry.name}: targets read from the answer file's header: {', '.join(targets[:10])}")
    return id_column, targets, fits


def _told(answers: Answers, numeric: bool) -> str:
    """The kind of a task that nothing names: numbers of more than twenty sizes, or with fractions, are regression."""
    values = {float(v) for column in answers.truth.values() for v in column} if numeric else set()
    return "regression" if len(values) > 20 or any(not v.is_integer() for v in values) else "classification"


def _form(metric: Metric | None, kind: str, targets: int, numeric: bool) -> Form:
    if metric is not None:
        if metric.form == "probability" and metric.exclusive and targets > 1:
            return "probabilities"
        if metric.form == "number" and not numeric:
            return "label"
        return metric.form
    return "number" if kind == "regression" and numeric else "label"


def _numeric(entry: Entry, answers: Answers, path: Path) -> bool:
    """Whether all true values are numbers. Raises `TaskError` where most are and some aren't: no error can be computed of those."""
    values = [v for column in answers.truth.values() for v in column]
    numbers = sum(_number(v) for v in values)
    if len(values) / 2 < numbers < len(values):
        raise TaskError(
            f"{len(values) - numbers} of {len(values)} true values of DSBench task {entry.name!r} are not numbers, the others are",
            hint=f"mend {str(path)!r}",
        )
    return numbers == len(values)


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("DSBench tasks need pandas", hint="pip install 'mappa-graph[dsbench]'") from error
    return pandas


def _head(path: Path) -> Any:
    try:
        return _pandas().read_csv(path, nrows=_TABLE_ROWS)
    except (ValueError, OSError) as error:
        raise TaskError(f"the training file {str(path)!r} can't be read: {error}") from error


def _labels(
    train: Path, targets: Sequence[str], answers: Answers, form: Form
) -> tuple[dict[str, list[str]] | None, dict[str, str] | None, dict[str, Counter[str]]]:
    """Known labels (of the answers and the training file), of two labels the positive one (the later), and the training counts."""
    if form not in ("label", "probability", "ranking"):
        return None, None, {}
    training = {target: _count(train, target) for target in targets}
    labels = {t: sorted(set(answers.truth[t]) | set(training[t]), key=_order) for t in targets}
    positive = {t: v[-1] for t, v in labels.items() if len(v) == 2}
    return labels, positive or None, training


def _count(train: Path, target: str) -> Counter[str]:
    """How often each value of a column of the training file occurs, as far as they are few enough to be labels."""
    seen: Counter[str] = Counter()
    if target not in _header(train):
        return seen
    try:
        parts = _pandas().read_csv(train, usecols=lambda c: c.strip() == target, dtype=str, keep_default_na=False, chunksize=_CHUNK)
        for part in parts:
            seen.update(value for value in part.iloc[:, 0].str.strip().tolist() if value)
            if len(seen) > _LABELS_MAX:
                break
    except (ValueError, OSError) as error:
        raise TaskError(f"the training file {str(train)!r} can't be read: {error}") from error
    return seen


def _order(label: str) -> tuple[float, str]:
    return (float(label), label) if _number(label) else (float("inf"), label)
