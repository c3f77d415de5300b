"""The fair metrics over all runs, their intervals, and the competitions' metrics against formulas written down a second time."""

import math
import random

import numpy as np
import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.evaluation import wilson
from mappa_graph.graphs.dsbench.competition import METRICS, find
from mappa_graph.graphs.dsbench.metrics import environment_metrics, flat, per_task, summarise
from mappa_graph.graphs.dsbench.scoring import quality
from mappa_graph.record import Episode, EpisodeTrace, Outcome

FAIL = Outcome(False, "no_submission: there is none", score=0.0)
KINDS = {"c1": "classification", "c2": "classification", "r1": "regression", "r2": "regression"}


def classed(accuracy: float, f1: float, **more: float) -> Outcome:
    return Outcome(True, "valid: …", metrics={"accuracy": accuracy, "f1": f1, **more})


def sized(rmse_percent: float, mae_percent: float) -> Outcome:
    return Outcome(True, "valid: …", metrics={"rmse": 1.0, "mae": 0.5, "rmse_percent": rmse_percent, "mae_percent": mae_percent})


# ---- golden cases


def test_a_failed_run_is_charged_chance_no_f1_and_half_the_range():
    found = summarise({"c1": [FAIL], "r1": [None]}, KINDS)
    assert found["success_rate"] == 0
    assert found["fair_accuracy"] == 0.5
    assert found["fair_f1"] == 0
    assert found["fair_rmse_percent"] == found["fair_mae_percent"] == 50
    assert found["fair_score"] == found["classification"]["fair_score"] == found["regression"]["fair_score"] == 0
    assert found["reasons"] == {"no_submission": 1, "no_outcome": 1}


def test_a_perfect_team_is_perfect():
    found = summarise({"c1": [classed(1, 1)], "r1": [sized(0, 0)]}, KINDS)
    assert (found["success_rate"], found["fair_accuracy"], found["fair_f1"]) == (1, 1, 1)
    assert (found["fair_rmse_percent"], found["fair_mae_percent"], found["fair_score"]) == (0, 0, 1)
    assert found["success_rate_ci95"] == wilson(2, 2)


def test_the_fair_metrics_are_means_over_all_runs_of_a_kind():
    found = summarise({"c1": [classed(0.9, 0.8), FAIL], "c2": [classed(0.7, 0.4), classed(0.5, 0.3)], "r1": [sized(10, 8), None]}, KINDS)
    assert found["runs"] == 6 and found["tasks"] == 3
    assert found["success_rate"] == pytest.approx(4 / 6)
    assert found["fair_accuracy"] == pytest.approx((0.9 + 0.5 + 0.7 + 0.5) / 4)
    assert found["fair_f1"] == pytest.approx((0.8 + 0 + 0.4 + 0.3) / 4)
    assert found["fair_rmse_percent"] == 30 and found["fair_mae_percent"] == 29
    classes, sizes = found["classification"], found["regression"]
    assert classes["success_rate"] == 0.75 and sizes["success_rate"] == 0.5
    assert classes["successful"] == {"n": 3, "accuracy": pytest.approx(0.7), "f1": pytest.approx(0.5)}
    assert sizes["successful"]["n"] == 1 and sizes["successful"]["rmse_percent"] == 10 and sizes["successful"]["mae"] == 0.5
    by_hand = [(0.8 + 0.8) / 2, 0, (0.4 + 0.4) / 2, (0 + 0.3) / 2]
    assert classes["fair_score"] == pytest.approx(sum(by_hand) / 4)
    assert sizes["fair_score"] == pytest.approx((1 - 0.18 + 0) / 2)
    assert found["fair_score"] == pytest.approx((classes["fair_score"] + sizes["fair_score"]) / 2)


def test_a_failed_run_that_carries_metrics_is_charged_all_the_same():
    odd = Outcome(False, "ragged_row: …", metrics={"accuracy": 1.0, "f1": 1.0})
    assert summarise({"c1": [odd]}, KINDS)["fair_accuracy"] == 0.5


def test_both_kinds_weigh_alike_in_the_score_however_many_runs_they_have():
    found = summarise({"c1": [classed(1, 1)] * 30, "r1": [FAIL]}, KINDS)
    assert found["fair_score"] == 0.5


def test_one_kind_alone_is_the_score():
    found = summarise({"r1": [sized(20, 10)]}, KINDS)
    assert found["fair_score"] == pytest.approx(0.7)
    assert "classification" not in found and "fair_accuracy" not in found


def test_a_valid_run_may_do_worse_than_a_failed_one_but_never_costs_more_in_the_score():
    found = summarise({"r1": [sized(400, 300)], "c1": [classed(0.2, 0.1)]}, KINDS)
    assert found["fair_rmse_percent"] == 400
    assert found["regression"]["fair_score"] == 0
    assert found["classification"]["fair_score"] == pytest.approx(0.05)


@pytest.mark.parametrize("seed", range(50))
def test_a_better_run_never_lowers_the_score(seed):
    rng = random.Random(seed)
    accuracy, f1, rmse, mae = rng.random(), rng.random(), rng.random() * 120, rng.random() * 120
    base = quality("classification", {"accuracy": accuracy, "f1": f1})
    assert 0 <= base <= quality("classification", {"accuracy": min(1, accuracy + 0.1), "f1": min(1, f1 + 0.1)}) <= 1
    base = quality("regression", {"rmse_percent": rmse, "mae_percent": mae})
    assert 0 <= base <= quality("regression", {"rmse_percent": rmse * 0.9, "mae_percent": mae * 0.9}) <= 1


def test_turning_a_failure_into_a_success_never_lowers_a_fair_score():
    rng = random.Random(1)
    for _ in range(200):
        runs = [FAIL if rng.random() < 0.5 else classed(rng.random(), rng.random()) for _ in range(4)] + [FAIL]
        before = summarise({"c1": runs}, KINDS, resamples=20)["fair_score"]
        runs[-1] = classed(rng.random(), rng.random())
        assert summarise({"c1": runs}, KINDS, resamples=20)["fair_score"] >= before


# ---- kinds


def test_the_kind_is_told_from_successful_runs_where_it_is_not_given():
    found = summarise({"a": [classed(1, 1), FAIL], "b": [sized(10, 10)]})
    assert found["classification"]["tasks"] == found["regression"]["tasks"] == 1
    assert found["fair_accuracy"] == 0.75


def test_a_task_that_never_succeeded_is_not_left_out_in_silence():
    with pytest.raises(ConfigError, match=r"'b' tells(.|\n)*kinds="):
        summarise({"a": [classed(1, 1)], "b": [FAIL]})


def test_tasks_of_neither_kind_count_in_the_success_rate_alone():
    found = summarise({"c1": [classed(0.9, 0.9)], "x": [FAIL]}, {**KINDS, "x": "essay"})
    assert found["success_rate"] == 0.5 and found["fair_accuracy"] == 0.9


def test_nothing_ran_is_no_success_and_has_no_fair_metrics():
    found = summarise({}, {})
    assert found["runs"] == 0 and found["success_rate"] == 0 and found["success_rate_ci95"] == (0, 1)
    assert "fair_score" not in found
    assert environment_metrics([])["runs"] == 0


# ---- intervals


def test_several_runs_of_one_task_do_not_narrow_an_interval():
    once = summarise({"c1": [classed(0.9, 0.9)], "c2": [FAIL]}, KINDS)
    often = summarise({"c1": [classed(0.9, 0.9)] * 50, "c2": [FAIL] * 50}, KINDS)
    assert once["success_rate_ci95"] == often["success_rate_ci95"] == wilson(1, 2)
    assert once["classification"]["fair_accuracy_ci95"] == pytest.approx(often["classification"]["fair_accuracy_ci95"])


def test_intervals_hold_the_mean_are_the_same_for_a_seed_and_narrow_with_tasks():
    rng = random.Random(0)
    widths = []
    for n in (10, 160):
        runs = {f"t{i}": [classed(rng.random(), rng.random())] for i in range(n)}
        kinds = dict.fromkeys(runs, "classification")
        found = summarise(runs, kinds)["classification"]
        assert found == summarise(runs, kinds)["classification"]
        low, high = found["fair_accuracy_ci95"]
        assert low <= found["fair_accuracy"] <= high
        other = summarise(runs, kinds, seed=1)["classification"]["fair_accuracy_ci95"]
        assert other != (low, high) and other == pytest.approx((low, high), abs=0.05)
        widths.append(high - low)
        # 1.96 standard errors either way, give or take the bootstrap's own noise
        error = np.std([run.metrics["accuracy"] for (run,) in runs.values()]) / math.sqrt(n)
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert widths[1] < widths[0] / 2.5


def test_the_score_s_interval_resamples_each_kind_by_itself():
    runs = {**{f"c{i}": [classed(1, 1)] for i in range(9)}, "r": [sized(25, 25)]}
    kinds = {k: "regression" if k == "r" else "classification" for k in runs}
    found = summarise(runs, kinds)
    assert found["fair_score"] == 0.75 and found["fair_score_ci95"] == (0.75, 0.75)


# ---- of an evaluation's episodes


def trace(task: str, outcome: Outcome | None, stratum: str, status: str = "done") -> EpisodeTrace:
    return EpisodeTrace(Episode(f"{task}/{id(outcome)}", task_id=task, stratum=stratum, outcome=outcome, status=status))


def test_an_evaluation_s_metrics_are_flat_numbers_by_kind():
    found = environment_metrics(
        [
            trace("c1", classed(0.9, 0.8, roc_auc=0.95), "classification"),
            trace("c1", FAIL, "classification"),
            trace("r1", sized(10, 20), "regression"),
            trace("r2", None, "regression", status="failed"),
        ]
    )
    assert all(isinstance(v, float) and math.isfinite(v) for v in found.values())
    assert found["success_rate"] == 0.5
    assert found["fair_accuracy"] == found["classification/fair_accuracy"] == pytest.approx(0.7)
    assert found["fair_f1"] == 0.4
    assert found["fair_rmse_percent"] == found["regression/fair_rmse_percent"] == 30
    assert found["fair_mae_percent"] == 35
    assert found["fair_score"] == pytest.approx((0.8 / 2 + 0.7 / 2) / 2)
    assert found["classification/successful/roc_auc"] == 0.95
    assert found["regression/success_rate"] == 0.5
    assert found["success_rate_low"] < 0.5 < found["success_rate_high"]
    assert found["regression/fair_rmse_percent_low"] == 10 and found["regression/fair_rmse_percent_high"] == 50
    assert found["reasons/valid"] == 2 and found["reasons/no_outcome"] == 1
    assert found == flat(summarise({"c1": [classed(0.9, 0.8, roc_auc=0.95), FAIL], "r1": [sized(10, 20)], "r2": [None]}, KINDS))


def test_an_episode_that_did_not_end_is_a_failed_run_whatever_it_handed_in():
    found = environment_metrics([trace("c1", classed(1, 1), "classification", status="cancelled")])
    assert found["success_rate"] == 0 and found["fair_accuracy"] == 0.5


def test_a_task_s_row_has_the_competition_s_metric_of_its_successful_runs():
    a = Outcome(True, "valid: …", score=0.8, metrics={"accuracy": 0.9, "f1": 0.8, "competition": 0.7, "roc_auc": 0.9})
    b = Outcome(True, "valid: …", score=0.4, metrics={"accuracy": 0.7, "f1": 0.6, "competition": 0.5})
    rows = per_task({"c1": [a, b, FAIL, None], "c2": [FAIL], "none": []})
    assert rows["c1"] == {
        "runs": 4,
        "success_rate": 0.5,
        "score": pytest.approx(0.3),
        "reasons": {"valid": 2, "no_submission": 1, "no_outcome": 1},
        "accuracy": pytest.approx(0.8),
        "f1": pytest.approx(0.7),
        "competition": pytest.approx(0.6),
    }
    assert rows["c2"] == {"runs": 1, "success_rate": 0, "score": 0, "reasons": {"no_submission": 1}}
    assert set(rows) == {"c1", "c2"}


# ---- the competitions' metrics, written down a second time


def gini_by_ranks(truth, scores):
    """Kaggle's Porto Seguro code, for scores without ties."""

    def gini(actual, predicted):
        order = np.argsort(-np.asarray(predicted), kind="stable")
        sorted_actual = np.asarray(actual, float)[order]
        return (sorted_actual.cumsum().sum() / sorted_actual.sum() - (len(actual) + 1) / 2) / len(actual)

    return gini(truth, scores) / gini(truth, truth)


SECOND = {
    "rmse": lambda y, p: math.sqrt(np.mean((y - p) ** 2)),
    "mcrmse": lambda y, p: math.sqrt(np.mean((y - p) ** 2)),
    "mse": lambda y, p: np.mean((y - p) ** 2),
    "mae": lambda y, p: np.mean(abs(y - p)),
    "medae": lambda y, p: np.median(abs(y - p)),
    "rmsle": lambda y, p: math.sqrt(np.mean((np.log(p + 1) - np.log(y + 1)) ** 2)),
    "mape": lambda y, p: np.mean(abs(y - p) / y),
    "smape": lambda y, p: 200 * np.mean(abs(y - p) / (abs(y) + abs(p))),
    "r2": lambda y, p: 1 - np.sum((y - p) ** 2) / np.sum((y - y.mean()) ** 2),
    "explained_variance": lambda y, p: 1 - np.var(y - p) / np.var(y),
    "pearson": lambda y, p: np.corrcoef(y, p)[0, 1],
    "spearman": lambda y, p: np.corrcoef(y.argsort().argsort(), p.argsort().argsort())[0, 1],
}


@pytest.mark.parametrize("name", sorted(SECOND))
@pytest.mark.parametrize("seed", range(5))
def test_a_metric_of_numbers_agrees_with_its_formula(name, seed):
    rng = np.random.default_rng(seed)
    truth, guess = rng.random(30) * 9 + 0.1, rng.random(30) * 9 + 0.1
    assert METRICS[name].compute(truth.tolist(), guess.tolist(), (), None) == pytest.approx(SECOND[name](truth, guess))
    assert set(SECOND) == {m.name for m in METRICS.values() if m.form == "number"}


@pytest.mark.parametrize("seed", range(10))
def test_the_normalised_gini_agrees_with_kaggle_s_code(seed):
    rng = np.random.default_rng(seed)
    truth, scores = [0, 1, *rng.integers(0, 2, 40)], rng.permutation(42) / 42
    assert METRICS["normalized_gini"].compute(truth, scores.tolist(), (), None) == pytest.approx(gini_by_ranks(truth, scores))


def test_metrics_that_no_library_has_on_cases_by_hand():
    assert find("smape").compute([0, 1, -2], [0, 3, 2], (), None) == pytest.approx(100 * (0 + 1 + 2) / 3)
    assert find("mpa@3").compute(["a", "b", "c", "d"], [("a", "b"), ("a", "b"), ("a", "b", "c"), ("a",)], (), None) == pytest.approx(
        (1 + 1 / 2 + 1 / 3) / 4
    )
    assert find("jaccard").compute(["So very good", "a", ""], ["very GOOD day", "b", ""], (), None) == pytest.approx((2 / 4 + 0 + 1) / 3)
    assert find("pearson").compute([1, 2, 3], [5, 5, 5], (), None) == 0


def test_the_public_benchmark_s_names_are_all_known():
    names = (
        "accuracy f1 f1_micro jaccard log_loss mae map_at_3 mcrmse medae normalized_gini pearson quadratic_weighted_kappa qwk r2 rmse rmsle"
    )
    for name in (*names.split(), "roc_auc", "smape", "spearman"):
        assert find(name) is not None, name


@pytest.mark.parametrize(
    ("written", "name"), [("ROC-AUC", "roc_auc"), ("AUC", "roc_auc"), ("Log Loss", "log_loss"), ("MAP@3", "map_at_3"), ("R2 score", "r2")]
)
def test_a_metric_is_found_however_it_is_written(written, name):
    assert find(written) is METRICS[name]


@pytest.mark.parametrize("name", [None, "", "auction price", "themselves", "mean", "f1_of_doom"])
def test_a_metric_is_never_guessed_from_part_of_a_name(name):
    assert find(name) is None
