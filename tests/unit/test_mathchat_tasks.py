"""Word problems are disjoint and solvable by construction; problem files are read whole or refused by name."""

import json
import re

import pytest

from mappa_graph.errors import ConfigError, TaskError
from mappa_graph.graphs.mathchat import tasks
from mappa_graph.graphs.mathchat.arithmetic import evaluate, plain
from mappa_graph.graphs.mathchat.tasks import load_tasks, split_of, word_problems


def leading_numbers(task):
    first, second = re.findall(r"\d+", task.prompt)[:2]
    return int(first), int(second)


def test_no_pair_of_leading_numbers_is_in_both_splits_whatever_the_seed():
    train = {leading_numbers(t) for seed in range(3) for t in word_problems("train", 1500, seed)}
    heldout = {leading_numbers(t) for seed in range(3) for t in word_problems("heldout", 700, seed)}
    assert not train & heldout
    assert all(split_of(*pair) == "heldout" for pair in heldout)


def test_references_are_what_the_expression_comes_to_and_the_numbers_are_those_of_the_text():
    for task in word_problems("train", 600) + word_problems("heldout", 300):
        value = evaluate(task.data["expression"])
        assert value is not None and value.denominator == 1 and value >= 0
        assert task.reference == plain(value)
        assert re.findall(r"\d+", task.data["expression"]) == re.findall(r"\d+", task.prompt)


def test_levels_are_balanced_and_grow_in_operations_and_size():
    by_level = {level: [t for t in word_problems("train", 300) if t.stratum == f"level-{level}"] for level in (1, 2, 3)}
    assert [len(made) for made in by_level.values()] == [100, 100, 100]
    operations = {level: {len(re.findall(r"[+*-]", t.data["expression"])) for t in made} for level, made in by_level.items()}
    assert operations == {1: {1}, 2: {2}, 3: {2, 3}}
    assert {op for t in by_level[1] for op in re.findall(r"[+*-]", t.data["expression"])} == {"+", "-", "*"}
    mean = {level: sum(int(t.reference) for t in made) / len(made) for level, made in by_level.items()}
    assert mean[3] > 2 * mean[2] > 2 * mean[1]


def test_a_longer_list_starts_with_the_shorter_one_and_ids_and_texts_are_unique():
    made = word_problems("train", 5000, seed=4)
    assert word_problems("train", 50, seed=4) == made[:50]
    assert word_problems("train", 50, seed=5) != made[:50]
    assert len({t.id for t in made}) == len({t.prompt for t in made}) == 5000


@pytest.mark.parametrize("bad", [{"split": "test", "n": 1}, {"split": "train", "n": -1}, {"split": "train", "n": 1, "levels": (4,)}])
def test_impossible_requests_are_refused(bad):
    with pytest.raises(ConfigError):
        word_problems(**bad)


def test_more_problems_than_there_are_is_an_error_and_not_a_hang(monkeypatch):
    monkeypatch.setattr(tasks, "TEMPLATES", {1: (tasks.Template("{a} and {b}?", "{a} + {b}", ((1, 1), (1, 9))),)})
    with pytest.raises(ConfigError, match=r"only \d of 1000 different word problems"):
        word_problems("train", 1000, levels=(1,))


ROWS = [
    {"prompt": "1 + 1?", "answer": "2", "id": "a", "year": 1983},
    {"prompt": "2 + 2?", "answer": 4, "level": 2},
]


def written(tmp_path, text, name="tasks.json"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("as_lines", [False, True])
def test_lists_and_lines_load_alike(tmp_path, as_lines):
    text = "\n".join(json.dumps(row) for row in ROWS) + "\n\n" if as_lines else json.dumps(ROWS)
    loaded = load_tasks(written(tmp_path, text))
    assert [(t.prompt, t.reference, t.stratum) for t in loaded] == [("1 + 1?", "2", ""), ("2 + 2?", "4", "2")]
    assert loaded[0].id == "a" and loaded[0].data == {"year": 1983} and loaded[1].id in ("row-2", "line-2")
    assert loaded.skipped == ()


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "", "answer": "1"}, "row 2: field 'prompt' is \"\""),
        ({"answer": "1"}, "row 2: field 'prompt' is null"),
        ({"prompt": "x", "answer": None}, "row 2: field 'answer' is null"),
        ({"prompt": "x", "answer": True}, "row 2: field 'answer' is true"),
        ({"prompt": "x", "answer": ["1"]}, "row 2: field 'answer' is"),
        ({"prompt": "x", "answer": float("nan")}, "row 2: field 'answer' is NaN"),
        ({"prompt": "x", "answer": "1", "id": "a"}, "row 2: field 'id' is \"a\""),
        ({"prompt": "x", "answer": "1", "id": {}}, "row 2: field 'id' is {}"),
        (["x"], "row 2: field '(the whole row)'"),
    ],
)
def test_a_bad_row_is_named_and_refused_or_skipped_and_counted(tmp_path, row, named):
    path = written(tmp_path, json.dumps([ROWS[0], row, ROWS[1]]))
    with pytest.raises(TaskError) as error:
        load_tasks(path)
    assert f"{path}, {named}" in str(error.value) and "on_bad_row" in str(error.value)
    loaded = load_tasks(path, on_bad_row="skip")
    assert len(loaded) == 2 and len(loaded.skipped) == 1 and named in loaded.skipped[0]


def test_a_broken_line_is_a_bad_row_and_a_broken_list_a_bad_file(tmp_path):
    lines = written(tmp_path, json.dumps(ROWS[0]) + "\n{oops\n" + json.dumps(ROWS[1]), "tasks.jsonl")
    with pytest.raises(TaskError, match=r"line 2: field '\(the whole line\)' is \"\{oops\""):
        load_tasks(lines)
    assert len(load_tasks(lines, on_bad_row="skip")) == 2
    with pytest.raises(TaskError, match="not valid JSON"):
        load_tasks(written(tmp_path, "[{"), on_bad_row="skip")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00", b'[{"prompt": 1}]'])
def test_a_file_without_a_usable_task_is_refused(tmp_path, content):
    with pytest.raises(TaskError, match=r"can't be read|holds no usable task"):
        load_tasks(written(tmp_path, content), on_bad_row="skip")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"nowhere\.json"):
        load_tasks(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("text", "value"),
    [("12 + 3 * 4", 24), ("(2 + 3) * 4", 20), ("-3 - -4", 1), ("7 // 2", 3), ("2 ** 10", 1024), ("0.1 + 0.2", None)],
)
def test_arithmetic_is_exact(text, value):
    assert evaluate(text) == (value if value is not None else evaluate("3 / 10"))


@pytest.mark.parametrize(
    "text", ["9**9**9", "9**9**9**9", "1/0", "x + 1", "(" * 199, "1" * 300, "__import__('os')", "1 if 1 else 2", "", "1e999", "9" * 150]
)
def test_hostile_arithmetic_is_not_computed(text):
    assert evaluate(text) is None
