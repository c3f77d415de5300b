"""The public benchmark's task lists and where their files lie; `public` makes tasks of them.

Lists are data: JSON, or the benchmark's own Python literals, which are read and never run.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mappa_graph.errors import TaskError

PROMPTS = "dsbench_modeling_cleaned_prompts.json"
_LISTS = {"train": ("dsbench_modeling_train.json",), "heldout": ("dsbench_modeling_eval.json", "dsbench_modeling_test.json")}
_REPOSITORY_LIST = "data.json"
_HELDOUT_EVERY = 5
ANSWER = "test_answer.csv"
_KNOWN: Mapping[str, Mapping[str, str]] = {
    "liverpool-ion-switching": {
        "metric": "f1_macro",
        "task_type": "classification",
        "target_column": "open_channels",
        "id_column": "time",
    },
}
"""What the competition's page says of tasks that the cleaned prompts leave out."""


@dataclass(frozen=True)
class Entry:
    """A task as the lists give it, paths not yet found."""

    name: str
    prompt: str
    data_type: str
    train: str
    test: str
    answer: str
    clean: Mapping[str, Any] = field(default_factory=dict)


def kind_of(entry: Entry) -> Literal["classification", "regression", ""]:
    """The kind that the cleaned prompt or the list gives; extraction of text counts as classification. Empty where neither says."""
    given = str(entry.clean.get("task_type") or entry.data_type).lower()
    if not given:
        return ""
    return "regression" if given == "regression" else "classification"


def entries_of(folder: Path, split: str, tasks_file: str | Path | None, prompts: Mapping[str, Any]) -> list[Entry]:
    """The tasks of "train", "heldout" or "all" as the folder's lists, or the one given, have them. Raises `TaskError`."""
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


def _of_split(entries: list[Entry], split: str) -> list[Entry]:
    """One list's tasks of a split: of each kind about every fifth is held out, by a hash of its name, so that the split never changes."""
    entries = _unique(entries)
    if split == "all":
        return entries
    held: set[str] = set()
    for kind in sorted({kind_of(e) for e in entries}):
        ranked = sorted((e.name for e in entries if kind_of(e) == kind), key=lambda n: hashlib.sha256(n.encode()).digest())
        held.update(ranked[: round(len(ranked) / _HELDOUT_EVERY)])
    return [e for e in entries if (e.name in held) == (split == "heldout")]


def _unique(entries: list[Entry]) -> list[Entry]:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise TaskError(f"the DSBench task {entry.name!r} is listed twice", hint="task ids must be unique")
        seen.add(entry.name)
    return entries


def _read_list(path: Path, prompts: Mapping[str, Any]) -> list[Entry]:
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
        clean = prompts.get(name) or _KNOWN.get(name)
        entries.append(
            Entry(
                name,
                str(row.get("prompt") or "") or _description(path.parent, name),
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


def _description(folder: Path, name: str) -> str:
    """The benchmark's own description of a task, which its list doesn't hold."""
    found = find_file(folder, f"data/task/{name}.txt")
    return found.read_text(encoding="utf-8-sig", errors="replace") if found else ""


def _defaults(name: str, base: str) -> dict[str, str]:
    return {"train_file": f"{base}/train.csv", "test_file": f"{base}/test.csv", "answer_dir": f"data/answers/{name}"}


def _rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON list or of JSON lines. The benchmark's own `data.json` has Python's quotes: read as literals, never run."""
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


def prompts_of(folder: Path, given: str | Path | None) -> Mapping[str, Any]:
    """The cleaned prompts by task; none where no file is given and the folder has none."""
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


def _parts(path: str) -> list[str]:
    return [p for p in path.replace("\\", "/").split("/") if p not in ("", ".", "..")]


def find_file(folder: Path, path: str) -> Path | None:
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


def wanted_path(path: str) -> str:
    """A path as the user should lay it out: from `data` on."""
    parts = _parts(path)
    for start in ("data_resplit", "answers"):
        if start in parts:
            return "/".join(("data", *parts[parts.index(start) :]))
    return "/".join(parts)
