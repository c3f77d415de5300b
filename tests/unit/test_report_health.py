"""The report on updates and evaluations: every number a curve, every alarm a sentence, metrics by stratum in one chart."""

import json
import random
from pathlib import Path

import pytest

from mappa_graph.report import write_report
from mappa_graph.report.data import Run
from mappa_graph.report.evaluations import best_tile, evaluations
from mappa_graph.report.health import SPECS, alarms, ended, health, refused
from tests.fakes.rundir import AGENTS, make_run, row

CSS = {name: f"s{k}" for k, name in enumerate(AGENTS)}


def rows(count: int = 4, **more) -> list[dict]:
    rng = random.Random(0)
    made = [row(k, k / count, rng, evaluate=True, trained=k > 0) for k in range(count + 1)]
    for each in made[1:]:
        for values in each["agents"].values():
            values.update(more)
    return made


def alarm(agent: str, message: str, name: str = "mismatch") -> dict:
    return {"name": name, "agent": agent, "value": 1.0, "threshold": 0.3, "action": "warn", "message": message}


def test_each_number_of_the_updates_is_a_curve() -> None:
    page = health(
        Run(
            "r",
            rows(advantage_std=1.0, advantage_mean=0.0, ratio_max=1.2, mismatch_abs=0.1, weight_mean=1.0, staleness_mean=1.0),
            agents=AGENTS,
        ),
        CSS,
    )
    for title, _, _, _ in SPECS:
        assert f"<b>{title}</b>" in page, title


def test_numbers_that_no_row_has_make_no_chart_and_staleness_none_where_there_is_none() -> None:
    page = health(Run("r", rows(staleness_mean=0.0, weight_mean=None), agents=AGENTS), CSS)
    assert "<b>Staleness</b>" not in page and "<b>Importance weight</b>" not in page and "<b>Entropy</b>" in page


def test_an_alarm_is_shown_once_with_the_iteration_it_began_at() -> None:
    made = rows()
    made[2]["alarms"] = [alarm("solver", "log-probs of solver differ")]
    made[3]["alarms"] = [alarm("solver", "log-probs of solver differ more"), alarm("executor", "of executor, too")]
    run = Run("r", made)
    assert alarms(run) == [(2, "mismatch", "log-probs of solver differ"), (3, "mismatch", "of executor, too")]
    assert health(run, CSS).count("alarm mismatch") == 2


def test_refused_steps_and_an_early_end_are_said() -> None:
    made = rows()
    made[2]["refused"] = {"solver": "loss nan"}
    made[4]["stop"] = {"by": "early_stop", "message": "early stop: no better"}
    run = Run("r", made)
    assert refused(run) == [(2, "solver", "loss nan")] and ended(run) == "early stop: no better"
    assert "Iteration 2, solver: a step was refused." in health(run, CSS)


@pytest.mark.parametrize("broken", [{"alarms": 7}, {"alarms": ["x"]}, {"alarms": None}, {"refused": None, "stop": "x"}])
def test_rows_of_another_shape_are_passed_over(broken: dict) -> None:
    run = Run("r", [{"iteration": 1, **broken}])
    assert alarms(run) == [] and refused(run) == [] and ended(run) == "" and health(run, CSS)


def held(run_rows: list[dict], **more) -> list[dict]:
    for k, each in enumerate(run_rows):
        each["heldout"].update({key: value(k) for key, value in more.items()})
    return run_rows


def test_pass_at_k_and_majority_are_lines_with_intervals() -> None:
    part = {"value": 0.5, "ci95": [0.4, 0.6]}
    page = evaluations(Run("r", held(rows(), pass_at=lambda k: {"1": part, "4": part}, majority=lambda k: part)))
    assert "Of several samples" in page and "pass@1" in page and "pass@4" in page and "majority" in page


def test_a_metric_and_its_strata_share_a_chart_and_the_choosing_one_comes_first() -> None:
    metrics = {"rmse": 30.0, "fair_f1": 0.5, "classification/fair_f1": 0.6, "regression/fair_f1": None}
    run = Run("r", held(rows(), metrics=lambda k: metrics), {"best": {"by": "classification/fair_f1", "iteration": 1, "value": 0.6}})
    page = evaluations(run)
    assert page.count("<figure>") == 2 and page.index("<b>fair_f1</b>") < page.index("<b>rmse</b>")
    assert page.count("chooses the best checkpoint") == 1 and "classification" in page


def test_evaluations_without_any_of_it_make_no_section() -> None:
    assert evaluations(Run("r", rows())) == "" and evaluations(Run("r")) == ""


@pytest.mark.parametrize(
    ("best", "tile"),
    [
        ({"iteration": 3, "accuracy": 0.5}, ("best held-out", "50.0%", "at iteration 3")),
        ({"iteration": 3, "accuracy": 0.5, "by": "accuracy", "value": 0.5}, ("best held-out", "50.0%", "at iteration 3")),
        ({"iteration": 3, "accuracy": 0.5, "by": "fair_rmse", "value": 31.2}, ("best fair_rmse", "31.2", "at iteration 3")),
        ({"iteration": 3, "accuracy": 0.5, "by": "pass@4", "value": 0.75}, ("best pass@4", "75.0%", "at iteration 3")),
        ({}, None),
    ],
)
def test_the_best_checkpoint_is_shown_by_what_it_was_chosen_by(best: dict, tile: object) -> None:
    assert best_tile(best) == tile


def test_names_and_messages_are_text_and_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    make_run(tmp_path / "r", iterations=2)
    path = tmp_path / "r" / "metrics.jsonl"
    made = [json.loads(line) for line in path.read_text().splitlines()]
    made[1].update(alarms=[alarm(evil, evil, evil)], refused={evil: evil}, stop={"message": evil})
    made[0]["heldout"].update(metrics={f"{evil}/{evil}": 1.0}, pass_at={evil: {"value": 0.5}})
    made[-1]["stop"] = {"message": evil}
    path.write_text("".join(json.dumps(r) + "\n" for r in made))
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    summary["best"].update(by=evil, value=1.0)
    (tmp_path / "r" / "summary.json").write_text(json.dumps(summary))
    page = write_report(tmp_path / "r").read_text()
    assert "&lt;script&gt;alert(1)" in page and evil not in page
