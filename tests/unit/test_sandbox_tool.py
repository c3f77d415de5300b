from __future__ import annotations

import pytest

from mappa_graph.record import Execution, ExecutionErrorInfo
from mappa_graph.sandboxes import as_text, code_blocks
from mappa_graph.sandboxes.preview import parse


def test_python_blocks_are_found_in_order_and_others_left() -> None:
    text = "a\n```python\nx = 1\n\ny = 2\n```\n```bash\nls\n```\n  ```py\n  z\n  ```\n~~~python3\nq\n~~~\n```\nplain\n```"
    assert code_blocks(text) == ["x = 1\n\ny = 2", "z", "q"]


def test_a_fence_inside_a_longer_fence_is_content() -> None:
    assert code_blocks('````python\ns = """\n```\n"""\n````') == ['s = """\n```\n"""']


def test_a_block_that_was_cut_off_is_not_run() -> None:
    assert code_blocks("```python\nimport os\nos.remo") == []


def test_the_model_is_told_output_value_error_and_note() -> None:
    error = ExecutionErrorInfo("ValueError", "bad", "Traceback\nValueError: bad")
    text = as_text(Execution("1", "error", stdout="out\n", stderr="warn\n", result="5", error=error, note="state lost"))
    assert text == "out\nstderr:\nwarn\n5\nTraceback\nValueError: bad\n[note] state lost"
    assert as_text(Execution("1", "ok")) == "(no output)"


def test_what_the_model_is_told_is_bounded_and_keeps_the_end_of_a_traceback() -> None:
    error = ExecutionErrorInfo("E", "m", "line\n" * 100_000 + "E: the end")
    text = as_text(Execution("1", "error", stdout="x" * 100_000, error=error), limit=2000)
    assert len(text) < 2200
    assert text.endswith("E: the end")


@pytest.mark.parametrize(
    "said",
    [
        "",
        "@",
        "@null@",
        "@[1]@",
        '@{"shape": "x"}@',
        '@{"shape": [1e999]}@',
        '@{"columns": [1]}@',
        '@{"columns": 5}@',
        "@" + "[" * 99_999 + "@",
    ],
)
def test_a_forged_preview_is_an_error_and_not_an_exception(said: str) -> None:
    assert parse("f.csv", said, "@").error


def test_a_preview_is_bounded_and_free_of_escapes() -> None:
    good = parse("f.csv", 'x@{"type": "T", "shape": [2, 1], "columns": [["a", "int64"]], "head": "\\u001b[31mh"}@', "@")
    assert (good.shape, good.columns, good.head) == ((2, 1), (("a", "int64"),), "h")
    assert len(parse("f", '@{"head": "' + "x" * 100_000 + '"}@', "@").head) < 9000
