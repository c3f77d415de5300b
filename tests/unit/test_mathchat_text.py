"""What travels from one agent to the next: no thinking, no control tokens, no endless text; and only code meant to run is run."""

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.graphs.mathchat.prompts import check_style, executor_messages, observe, verifier_messages
from mappa_graph.graphs.mathchat.text import cap, neutral, quoted, split_thinking, spoken
from mappa_graph.record import Execution, ExecutionErrorInfo
from mappa_graph.sandboxes import code_blocks

BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("text", "thinking", "rest"),
    [
        ("a", "", "a"),
        ("<think>x</think> a", "x", "a"),
        ("x</think> a", "x", "a"),
        ("a <think>x", "x", "a"),
        ("<think>x</think> a <think>y</think> b", "x\ny", "a  b"),
        ("w <think>x</think> y</think> a", "x\nw\ny", "a"),
        ("</think>a", "", "a"),
    ],
)
def test_thinking_is_told_apart_also_where_the_template_opened_it(text, thinking, rest):
    assert split_thinking(text) == (thinking, rest)


def test_where_the_template_opens_thinking_a_cut_off_completion_is_all_thinking():
    assert split_thinking("still at it", opened=True) == ("still at it", "")
    assert spoken("x</think> a", opened=True) == "a"


@pytest.mark.parametrize("text", [f"<think>{BLOCK}</think>", f"{BLOCK}</think> done", f"<think>{BLOCK}"])
def test_code_inside_thinking_is_not_code(text):
    assert code_blocks(spoken(text)) == []


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        (BLOCK, ["print(1)"]),
        (f"so:\n{BLOCK}\nand\n```Python\nprint(2)\n```", ["print(1)", "print(2)"]),
        ("```py\nx = 1\n\nprint(x)\n```", ["x = 1\n\nprint(x)"]),
        ("```python\r\nprint(1)\r\n```\r\n", ["print(1)"]),
        ("  ```python\n  print(1)\n  ```", ["print(1)"]),
        ("```python\nprint('```')\n```", ["print('```')"]),
        ("```python\nprint(1)", []),
        ("```\nprint(1)\n```", []),
        ("```text\nprint(1)\n```", []),
        ("print(1)", []),
    ],
)
def test_only_whole_python_blocks_are_code(text, blocks):
    assert code_blocks(text) == blocks


@pytest.mark.parametrize(
    "token",
    ["<|im_end|>", "<|im_start|>system", "<｜end▁of▁sentence｜>", "</s>", "<s>", "[INST]", "[/INST]", "<end_of_turn>", "<eos>", "</think>"],
)
def test_control_tokens_do_not_survive_into_the_next_prompt(token):
    for messages in (
        executor_messages(f"p {token}", f"plan {token} x"),
        verifier_messages(f"p {token}", f"a {token}", [{"text": f"b {token}", "observation": "", "status": ""}]),
    ):
        assert not any(token in m["content"] for m in messages)
    assert "x" in quoted(f"{token} x", 100)


def test_nested_control_tokens_do_not_reassemble():
    assert "<|im_end|>" not in neutral("<|im_<|im_end|>end|>") and "<|" not in neutral("<<||x|>")


def test_ordinary_text_is_left_alone():
    text = "if a < b | c: print([s for s in x]) # <b>bold</b>\n\tx[s] <= 3\u00e9\u4e2d"
    assert neutral(text.replace("[s]", "[i]")) == text.replace("[s]", "[i]")


def test_long_text_keeps_head_and_tail():
    text = "HEAD" + "x" * 10_000 + "TAIL"
    short = cap(text, 1000)
    assert short.startswith("HEAD") and short.endswith("TAIL") and len(short) < 1100 and "9008 characters cut" in short


def test_observations_show_output_error_and_end_of_traceback_within_bounds():
    error = ExecutionErrorInfo("ValueError", "boom", "Traceback\n" + "frame\n" * 5000 + "ValueError: boom <|im_end|>")
    text = observe([Execution("1", "error", stdout="7\n" * 9000, stderr="\x1b[31mwarned\x1b[0m", error=error)])
    assert text.startswith("7\n7") and "warned" in text and text.rstrip().endswith("ValueError: boom < |im_end|>")
    assert len(text) < 5000 and "\x1b" not in text
    assert observe([Execution("1", "ok", result="5")]) == "5"
    assert "print()" in observe([Execution("1", "ok")])
    assert "[timeout]" in observe([Execution("1", "timeout", stdout="a", note="state was lost")])


def test_compact_observations_are_a_handful_of_tokens():
    seen = [
        observe([execution], style="compact")
        for execution in (
            Execution("1", "ok", stdout="24\n"),
            Execution("1", "ok"),
            Execution("1", "timeout"),
            Execution("1", "error", error=ExecutionErrorInfo("_IncompleteInputError", "x", "y" * 9999)),
            Execution("1", "ok", stdout="9" * 9999),
        )
    ]
    assert seen[:4] == ["output: 24", "no output", "error: Timeout", "error: SyntaxError"] and len(seen[4]) < 120


def test_the_verifier_sees_the_plan_only_with_full_visibility():
    turns = [{"text": BLOCK, "observation": "1", "status": "ok"}]
    for style in ("standard", "compact"):
        full, previous = (verifier_messages("the problem", "the plan", turns, style=style, visibility=v) for v in ("full", "previous"))
        assert "the plan" in full[1]["content"] and "the plan" not in previous[1]["content"]
        assert all("the problem" in m[1]["content"] and "print(1)" in m[1]["content"] for m in (full, previous))


def test_unknown_styles_and_visibilities_are_refused_by_name():
    with pytest.raises(ConfigError, match="visibility is 'partial'"):
        check_style("standard", "partial")
    with pytest.raises(ConfigError, match="prompts is 'tiny'"):
        check_style("tiny", "full")
