"""The public DSBench modelling tasks, from files that the user has downloaded.

The folder holds task lists and, somewhere below it, the benchmark's unpacked `data.zip`:

    dsbench_modeling_train.json             {"prompt", "answer": null, "metadata": {"task_id", "data_type", "train_file", "test_file",
    dsbench_modeling_eval.json               "answer_dir", …}}, an object a line or one list; the second, where it is there, is held out
    dsbench_modeling_cleaned_prompts.json   task_id -> {"cleaned_prompt", "metric", "task_type", "target_column", "id_column"} (optional)
    data/data_resplit/<task_id>/train.csv
    data/data_resplit/<task_id>/test.csv
    data/answers/<task_id>/test_answer.csv

A list's paths may begin anywhere ("./data/DSBench/data/…"): the longest end of one that exists below the folder is used.

What the lists get wrong is set right by the files themselves, and noted: which columns are ids and targets is read from the answer
file's header where the cleaned prompt's names aren't in it, and a target that isn't numeric is never regression. The sample submission is
always made here (`sample`). A target column that a test file holds is taken out before a sandbox sees it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError, TaskError

from .answers import Answers, read_answers, resolve
from .competition import Form, Metric, find
from .describe import column_table, metric_line, submission_rules
from .sample import placeholders, sample_submission

ANSWER = "test_answer.csv"
PROMPTS = "dsbench_modeling_cleaned_prompts.json"
_LISTS = {"train": ("dsbench_modeling_train.json",), "heldout": ("dsbench_modeling_eval.json", "dsbench_modeling_test.json")}
_REPOSITORY_LIST = "data.json"
_HELDOUT_EVERY = 5
_LABELS_MAX = 1000
_TABLE_ROWS = 2000


@dataclass(frozen=True)
class _Entry:
    """A task as the lists give it, paths not yet found."""

    name: str
    prompt: str
    data_type: str
    train: str
    test: str
    answer: str
    clean: Mapping[str, Any] = field(default_factory=dict)


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
    entries = _entries(folder, split, tasks_file, _prompts(folder, prompts_file))
    found: list[Task] = []
    notes: list[str] = []
    absent: list[str] = []
    for entry in entries:
        sought = {"train": entry.train, "test": entry.test, "answer": entry.answer}
        paths = {name: _find(folder, path) for name, path in sought.items()}
        lacking = [f"{entry.name}: {_wanted(path)}" for name, path in sought.items() if paths[name] is None]
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
        train, test = Path(files["train.csv"]).read_bytes(), Path(files["test.csv"]).read_bytes()
    except OSError as error:
        raise TaskError(f"a file of DSBench task {task.id!r} can't be read: {error}") from error
    return {
        "train.csv": train,
        "test.csv": _without(test, data["targets"]),
        "sample_submission.csv": sample_submission(answers.ids, data["id_column"], data["placeholder"]),
        "description.txt": (task.prompt + "\n").encode(),
    }


def _without(test: bytes, targets: Sequence[str]) -> bytes:
    """A test file without target columns; as it is where it has none."""
    text = test.decode("utf-8-sig", errors="surrogateescape")
    header = next(csv.reader(io.StringIO(text, newline="")), [])
    if not {h.strip() for h in header} & set(targets):
        return test
    kept = [i for i, name in enumerate(header) if name.strip() not in targets]
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for row in csv.reader(io.StringIO(text, newline="")):
        if row:
            rows.writerow([row[i] for i in kept if i < len(row)])
    return out.getvalue().encode("utf-8", errors="surrogateescape")


# ---- the lists


def _entries(folder: Path, split: str, tasks_file: str | Path | None, prompts: Mapping[str, Any]) -> list[_Entry]:
    if tasks_file is not None:
        return _of_split(_read_list(_below(folder, tasks_file), prompts), split)
    lists = {name: next((folder / f for f in files if (folder / f).is_file()), None) for name, files in _LISTS.items()}
    train, heldout = lists["train"], lists["heldout"]
    if train is not None and heldout is not None:
        chosen = [p for name, p in (("train", train), ("heldout", heldout)) if split in (name, "all")]
        return _unique([e for p in chosen for e in _read_list(p, prompts)])
    single = (
        train or heldout or next((p for p in (folder / _REPOSITORY_LIST, folder / "data_modeling" / _REPOSITORY_LIST) if p.is_file()), None)
    )
    if single is None:
        raise TaskError(
            f"the DSBench folder {str(folder)!r} holds no task list",
            hint=f"put {_LISTS['train'][0]} (or the benchmark's data_modeling/{_REPOSITORY_LIST}) there, or name one with tasks_file",
        )
    return _of_split(_read_list(single, prompts), split)


def _of_split(entries: list[_Entry], split: str) -> list[_Entry]:
    """One list's tasks of a split: of each kind about every fifth is held out, by a hash of its name, so that the split never changes."""
    entries = _unique(entries)
    if split == "all":
        return entries
    held: set[str] = set()
    for kind in sorted({_kind_of(e) for e in entries}):
        ranked = sorted((e.name for e in entries if _kind_of(e) == kind), key=lambda n: hashlib.sha256(n.encode()).digest())
        held.update(ranked[: round(len(ranked) / _HELDOUT_EVERY)])
    return [e for e in entries if (e.name in held) == (split == "heldout")]


def _unique(entries: list[_Entry]) -> list[_Entry]:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise TaskError(f"the DSBench task {entry.name!r} is listed twice", hint="task ids must be unique")
        seen.add(entry.name)
    return entries


def _read_list(path: Path, prompts: Mapping[str, Any]) -> list[_Entry]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"the DSBench task list {str(path)!r} can't be read: {error}") from error
    entries = []
    for place, row in _rows(path, text):
        meta = row.get("metadata") if isinstance(row, dict) else None
        meta = meta if isinstance(meta, dict) else row
        name = meta.get("task_id") or meta.get("name") if isinstance(meta, dict) else None
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise TaskError(f"{path}, {place}: no usable task_id ({name!r})", hint='give metadata.task_id, e.g. "titanic"')
        base = f"data/data_resplit/{name}"
        fields = {key: str(meta.get(key) or default) for key, default in _defaults(name, base).items()}
        clean = prompts.get(name)
        entries.append(
            _Entry(
                name,
                str(row.get("prompt") or ""),
                str(meta.get("data_type") or ""),
                fields["train_file"],
                fields["test_file"],
                f"{fields['answer_dir'].rstrip('/')}/{ANSWER}",
                clean if isinstance(clean, dict) else {},
            )
        )
    if not entries:
        raise TaskError(f"the DSBench task list {str(path)!r} is empty")
    return entries


def _defaults(name: str, base: str) -> dict[str, str]:
    return {"train_file": f"{base}/train.csv", "test_file": f"{base}/test.csv", "answer_dir": f"data/answers/{name}"}


def _rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON list or of JSON lines. The benchmark's own `data.json` has Python's quotes: read as literals, never run."""
    import ast

    try:
        if text.lstrip().startswith("["):
            yield from ((f"row {i}", row) for i, row in enumerate(json.loads(text), start=1))
            return
    except (ValueError, RecursionError) as error:
        raise TaskError(f"the DSBench task list {str(path)!r} is not valid JSON: {error}") from error
    for i, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {i}", json.loads(line)
        except (ValueError, RecursionError) as error:
            try:
                yield f"line {i}", ast.literal_eval(line.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise TaskError(f"{path}, line {i} is not valid JSON: {error}", hint="a list of objects, or one object a line") from None


def _prompts(folder: Path, given: str | Path | None) -> Mapping[str, Any]:
    path = _below(folder, given) if given is not None else folder / PROMPTS
    if given is None and not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"the cleaned prompts {str(path)!r} can't be read: {error}") from error
    if not isinstance(read, dict):
        raise TaskError(f"the cleaned prompts {str(path)!r} are not an object of task_id -> prompt")
    return read


def _below(folder: Path, name: str | Path) -> Path:
    return Path(name) if Path(name).is_absolute() or Path(name).is_file() else folder / name


# ---- the files


def _parts(path: str) -> list[str]:
    return [p for p in path.replace("\\", "/").split("/") if p not in ("", ".", "..")]


def _find(folder: Path, path: str) -> Path | None:
    """The file at the longest end of a path that exists below the folder (or below its `data` or `data_modeling`)."""
    given = Path(path)
    if given.is_absolute() and given.is_file():
        return given
    parts = _parts(path)
    for start in range(len(parts) - 1):
        for base in (folder, folder / "data", folder / "data_modeling"):
            candidate = base.joinpath(*parts[start:])
            if candidate.is_file():
                return candidate.resolve()
    return None


def _wanted(path: str) -> str:
    """A path as the user should lay it out: from `data` on."""
    parts = _parts(path)
    for start in ("data_resplit", "answers"):
        if start in parts:
            return "/".join(("data", *parts[parts.index(start) :]))
    return "/".join(parts)


# ---- one task


def _task(entry: _Entry, paths: Mapping[str, Path], notes: list[str]) -> Task:
    clean = entry.clean
    header = _header(paths["answer"], entry.name)
    id_column, targets, fits = _columns(entry, header, notes)
    answers = read_answers(str(paths["answer"]), id_column, tuple(targets))
    name = str(clean.get("metric") or "")
    metric = find(name)
    if metric is None:
        notes.append(f"{entry.name}: " + (f"its metric {name!r} is not known here" if name else "no metric is named"))
    kind = _kind_of(entry)
    numeric = all(_number(v) for t in targets for v in answers.truth[t])
    form = _form(metric, kind, len(targets), numeric)
    if kind == "regression" and form != "number":
        kind = "classification"
        notes.append(f"{entry.name}: listed as regression, but its targets are no numbers to be predicted; treated as classification")
    elif kind == "classification" and form == "number":
        kind = "regression"
        notes.append(f"{entry.name}: listed as classification, but {metric.name if metric else 'it'} wants numbers; treated as regression")
    frame = _head(paths["train"], entry.name)
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
            "Columns of train.csv:",
            column_table(frame),
            "",
            submission_rules(id_column, targets, form, labels, positive, metric),
        )
    )
    return Task(id=f"dsbench/{entry.name}", prompt=prompt, stratum=kind, data=data)


def _kind_of(entry: _Entry) -> Literal["classification", "regression"]:
    given = str(entry.clean.get("task_type") or entry.data_type).lower()
    return "regression" if given == "regression" else "classification"


def _header(path: Path, name: str) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = [h.strip() for h in next(csv.reader(file), [])]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TaskError(f"the answer file {str(path)!r} of DSBench task {name!r} can't be read: {error}") from error
    if len(header) < 2:
        raise TaskError(f"the answer file {str(path)!r} of DSBench task {name!r} has {len(header)} columns", hint="an id and a target")
    return header


def _columns(entry: _Entry, header: list[str], notes: list[str]) -> tuple[str, list[str], bool]:
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


def _form(metric: Metric | None, kind: str, targets: int, numeric: bool) -> Form:
    if metric is not None:
        if metric.form == "probability" and metric.exclusive and targets > 1:
            return "probabilities"
        if metric.form == "number" and not numeric:
            return "label"
        return metric.form
    return "number" if kind == "regression" and numeric else "label"


def _number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def _head(path: Path, name: str) -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError("DSBench tasks need pandas", hint="pip install 'mappa-graph[dsbench]'") from error
    try:
        return pd.read_csv(path, nrows=_TABLE_ROWS)
    except (ValueError, OSError) as error:
        raise TaskError(f"the training file {str(path)!r} of DSBench task {name!r} can't be read: {error}") from error


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
    with train.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        rows = csv.reader(file)
        header = [h.strip() for h in next(rows, [])]
        if target not in header:
            return seen
        place = header.index(target)
        for row in rows:
            if place < len(row) and (value := row[place].strip()):
                seen[value] += 1
                if len(seen) > _LABELS_MAX:
                    break
    return seen


def _order(label: str) -> tuple[float, str]:
    return (float(label), label) if _number(label) else (float("inf"), label)
