"""Accuracy, score, pass@k, majority vote and their intervals, metrics and behaviour, from finished episodes."""

import itertools
import json
import math

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.evaluation import behaviour, bootstrap, majority, measurable, measured, pass_at, summarise, wilson
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


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
        (4, 1, 1, 0.25),
        (4, 1, 4, 1.0),
        (5, 2, 3, 0.9),
        (10, 3, 5, 1 - 21 / 252),
        (200, 3, 100, 1 - 970200 / 7880400),
    ],
)
def test_pass_at_k_against_numbers_worked_by_hand(n, c, k, expected):
    assert pass_at(n, c, k) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n", "c"), [(6, 0), (6, 1), (6, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(n, c):
    right = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        chosen = list(itertools.combinations(right, k))
        assert pass_at(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_of_numbers_that_cant_be_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {c}"):
        pass_at(n, c, k)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("7", 1.0), ("7", 1.0), ("8", 0.0)], 1.0),
        ([("7", 1.0), ("8", 0.0), ("8", 0.0)], 0.0),
        ([("7", 1.0), ("8", 0.0)], 0.5),
        ([("7", 1.0), ("8", 0.0), ("9", 0.0)], 1 / 3),
        ([("7", 1.0), ("7", 1.0), ("8", 0.0), ("8", 0.0), ("9", 0.0)], 0.5),
        ([("7", 1.0), (None, 0.0), (None, 0.0), (None, 0.0)], 1.0),
        ([(" 7 ", 1.0), ("7", 1.0), ("8", 0.0), ("8 ", 0.0), ("8", 0.0)], 0.0),
        ([(None, 0.0), ("  ", 0.0)], 0.0),
        ([], 0.0),
    ],
)
def test_the_majority_is_right_as_often_as_a_fair_draw_among_tied_answers(votes, expected):
    assert majority(votes) == pytest.approx(expected)


def test_a_bootstrap_interval_follows_from_its_values_and_holds_their_mean():
    values = [0.1, 0.2, 0.9, 0.4, 0.5, 0.5, 0.6, 1.0]
    low, high = bootstrap(values)
    assert low < sum(values) / len(values) < high and (low, high) == bootstrap(values)
    spread = 1.96 * (sum((v - 0.525) ** 2 for v in values) / 8 / 8) ** 0.5  # the normal approximation
    assert high - low == pytest.approx(2 * spread, rel=0.15)
    assert bootstrap([0.3] * 5) == pytest.approx((0.3, 0.3))


def answered(task: str, *answers: str | None, truth: str = "7", stratum: str = "1", **metrics: list[float]) -> list[EpisodeTrace]:
    """One episode an answer; each of `metrics` has a value for each."""
    out = []
    for k, answer in enumerate(answers):
        outcome = Outcome(answer == truth, answer=answer, score=0.5 if answer else 0.0, metrics={n: v[k] for n, v in metrics.items()})
        out.append(EpisodeTrace(Episode(f"{task}-{k}", task_id=task, stratum=stratum, outcome=outcome, status="done", sample=k)))
    return out


def test_several_samples_a_task_give_pass_at_k_and_majority_over_tasks():
    traces = answered("a", "7", "7", "8", None) + answered("b", "8", "8", "7", "9") + answered("c", None, None, None, None)
    found = summarise(traces, mode="m", samples=4, pass_ks=(1, 2, 4))
    ones, twos, fours = (0.5 + 0.25 + 0) / 3, (5 / 6 + 0.5 + 0) / 3, 2 / 3
    assert [found.pass_at[k].value for k in (1, 2, 4)] == pytest.approx([ones, twos, fours])
    assert found.pass_at[1].value == pytest.approx(found.accuracy) and found.pass_at[1].ci95 == pytest.approx(found.ci95)
    assert found.pass_at[4].ci95 == pytest.approx(wilson(2, 3))
    assert (
        found.majority is not None and found.majority.value == pytest.approx(1 / 3) and found.majority.ci95 == pytest.approx(wilson(1, 3))
    )
    assert found.score is not None and found.score.value == pytest.approx((3 / 8 + 0.5 + 0) / 3)


def test_one_sample_a_task_has_no_majority_and_no_pass_at_k():
    found = summarise(answered("a", "7") + answered("b", "8"), mode="m")
    assert found.majority is None and found.pass_at == {}


def test_outcomes_without_answers_have_no_majority():
    assert summarise(answered("a", None, None), mode="m", samples=2).majority is None


def test_outcomes_metrics_are_means_over_tasks_of_the_episodes_that_have_them():
    traces = answered("a", "7", "7", rmse=[1.0, 3.0]) + answered("b", "7", "7", rmse=[5.0, math.nan]) + answered("c", "8")
    found = summarise(traces, mode="m", samples=2)
    assert found.metrics == {"rmse": pytest.approx(3.5)} and found.metrics_ci95["rmse"] == (2.0, 5.0)


def test_an_environments_own_metrics_win_and_see_failed_episodes():
    seen = []

    def own(traces):
        seen.append(len(traces))
        return {"rmse": 9.0, "classification/fair_f1": 0.25, "never": math.inf}

    traces = [*answered("a", "7", rmse=[1.0]), episode("b", None, error="X: y")]
    found = summarise(traces, mode="m", metrics=own)
    assert seen == [2]
    assert found.metrics == {"rmse": 9.0, "classification/fair_f1": 0.25, "never": None} and "rmse" not in found.metrics_ci95
    assert "NaN" not in json.dumps(found.to_dict()) and "Infinity" not in json.dumps(found.to_dict())


@pytest.mark.parametrize("own", [lambda t: 1 / 0, lambda t: {"a": "high"}, lambda t: None])
def test_metrics_that_fail_are_the_users_to_mend(own):
    with pytest.raises(ConfigError, match="the environment's metrics failed on 1 episodes"):
        summarise(answered("a", "7"), mode="m", metrics=own)


def test_every_number_of_an_evaluation_can_be_asked_for_by_name():
    traces = answered("a", "7", "8", f1=[0.5, 0.7])
    found = summarise(traces, mode="m", samples=2, pass_ks=(1, 2)).to_dict()
    assert measurable(found) == ["accuracy", "score", "majority", "pass@1", "pass@2", "f1"]
    assert {name: measured(found, name) for name in measurable(found)} == pytest.approx(
        {"accuracy": 0.5, "score": 0.5, "majority": 0.5, "pass@1": 0.5, "pass@2": 1.0, "f1": 0.6}
    )
    assert measured(found, "pass@3") is None and measured(found, "recall") is None
