"""Answers are graded by what they mean, in any thread, and no text can make grading hang."""

import asyncio
import threading

import pytest

from mappa_graph.environment import Task
from mappa_graph.errors import TaskError
from mappa_graph.graphs.mathchat.factory import grade_state
from mappa_graph.graphs.mathchat.grading import Comparer, alternatives, boxed, grade, quick_grade


@pytest.mark.parametrize(
    ("text", "reference", "answer"),
    [
        ("so \\boxed{24}", "24", "24"),
        ("\\boxed{081}", "81", "081"),
        ("\\boxed{7} no, \\boxed{24}", "24", "24"),
        ("\\boxed {24.0}", "24", "24.0"),
        ("\\boxed{\\frac{1}{2}}", "0.5", "\\frac{1}{2}"),
        ("\\boxed{-\\dfrac{1}{2}}", "-1/2", "-\\dfrac{1}{2}"),
        ("\\boxed{1,234}", "1234", "1,234"),
        ("\\boxed{$24$}", "24", "$24$"),
        ("\\boxed{81}", "080 or 081 (both were accepted)", "81"),
        ("\\boxed{80}", "080 or 081 (both were accepted)", "80"),
        ("<think>\\boxed{3}</think>\\boxed{24}", "24", "24"),
        ("it may be \\boxed{3}</think> \\boxed{24}", "24", "24"),
    ],
)
def test_right_answers_are_right_without_math_verify(text, reference, answer):
    outcome = quick_grade(text, reference)
    assert outcome is not None and outcome.success and outcome.answer == answer
    assert grade(text, reference) == outcome


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("\\boxed{\\frac{2\\sqrt{3}}{6}}", "\\frac{\\sqrt{3}}{3}"),
        ("\\boxed{2^{10}}", "1024"),
        ("\\boxed{x = 24}", "24"),
        ("\\boxed{24 \\text{ apples}}", "24"),
        ("\\boxed{(1, 2)}", "(1,2)"),
        ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}"),
    ],
)
def test_algebra_is_compared_by_meaning(text, reference):
    assert grade(text, reference).success
    assert quick_grade(text, reference) is None


@pytest.mark.parametrize(
    ("text", "reference", "reason"),
    [
        ("24", "24", "no boxed answer"),
        ("", "24", "no boxed answer"),
        ("\\boxed{24", "24", "no boxed answer"),
        ("\\boxed{}", "24", "the box is empty"),
        ("<think>\\boxed{24}</think> done", "24", "no boxed answer"),
        ("\\boxed{24}</think> done", "24", "no boxed answer"),
        ("<think> \\boxed{24}", "24", "no boxed answer"),
        ("\\boxed{25}", "24", "the answer 25 is not 24"),
        ("\\boxed{82}", "080 or 081 (both were accepted)", "is not"),
        ("\\boxed{none}", "24", "is not"),
        ("\\boxed{0.333}", "1/3", "is not"),
        ("\\boxed{24, 25}", "24", "is not"),
    ],
)
def test_wrong_answers_say_why(text, reference, reason):
    outcome = grade(text, reference)
    assert not outcome.success and reason in outcome.reason


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{9**9**9}",
        "\\boxed{9^{9^{9}}}",
        "\\boxed{9^{99999999}}",
        "\\boxed{" + "9" * 100_000 + "}",
        "\\boxed{" * 20_000,
        "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
        "x" * 1_000_000,
        "<think>" * 50_000 + "\\boxed{2}",
        "</think>" * 50_000 + "\\boxed{2}",
        "\\boxed{" + "(" * 390 + "}",
        "\\boxed{99999!!}",
        "\\boxed{\ud800\x00\x1b[2J}",
        "\\boxed{__import__('os').system('id')}",
    ],
)
def test_hostile_text_is_wrong_and_quick(text):
    outcome = grade(text, "24")
    assert not outcome.success
    assert len(outcome.answer or "") <= 200 and len(outcome.reason) < 400
    outcome.reason.encode()


def test_a_comparison_that_takes_too_long_is_cut_off_and_the_next_one_works():
    comparer = Comparer()
    assert comparer.same("1/2", "0.5") is True
    assert comparer.same("\\sum_{i=1}^{9999999} \\sin(i^{3})", "24", timeout_s=0.3) is None
    assert comparer.same("1/2", "0.5") is True


def test_grading_works_from_many_threads_at_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(grade("\\boxed{\\sqrt{16}}", "4").success)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


async def test_the_environments_grade_reads_the_verifiers_words_and_leaves_the_loop_free():
    task = Task("t", "?", reference="4")
    states = [{"final": "\\boxed{4}"}, {"final": "\\boxed{2^2}"}, {"final": "4"}, {}]
    outcomes = await asyncio.gather(*(grade_state(task, state) for state in states))
    assert [o.success for o in outcomes] == [True, True, False, False]
    with pytest.raises(TaskError, match="no reference"):
        await grade_state(Task("t", "?"), {})


def test_boxes_are_found_with_their_braces_balanced():
    assert boxed("\\boxed{\\frac{1}{2}} and") == "\\frac{1}{2}"
    assert boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert boxed("\\boxed{1} then \\boxed{2") == "1"
    assert boxed("boxed{1}") is None


def test_alternatives_are_read_from_prose():
    assert alternatives("080 or 081 (both were accepted)") == ["080", "081"]
    assert alternatives("24") == ["24"] and alternatives("f(x)") == ["f(x)"]
