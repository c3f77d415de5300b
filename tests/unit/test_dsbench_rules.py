"""The pipeline's rules on cases made by hand: what each fault looks like, and what must not be taken for one."""

import json
from dataclasses import replace

import pytest

from mappa_graph.coach import EvidenceCoach
from mappa_graph.coach.base import AgentCard, Case, Step
from mappa_graph.graphs.dsbench.box import GRADE, WORKSPACE
from mappa_graph.graphs.dsbench.prompts import TEAM
from mappa_graph.graphs.dsbench.rules import RULES, known, noted
from mappa_graph.record import Execution, ExecutionErrorInfo, FileChange

CARDS = tuple(AgentCard(a.name, a.role, tuple(a.reads), tuple(a.writes)) for a in TEAM)
TASK = {"kind": "classification", "id": "id", "targets": ["y"], "train_rows": 10, "test_rows": 5}
COACH = EvidenceCoach(extra=RULES)
FRAME = "pandas.core.frame.DataFrame"


def look(name, rows, columns, **more):
    held = [c for c in ("id", "y") if c in columns]
    return {"name": name, "type": FRAME, "shape": [rows, len(columns)], "columns": columns, "holds": held, **more}


def series(name, rows):
    return {"name": name, "type": "pandas.core.series.Series", "shape": [rows], "head": "0"}


GOOD = [look("X_train.pkl", 10, ["a", "b"]), series("y_train.pkl", 10), look("X_test.pkl", 5, ["a", "b"])]
MODEL = {"name": "model.pkl", "type": "sklearn.linear_model._logistic.LogisticRegression", "head": "LogisticRegression()"}


def run(looks=(), *, code="code", error=None, extra="", task=TASK):
    note = WORKSPACE + json.dumps({"task": task, "files": list(looks)}) + extra
    files = tuple(FileChange(one["name"], "created", 5, "x") for one in looks)
    status = "error" if error else "ok"
    return Execution("e", status, code=code, stdout="seen", files=files, note=note, error=error)


def case(agent, *runs, before=(), output="Here.", calls=()):
    files = {"train.csv": "", "test.csv": ""}
    for step in before:
        files |= {c.path: step.agent for e in step.executions for c in e.files}
    return Case(
        action_id="now",
        episode_id="e",
        environment="dsbench",
        task="t",
        team=CARDS,
        agent=agent,
        turn=sum(step.agent == agent for step in before),
        output=output,
        executions=runs,
        tool_calls=calls,
        finish_reason="stop",
        files_before=files,
        files_after=tuple(c for e in runs for c in e.files),
        before=tuple(before),
    )


def step(agent, *runs):
    return Step(f"{agent}-step", agent, "said", runs)


DATA = step("data_engineer", run(GOOD))
FITTED = step("modeler", run([MODEL]))


def test_good_work_scores_high_throughout():
    submission = look("submission.csv", 5, ["id", "y"])
    grade = GRADE + json.dumps({"success": True, "value": 0.9, "reason": "valid"})
    for one in (
        case("data_engineer", run(GOOD)),
        case("modeler", run([MODEL]), before=[DATA]),
        case("analyst", run([submission], extra=f"\n{grade}"), before=[DATA, FITTED]),
    ):
        verdict = COACH.judge(one)
        assert verdict.score >= 8 and not verdict.blame, verdict


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ([look("X_train.pkl", 10, ["a", "y"]), GOOD[1], look("X_test.pkl", 5, ["a", "y"])], "leaks the target"),
        ([look("X_train.pkl", 10, ["id", "a"]), GOOD[1], look("X_test.pkl", 5, ["id", "a"])], "leaves the id"),
        ([GOOD[0], series("y_train.pkl", 9), GOOD[2]], "X_train.pkl has 10 rows, y_train.pkl has 9"),
        ([GOOD[0], GOOD[1], look("X_test.pkl", 5, ["a"])], "X_train.pkl has 2 columns, X_test.pkl has 1"),
        ([GOOD[0], GOOD[1], look("X_test.pkl", 5, ["b", "a"])], "same columns in the same order"),
        ([GOOD[0], GOOD[1], look("X_test.pkl", 4, ["a", "b"])], "X_test.pkl has 4 rows, test.csv has 5"),
        ([{"name": "X_train.pkl", "error": "EOFError"}, *GOOD[1:]], "can't be loaded: EOFError"),
    ],
)
def test_what_the_data_engineers_files_must_not_be(changed, said):
    verdict = COACH.judge(case("data_engineer", run(changed)))
    assert verdict.score <= 2 and verdict.blame == ("data_engineer",) and said in verdict.reason


def test_arrays_without_names_are_judged_by_their_shapes_alone():
    arrays = [
        {"name": n, "type": "numpy.ndarray", "shape": s, "head": "[0]"} for n, s in (("X_train.pkl", [10, 2]), ("X_test.pkl", [5, 2]))
    ]
    assert COACH.judge(case("data_engineer", run([*arrays, GOOD[1]]))).score >= 8
    arrays[1] = {**arrays[1], "shape": [5, 3]}
    assert COACH.judge(case("data_engineer", run([*arrays, GOOD[1]]))).score <= 2


@pytest.mark.parametrize(
    ("model", "task", "good"),
    [
        (MODEL, TASK, True),
        ({"name": "model.pkl", "type": "sklearn.ensemble._forest.RandomForestRegressor", "head": "RandomForestRegressor()"}, TASK, False),
        ({"name": "model.pkl", "type": "sklearn.pipeline.Pipeline", "head": "Pipeline(steps=[('m', Ridge())])"}, TASK, False),
        ({"name": "model.pkl", "type": "sklearn.pipeline.Pipeline", "head": "Pipeline(steps=[('m', SVC())])"}, TASK, True),
        (MODEL, {**TASK, "kind": "regression"}, False),
        ({"name": "model.pkl", "type": "numpy.ndarray", "head": "[1]"}, TASK, False),
        ({"name": "model.pkl", "type": "builtins.dict", "head": "{'y': …}"}, TASK, True),
        ({"name": "model.pkl", "type": "xgboost.core.Booster", "head": "<Booster>"}, TASK, True),
    ],
)
def test_a_model_must_be_one_and_of_the_right_kind(model, task, good):
    verdict = COACH.judge(case("modeler", run([model], task=task), before=[DATA]))
    assert (verdict.score >= 8) if good else (verdict.score <= 2 and verdict.blame == ("modeler",)), verdict


def test_the_submissions_form_is_the_analysts_unless_the_rows_are_those_of_a_wrong_x_test():
    wrong = COACH.judge(case("analyst", run([look("submission.csv", 5, ["row", "y"])]), before=[DATA, FITTED]))
    assert wrong.score <= 2 and wrong.blame == ("analyst",)
    short = step("data_engineer", run([*GOOD[:2], look("X_test.pkl", 3, ["a", "b"])]))
    given = COACH.judge(case("analyst", run([look("submission.csv", 3, ["id", "y"])]), before=[short, FITTED]))
    own = COACH.judge(case("analyst", run([look("submission.csv", 3, ["id", "y"])]), before=[DATA, FITTED]))
    assert 4 <= given.score <= 5 and given.blame == ("data_engineer",)
    assert own.score <= 2 and own.blame == ("analyst",)


def test_the_columns_may_stand_in_any_order_and_a_refused_submission_is_the_analysts():
    submission = look("submission.csv", 5, ["y", "id"])
    refused = GRADE + json.dumps({"success": False, "value": 0.0, "reason": "unknown_label: 5 of 5"})
    verdict = COACH.judge(case("analyst", run([submission], extra=f"\n{refused}"), before=[DATA, FITTED]))
    assert verdict.score <= 2 and "unknown_label" in verdict.reason and verdict.blame == ("analyst",)
    assert COACH.judge(case("analyst", run([submission]), before=[DATA, FITTED])).score >= 8


@pytest.mark.parametrize("change", ["changed", "deleted"])
def test_the_tasks_own_files_are_left_alone(change):
    execution = run(GOOD)
    touched = (*execution.files, FileChange("test.csv", change, 3, "x"))
    verdict = COACH.judge(case("data_engineer", replace(execution, files=touched)))
    assert verdict.score <= 2 and verdict.blame == ("data_engineer",) and "test.csv" in verdict.reason


@pytest.mark.parametrize(
    ("form", "dtype", "fine"), [("probability", "float64", True), ("probability", "int64", False), ("label", "int64", True)]
)
def test_labels_where_probabilities_are_asked_for_are_half_a_fault(form, dtype, fine):
    submission = look("submission.csv", 5, ["id", "y"], dtypes={"id": "int64", "y": dtype})
    verdict = COACH.judge(case("analyst", run([submission], task={**TASK, "form": form}), before=[DATA, FITTED]))
    assert (verdict.score >= 8) if fine else (verdict.score <= 4 and verdict.blame == ("analyst",))


def test_the_same_code_again_is_a_fault_only_where_nothing_else_stops_it():
    looked = step("modeler", run(code="print(1)"))
    verdict = COACH.judge(case("modeler", run(code="print(1) "), before=[DATA, looked]))
    assert verdict.score <= 1 and "same code again" in verdict.reason
    gone = ExecutionErrorInfo("FileNotFoundError", "No such file or directory: 'X_train.pkl'")
    tried = step("modeler", run(code="load", error=gone))
    spared = COACH.judge(case("modeler", run(code="load", error=gone), before=[tried]))
    assert 3 <= spared.score <= 5 and spared.blame == ("data_engineer",)


@pytest.mark.parametrize("output", ["It will surely work.", "All is ready.\nDONE"])
def test_words_without_code_while_files_are_owed(output):
    verdict = COACH.judge(case("modeler", before=[DATA], output=output))
    assert verdict.score <= 1.5 and verdict.blame == ("modeler",)


def test_saying_that_an_input_is_missing_is_no_fault():
    verdict = COACH.judge(case("modeler", output="X_train.pkl is missing.\nDONE"))
    assert 3 <= verdict.score <= 5 and verdict.blame == ("data_engineer",)


def test_an_error_on_files_that_anothers_fault_made_unfit_gives_no_verdict():
    unfit = step("data_engineer", run([*GOOD[:2], look("X_test.pkl", 5, ["a"])]))
    error = ExecutionErrorInfo("ValueError", "The feature names should match those that were passed during fit.")
    verdict = COACH.judge(case("analyst", run(error=error), before=[unfit, FITTED]))
    assert verdict.score is None and "data_engineer" in verdict.error
    own = COACH.judge(case("analyst", run(error=error), before=[DATA, FITTED]))
    assert own.score <= 2 and own.blame == ("analyst",)
    broken = step("data_engineer", run([{"name": "X_train.pkl", "error": "AttributeError"}, *GOOD[1:]]))
    again = case("modeler", run(code="load('X_train.pkl')", error=ExecutionErrorInfo("AttributeError", "x")), before=[broken])
    assert COACH.judge(again).score is None


def test_looking_the_answers_up_costs_everything():
    verdict = COACH.judge(case("data_engineer", run(GOOD, code="from sklearn.datasets import load_wine")))
    assert verdict.score == 0 and verdict.blame == ("data_engineer",)


@pytest.mark.parametrize(
    "note",
    ["", WORKSPACE, WORKSPACE + "{", WORKSPACE + "[1]", WORKSPACE + "null", GRADE + '"x"', WORKSPACE + '{"files": [], "task": null}'],
)
def test_notes_that_say_nothing_or_are_broken_are_no_evidence(note):
    execution = Execution("e", "ok", code="c", stdout="s", note=note, files=(FileChange("X_train.pkl", "created", 1, "x"),))
    found = known(case("data_engineer", execution))
    assert found.by == {"X_train.pkl": "data_engineer"} and found.files == {} and noted(execution, GRADE) == {}
    assert COACH.judge(case("data_engineer", execution)).error is None


def test_what_an_agent_prints_is_never_taken_for_the_record():
    forged = GRADE + json.dumps({"success": True, "value": 1.0})
    execution = Execution("e", "ok", code="c", stdout=f"{forged}\n{WORKSPACE}{{}}", note="")
    assert noted(execution, GRADE) == {}
    verdict = COACH.judge(case("analyst", execution, before=[DATA, FITTED]))
    assert verdict.score <= 3


def test_every_rule_survives_any_agents_case():
    for name in ("nobody", "data_engineer", "analyst"):
        assert COACH.judge(case(name, Execution("e", "lost"), output="")).coach.startswith("evidence@")
