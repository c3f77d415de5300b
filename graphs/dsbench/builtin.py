"""Tasks that need no download: training, test and answer files made from tables inside PyPI packages (`recipes`).

Everything follows from the recipe and the seed: which rows are used, in which order, which values are blanked out, the ids, and who is
a test row. Ids are drawn at random without repetition, so neither an id nor a row's place says anything of the source table's order or
of the target, and the answers are made in this process's memory, on no disk. The one thing to know: the tables themselves are public and
installed. What a sandbox is given cannot tell the answers, but code that goes and loads the source table could look them up:
`recipes.source_folders` names what a sandbox should hide, and `looks_up_source` recognises such code.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError, TaskError

from .answers import Answers
from .competition import find
from .describe import column_table, metric_line, submission_rules
from .recipes import RECIPES, SOURCES, Recipe
from .sample import placeholders, sample_submission

if TYPE_CHECKING:
    import pandas as pd

TEST_SHARE = 0.3
_BY_NAME: Mapping[str, Recipe] = {r.name: r for r in RECIPES}
_LOOKUP = re.compile(r"\b(?:" + "|".join(re.escape(s).replace(r"\.", r"(?:\.|\s+import\s+)") for s in SOURCES) + r")\b")


@dataclass(frozen=True)
class Built:
    """A made task. `answers` stays here; `files` and `prompt` are what agents are given."""

    prompt: str
    files: Mapping[str, bytes]
    answers: Answers
    labels: Mapping[str, tuple[str, ...]] | None
    placeholder: Mapping[str, str]


def names(split: str = "all") -> list[str]:
    """Names of the built-in tasks of "train", "heldout" or "all", classification and regression in turn."""
    if split not in ("train", "heldout", "all"):
        raise ConfigError(f"the built-in DSBench tasks have no split {split!r}", hint="they have: train, heldout, all")
    chosen = [r for r in RECIPES if split in ("all", r.split)]
    kinds = [[r.name for r in chosen if r.kind == kind] for kind in ("classification", "regression")]
    return [name for pair in zip(*kinds, strict=True) for name in pair]


def tasks(split: str = "train", seed: int = 0) -> list[Task]:
    """The built-in tasks of a split. Raises `ConfigError` where the packages with their tables are not installed."""
    return [_task(_BY_NAME[name], seed) for name in names(split)]


def _task(recipe: Recipe, seed: int) -> Task:
    built = build(recipe.name, seed)
    metric = find(recipe.metric)
    assert metric is not None
    key = f"builtin:{recipe.name}@{seed}"
    data: dict[str, Any] = {
        "kind": recipe.kind,
        "id_column": recipe.id_column,
        "targets": list(recipe.targets),
        "labels": None if built.labels is None else {t: list(v) for t, v in built.labels.items()},
        "positive": {recipe.targets[0]: recipe.positive} if recipe.positive else None,
        "metric": metric.name,
        "form": metric.form,
        "placeholder": dict(built.placeholder),
        "files": dict.fromkeys(built.files, key),
        "answers": key,
    }
    return Task(id=f"builtin/{recipe.name}", prompt=built.prompt, stratum=recipe.kind, data=data)


@lru_cache(maxsize=64)
def build(name: str, seed: int) -> Built:
    """The files and answers of one built-in task; the same for the same name and seed."""
    if name not in _BY_NAME:
        raise TaskError(f"there is no built-in DSBench task {name!r}", hint=f"there are: {', '.join(_BY_NAME)}")
    recipe = _BY_NAME[name]
    try:
        import numpy as np

        frame = recipe.load()
    except ImportError as error:
        raise ConfigError(
            f"the built-in DSBench tasks need the package {error.name!r}", hint="pip install 'mappa-graph[dsbench]'"
        ) from error
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    targets = list(recipe.targets)
    frame = frame.dropna(subset=targets)
    frame = frame.iloc[rng.permutation(len(frame))[: recipe.rows]].reset_index(drop=True)
    for column, share in recipe.masked.items():
        frame[column] = frame[column].mask(rng.random(len(frame)) < share)
    numbers = 10_000 + rng.choice(80_000, size=len(frame), replace=False)
    frame.insert(0, recipe.id_column, [f"{recipe.id_prefix}{n}" for n in numbers] if recipe.id_prefix else numbers)
    tested = _tested(frame, recipe, rng)
    train, test = frame[~tested].reset_index(drop=True), frame[tested].reset_index(drop=True)
    answers = Answers(tuple(str(i) for i in test[recipe.id_column]), {t: tuple(_text(v) for v in test[t].tolist()) for t in targets})
    labels = {t: tuple(sorted({_text(v) for v in frame[t].tolist()}, key=_order)) for t in targets} if _labelled(recipe) else None
    shown = test.drop(columns=targets)
    metric = find(recipe.metric)
    assert metric is not None
    constant = placeholders(targets, metric.form, labels, {t: [_text(v) for v in train[t].tolist()] for t in targets})
    prompt = _prompt(recipe, train, len(test), labels)
    files = {
        "train.csv": _csv(train),
        "test.csv": _csv(shown),
        "sample_submission.csv": sample_submission(answers.ids, recipe.id_column, constant),
        "description.txt": (prompt + "\n").encode(),
    }
    return Built(prompt, files, answers, labels, constant)


def _labelled(recipe: Recipe) -> bool:
    return recipe.kind == "classification"


def _tested(frame: pd.DataFrame, recipe: Recipe, rng: Any) -> Any:
    """Which rows are the test's: about `TEST_SHARE`, of every label where there are labels, and at least one of each on both sides."""
    import numpy as np

    tested = np.zeros(len(frame), dtype=bool)
    groups = [np.asarray(g) for g in frame.groupby(recipe.targets[0]).indices.values()] if _labelled(recipe) else [np.arange(len(frame))]
    for rows in groups:
        count = min(max(1, round(TEST_SHARE * len(rows))), len(rows) - 1)
        tested[rng.permutation(rows)[:count]] = True
    return tested


def _csv(frame: pd.DataFrame) -> bytes:
    buffer = io.StringIO()
    frame.to_csv(buffer, index=False, lineterminator="\n")
    return buffer.getvalue().encode()


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _order(label: str) -> tuple[float, str]:
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label


def _prompt(recipe: Recipe, train: pd.DataFrame, tests: int, labels: Mapping[str, Sequence[str]] | None) -> str:
    metric = find(recipe.metric)
    assert metric is not None
    targets = ", ".join(recipe.targets)
    positive = {recipe.targets[0]: recipe.positive} if recipe.positive else None
    return "\n".join(
        (
            recipe.title,
            f"Predict {targets} of every row of test.csv. This is {recipe.kind}.",
            metric_line(metric, recipe.metric),
            "",
            "Files:",
            f"- train.csv: {len(train)} rows with {targets}",
            f"- test.csv: {tests} rows with the same columns but without {targets}",
            "- sample_submission.csv: the form of a submission; its predictions are placeholders",
            "",
            "Columns of train.csv:",
            column_table(train, notes={recipe.id_column: "identifies a row, says nothing of the target", **recipe.notes}),
            "",
            submission_rules(recipe.id_column, recipe.targets, metric.form, labels, positive, metric),
        )
    )


def looks_up_source(code: str) -> str | None:
    """The package that a piece of code imports to get at a built-in task's source table, or None. For a coach's rules."""
    found = _LOOKUP.search(code)
    return re.sub(r"\s+import\s+", ".", found[0]).removeprefix("from ").strip() if found else None
