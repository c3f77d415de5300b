"""Accuracy, its interval, and behaviour, from finished episodes."""

import pytest

from mappa_graph.evaluation import behaviour, summarise, wilson
from mappa_graph.record import Action, Call, Episode, EpisodeTrace, Execution, ExecutionErrorInfo, Outcome


def episode(task: str, success: bool | None, *, stratum="1", error=None, actions=(), calls=None):
    outcome = None if success is None else Outcome(success)
    status = "failed" if error else "done"
    return EpisodeTrace(
        Episode(f"{task}-{success}", task_id=task, stratum=stratum, outcome=outcome, error=error, status=status),
        actions=actions,
        calls=calls or {},
    )


def test_wilson_against_published_values():
    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 20)[0] == 0.0 and wilson(20, 20)[1] == 1.0


def test_repeated_samples_of_a_task_do_not_narrow_the_interval():
    once = summarise([episode("a", True), episode("b", False)], mode="m")
    thrice = summarise([episode(t, s) for t, s in (("a", True), ("b", False)) for _ in range(3)], mode="m", samples=3)
    assert (once.accuracy, once.n, once.ci95) == (thrice.accuracy, thrice.n, thrice.ci95) == (0.5, 2, wilson(1, 2))


def test_failed_episodes_count_as_wrong_and_are_counted():
    found = summarise([episode("a", True), episode("b", None, error="DeadlineError: too long", stratum="2")], mode="m")
    assert (found.accuracy, found.failures, found.by_stratum) == (0.5, {"DeadlineError": 1}, {"1": 1.0, "2": 0.0})


def test_behaviour_is_counted_by_agent():
    ran = Execution("e", "error", error=ExecutionErrorInfo("NameError", "x"))
    actions = (
        Action("1", "t", "executor", "executor", 0, finish_reason="length", executions=(ran, Execution("f", "ok"))),
        Action("2", "t", "executor", "executor", 1, finish_reason="stop"),
        Action("3", "t", "verifier", "verifier", 2),
    )
    calls = {"1": Call("c", "executor", 0, (1,), (2, 3, 4), (-1.0, -1.0, -1.0), "length")}
    rows = behaviour([episode("a", True, actions=actions, calls=calls)])
    assert rows["executor"] == {
        "actions": 2,
        "truncated": 1,
        "executions": {"error": 1, "ok": 1},
        "errors": {"NameError": 1},
        "failed": 0,
        "length_mean": 3.0,
        "tool_use": 0.5,
    }
    assert rows["verifier"]["length_mean"] is None


def test_nothing_evaluated_is_not_a_crash():
    assert summarise([], mode="m").ci95 == pytest.approx((0.0, 1.0))
