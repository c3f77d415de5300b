"""Problems: word problems made to measure, and files of real ones.

`word_problems` draws from a few templates per level. Training and held-out problems differ by construction: the first two numbers
of a problem decide by a hash which split it may be in, so that no pair of numbers is ever seen in both, whatever the seed and the
count. `load_tasks` reads problem files and names every row it can't use.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError, TaskError

from .arithmetic import evaluate, plain

NAMES = ("Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Zoe", "Max", "Ida", "Jon", "Kim")
OBJECTS = ("pens", "apples", "books", "cards", "coins", "shells", "eggs", "cups", "nuts", "rings", "stamps", "balls")
SPLITS = ("train", "heldout")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Template:
    """`text` and `expression` share the slots a, b, c, d; `spans` gives each slot's lowest and highest number, in order."""

    text: str
    expression: str
    spans: tuple[Span, ...]


_ONE: Span = (2, 30)
_FEW: Span = (3, 12)
_MANY: Span = (31, 60)
TEMPLATES: dict[int, tuple[Template, ...]] = {
    1: (
        Template("{n} has {a} {o}. {n} buys {b} more. How many {o} now?", "{a} + {b}", (_ONE, _ONE)),
        Template("{n} finds {a} {o} and then {b} {o}. How many {o} in all?", "{a} + {b}", (_ONE, _ONE)),
        Template("{n} has {a} {o}. {n} gives away {b}. How many are left?", "{a} - {b}", (_MANY, _ONE)),
        Template("{n} had {a} {o} and lost {b}. How many are left?", "{a} - {b}", (_MANY, _ONE)),
        Template("{n} has {a} boxes with {b} {o} each. How many {o} in all?", "{a} * {b}", (_FEW, _FEW)),
        Template("{n} gets {a} {o} a day for {b} days. How many {o} in all?", "{a} * {b}", (_FEW, _FEW)),
    ),
    2: (
        Template("{n} has {a} {o}. {n} buys {b} more and gives away {c}. How many are left?", "{a} + {b} - {c}", (_MANY, _ONE, _ONE)),
        Template("{n} has {a} boxes with {b} {o} each and finds {c} more. How many {o} now?", "{a} * {b} + {c}", (_FEW, _FEW, _ONE)),
        Template("{n} has {a} boxes with {b} {o} each and loses {c}. How many are left?", "{a} * {b} - {c}", ((6, 12), (6, 12), _ONE)),
        Template("{n} has {a} red and {b} blue {o} in each of {c} boxes. How many {o} in all?", "({a} + {b}) * {c}", (_FEW, _FEW, _FEW)),
    ),
    3: (
        Template(
            "{n} has {a} boxes with {b} {o} each and {c} bags with {d} {o} each. How many {o} in all?",
            "{a} * {b} + {c} * {d}",
            ((11, 30), (11, 30), _FEW, _FEW),
        ),
        Template(
            "{n} has {a} {o}. {n} buys {b} more and gives away {c}. How many are left?",
            "{a} + {b} - {c}",
            ((100, 500), (61, 99), (31, 99)),
        ),
        Template(
            "{n} has {a} boxes with {b} {o} each, finds {c} more and loses {d}. How many are left?",
            "{a} * {b} + {c} - {d}",
            ((11, 30), (11, 30), (31, 99), _ONE),
        ),
    ),
}
LEVELS = tuple(TEMPLATES)


def split_of(first: int, second: int) -> str:
    """The only split that a problem with these two leading numbers may be in: about a fifth of the pairs are held out."""
    return "heldout" if zlib.crc32(f"{first},{second}".encode()) % 5 == 0 else "train"


def word_problems(split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Task]:
    """`n` different word problems, the levels in turn; the same arguments give the same list, and a longer list starts with a shorter one.

    Level 1 has one operation, level 2 two, level 3 two or three with larger numbers. `reference` is a whole number as text,
    `stratum` is "level-1" and so on, and `data` holds `level` and `expression`. Raises `ConfigError` for an unknown split or level, or
    more problems than can be made.
    """
    if split not in SPLITS:
        raise ConfigError(f"word problems have no split {split!r}", hint=f"they have: {', '.join(SPLITS)}")
    wanted = tuple(levels)
    unknown = [level for level in wanted if level not in TEMPLATES]
    if unknown or not wanted:
        raise ConfigError(f"levels {list(wanted)!r} of word problems are not known", hint=f"choose from {list(LEVELS)}")
    if n < 0:
        raise ConfigError(f"the number of word problems is {n}", hint="give 0 or more")
    rng = random.Random(f"{split}/{seed}/{wanted}")
    made: dict[str, Task] = {}
    misses = 0
    while len(made) < n:
        task = _draw(rng, split, wanted[len(made) % len(wanted)])
        if task is None or task.prompt in made:
            misses += 1
            if misses > 5000:
                raise ConfigError(f"only {len(made)} of {n} different word problems could be made for the {split!r} split")
            continue
        made[task.prompt] = task
        misses = 0
    return list(made.values())


def _draw(rng: random.Random, split: str, level: int) -> Task | None:
    template = rng.choice(TEMPLATES[level])
    numbers = [rng.randint(*span) for span in template.spans]
    if split_of(numbers[0], numbers[1]) != split:
        return None
    slots: dict[str, Any] = dict(zip("abcd", numbers, strict=False), n=rng.choice(NAMES), o=rng.choice(OBJECTS))
    prompt, expression = template.text.format(**slots), template.expression.format(**slots)
    value = evaluate(expression)
    if value is None or value < 0:
        return None
    digest = hashlib.sha256(prompt.encode()).hexdigest()[:12]
    return Task(
        id=f"{split}-{level}-{digest}",
        prompt=prompt,
        reference=plain(value),
        stratum=f"level-{level}",
        data={"level": level, "expression": expression},
    )


class LoadedTasks(list[Task]):
    """The tasks of a file; `skipped` holds the message of every row that was passed over."""

    def __init__(self, tasks: Sequence[Task] = (), skipped: Sequence[str] = ()) -> None:
        super().__init__(tasks)
        self.skipped = tuple(skipped)


class _BadRow(Exception):
    def __init__(self, field: str, value: Any, wanted: str) -> None:
        shown = json.dumps(value, default=str, ensure_ascii=False)
        super().__init__(f"field {field!r} is {shown if len(shown) <= 80 else shown[:77] + '...'}, not {wanted}")


def load_tasks(path: str | Path, *, on_bad_row: Literal["error", "skip"] = "error") -> LoadedTasks:
    """The problems of a JSON list or a JSONL file of objects with `prompt`, `answer`, and perhaps `id`, `level` or `stratum`.

    Other fields are kept in `Task.data`. A row without a usable prompt or answer, or with an id that was there before, raises `TaskError`
    with the file, the row (from 1), the field and its value; with `on_bad_row="skip"` it is passed over and listed in `.skipped`.
    """
    if on_bad_row not in ("error", "skip"):
        raise ConfigError(f"on_bad_row is {on_bad_row!r}", hint='use "error" or "skip"')
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"the task file {str(path)!r} can't be read: {error}", hint="give a JSON or JSONL file in UTF-8") from error
    tasks: list[Task] = []
    skipped: list[str] = []
    seen: dict[str, str] = {}
    for place, row in _rows(path, text):
        try:
            if isinstance(row, _BadRow):
                raise row
            task = _task(place, row)
            if task.id in seen:
                raise _BadRow("id", task.id, f"an id of its own ({seen[task.id]} has the same)")
        except _BadRow as bad:
            message = f"{path}, {place}: {bad}"
            if on_bad_row == "error":
                raise TaskError(message, hint='mend the row, or pass over bad rows with on_bad_row="skip"') from None
            skipped.append(message)
            continue
        seen[task.id] = place
        tasks.append(task)
    if not tasks:
        raise TaskError(f"the task file {str(path)!r} holds no usable task", hint=skipped[0] if skipped else "it is empty")
    return LoadedTasks(tasks, skipped)


def _rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"the task file {str(path)!r} is not valid JSON: {error}", hint="a list of objects, or one object a line"
            ) from error
        yield from ((f"row {i}", row) for i, row in enumerate(rows, start=1))
        return
    for i, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"line {i}", json.loads(line)
            except (ValueError, RecursionError) as error:
                yield f"line {i}", _BadRow("(the whole line)", line.strip(), f"valid JSON ({error})")


def _task(place: str, row: Any) -> Task:
    if not isinstance(row, dict):
        raise _BadRow("(the whole row)", row, "an object with prompt and answer")
    prompt, answer, name = row.get("prompt"), row.get("answer"), row.get("id")
    if not isinstance(prompt, str) or not prompt.strip():
        raise _BadRow("prompt", prompt, "a text")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip() or answer != answer:
        raise _BadRow("answer", answer, "a text or a number")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip()):
        raise _BadRow("id", name, "a text or a whole number")
    level = row.get("stratum", row.get("level", ""))
    return Task(
        id=str(name) if name is not None else re.sub(r"\W+", "-", place),
        prompt=prompt.strip(),
        reference=str(answer).strip(),
        stratum="" if level is None else str(level),
        data={key: value for key, value in row.items() if key not in ("prompt", "answer", "id")},
    )
