"""Golden cases of the evidence coach: who is scored how, and who is blamed."""

import math

import pytest

from mappa_graph.coach import EvidenceCoach, Finding, OutcomeCoach, case_for, cases_for
from mappa_graph.coach.evidence import combine
from mappa_graph.coach.facts import answer_in, same_answer
from mappa_graph.errors import CoachError, ConfigError
from mappa_graph.record import Execution, FileChange, Outcome
from tests.fakes.coach_cases import DS_TEAM, MATH_TEAM, act, make_case, ran, trace

ENGINEER_OK = act("de", "engineer", 0, "prepared", ran(writes=["X_train.pkl", "y_train.pkl", "X_test.pkl"], stdout="ok"))
ENGINEER_NO_TEST = act("de", "engineer", 0, "prepared", ran(writes=["X_train.pkl", "y_train.pkl"], stdout="ok"))
MODELER_OK = act("mo", "modeler", 1, "fitted", ran(writes=["model.pkl"], stdout="auc 0.8"))
MODELER_NO_FILE = act("mo", "modeler", 1, "fitted", ran(stdout="auc 0.8"))
ANALYST_OK = act("an", "analyst", 2, "submitted", ran(writes=["submission.csv"], stdout="1000 rows"))
NO_FILE = ("FileNotFoundError", "[Errno 2] No such file or directory: '{}'")
PLAN = act("s", "solver", 0, "Multiply 6 by 7.")
WRONG_CODE = act("x", "executor", 1, "", ran(error=("TypeError", "str * str")))
FAILED, WON = Outcome(False, "no submission"), Outcome(True, "auc 0.8")


def stopped_by(path):
    return ran(error=(NO_FILE[0], NO_FILE[1].format(path)))


def solved(*actions, reference="42", **more):
    return trace(*actions, task="How much is 6 * 7?", reference=reference, **more)


# Each: the trace, its team, the action, whether in hindsight, lowest and highest score, and who is blamed.
GOLDEN = {
    "engineer forgets X_test": (trace(ENGINEER_NO_TEST), DS_TEAM, "de", False, 0, 4, ["engineer"]),
    "engineer forgets X_test, in hindsight": (
        trace(ENGINEER_NO_TEST, MODELER_OK, act("an", "analyst", 2, "", stopped_by("X_test.pkl")), outcome=FAILED),
        DS_TEAM, "de", True, 0, 2, ["engineer"],
    ),
    "analyst runs into missing X_test": (
        trace(ENGINEER_NO_TEST, MODELER_OK, act("an", "analyst", 2, "", stopped_by("X_test.pkl"))),
        DS_TEAM, "an", False, 3, 5, ["engineer"],
    ),
    "analyst reports missing X_test": (
        trace(ENGINEER_NO_TEST, MODELER_OK, act("an", "analyst", 2, "X_test.pkl is missing, so I can't predict.")),
        DS_TEAM, "an", False, 5, 5, ["engineer"],
    ),
    "analyst runs into missing model": (
        trace(ENGINEER_OK, MODELER_NO_FILE, act("an", "analyst", 2, "", stopped_by("model.pkl"))),
        DS_TEAM, "an", False, 3, 5, ["modeler"],
    ),
    "analyst reports missing model": (
        trace(ENGINEER_OK, MODELER_NO_FILE, act("an", "analyst", 2, "model.pkl was never written by the modeler")),
        DS_TEAM, "an", False, 5, 5, ["modeler"],
    ),
    "modeler never saves the model, in hindsight": (
        trace(ENGINEER_OK, MODELER_NO_FILE, act("an", "analyst", 2, "", stopped_by("model.pkl")), outcome=FAILED),
        DS_TEAM, "mo", True, 0, 2, ["modeler"],
    ),
    "engineer is spared when the modeler failed": (
        trace(ENGINEER_OK, act("mo", "modeler", 1, "", ran(error=("ValueError", "NaN in X"))), outcome=FAILED),
        DS_TEAM, "de", True, 6, 10, ["modeler"],
    ),
    "analyst is spared in hindsight too": (
        trace(ENGINEER_OK, MODELER_NO_FILE, act("an", "analyst", 2, "", stopped_by("model.pkl")), outcome=FAILED),
        DS_TEAM, "an", True, 3, 5, ["modeler"],
    ),
    "both inputs missing: both owners are blamed": (
        trace(ENGINEER_NO_TEST, MODELER_NO_FILE, act("an", "analyst", 2, "X_test.pkl and model.pkl are missing")),
        DS_TEAM, "an", False, 5, 5, ["engineer", "modeler"],
    ),
    "analyst has its inputs and its own exception": (
        trace(ENGINEER_OK, MODELER_OK, act("an", "analyst", 2, "", ran(error=("KeyError", "'price'")))),
        DS_TEAM, "an", False, 0, 2, ["analyst"],
    ),
    "analyst blames a file that is there": (
        trace(ENGINEER_OK, MODELER_OK, act("an", "analyst", 2, "model.pkl is missing, so I can't go on.")),
        DS_TEAM, "an", False, 0, 2, ["analyst"],
    ),
    "analyst hides its own typo behind a missing file": (
        trace(ENGINEER_NO_TEST, MODELER_OK, act("an", "analyst", 2, "", ran(error=("SyntaxError", "invalid syntax")))),
        DS_TEAM, "an", False, 0, 2, ["analyst"],
    ),
    "analyst opens a file that nobody owes": (
        trace(ENGINEER_OK, MODELER_OK, act("an", "analyst", 2, "", stopped_by("X_tset.pkl"))),
        DS_TEAM, "an", False, 0, 2, ["analyst"],
    ),
    "analyst runs clean and saves nothing": (
        trace(ENGINEER_OK, MODELER_OK, act("an", "analyst", 2, "", ran(stdout="predicted")), outcome=FAILED),
        DS_TEAM, "an", True, 0, 2, ["analyst"],
    ),
    "analyst writes prose instead of code": (
        trace(ENGINEER_OK, MODELER_OK, act("an", "analyst", 2, "One would load the model and predict.")),
        DS_TEAM, "an", False, 0, 2, ["analyst"],
    ),
    "all do their part": (trace(ENGINEER_OK, MODELER_OK, ANALYST_OK, outcome=WON), DS_TEAM, "an", True, 9, 10, []),
    "engineer does its part": (trace(ENGINEER_OK), DS_TEAM, "de", False, 8, 10, []),
    "analyst runs clean and saves nothing, while the episode runs": (
        trace(ENGINEER_OK, MODELER_OK, act("an", "analyst", 2, "", ran(stdout="predicted"))), DS_TEAM, "an", False, 0, 3, ["analyst"],
    ),
    "an empty artifact is a missing one": (
        trace(act("mo", "modeler", 0, "", Execution("x", "ok", stdout="ok", files=(FileChange("model.pkl", "created", 0, "e3b0"),)))),
        DS_TEAM[1:2], "mo", False, 0, 3, ["modeler"],
    ),
    "a broken upstream file is the upstream's": (
        trace(
            act("mo", "modeler", 0, "", Execution("x", "ok", stdout="ok", files=(FileChange("model.pkl", "created", 0, "e3b0"),))),
            act("an", "analyst", 1, "", ran(error=("EOFError", "Ran out of input: model.pkl"))),
        ),
        DS_TEAM[1:], "an", False, 3, 5, ["modeler"],
    ),
    "a downstream agent deletes a teammate's artifact": (
        trace(ENGINEER_OK, act("mo", "modeler", 1, "", ran(writes=["model.pkl"], deletes=["X_test.pkl"], stdout="ok"))),
        DS_TEAM, "mo", False, 0, 2, ["modeler"],
    ),
    "a first look at the data is no fault": (
        trace(act("de1", "engineer", 0, "", ran(stdout="5 columns")), act("de2", "engineer", 1, "", *ENGINEER_OK.executions), outcome=WON),
        DS_TEAM, "de1", True, 7, 10, [],
    ),
    "a first look at the data while the episode runs": (
        trace(act("de1", "engineer", 0, "", ran(stdout="5 columns"), tool_calls=({"name": "python"},))), DS_TEAM, "de1", False, 5, 8, [],
    ),
    "an error put right in the next turn": (
        trace(act("x1", "executor", 0, "", ran(error=("NameError", "pd"))), act("x2", "executor", 1, "", ran(stdout="42"))),
        MATH_TEAM, "x2", False, 8, 8, [],
    ),
    "an error put right within the action": (
        trace(act("x1", "executor", 0, "", ran(error=("NameError", "pd")), ran(stdout="42"))), MATH_TEAM, "x1", False, 8, 8, [],
    ),
    "the same error again": (
        trace(act("x1", "executor", 0, "", ran(error=("NameError", "pd"))), act("x2", "executor", 1, "", ran(error=("NameError", "pd")))),
        MATH_TEAM, "x2", False, 0, 1, ["executor"],
    ),
    "code that doesn't parse": (
        trace(act("x", "executor", 0, "", ran(error=("SyntaxError", "bad")))),
        MATH_TEAM, "x", False, 0, 1, ["executor"]
    ),
    "code that runs for ever": (trace(act("x", "executor", 0, "", ran("timeout"))), MATH_TEAM, "x", False, 0, 3, ["executor"]),
    "code that eats all memory": (trace(act("x", "executor", 0, "", ran("killed"))), MATH_TEAM, "x", False, 0, 3, ["executor"]),
    "code that shows nothing": (trace(act("x", "executor", 0, "", ran())), MATH_TEAM, "x", False, 5, 5, ["executor"]),
    "a correct plan and wrong code: the plan": (

               solved(PLAN, WRONG_CODE, outcome=FAILED),
        MATH_TEAM, "s", True, 4, 6, ["executor"],
    ),
    "a correct plan and wrong code: the code": (

               solved(PLAN, WRONG_CODE, outcome=FAILED),
        MATH_TEAM, "x", True, 0, 1, ["executor"],
    ),
    "a verifier that overrides a right answer": (
        solved(act("s", "solver", 0, r"\boxed{42}"), act("v", "verifier", 1, r"No: \boxed{41}")), MATH_TEAM, "v", False, 0, 1, ["verifier"],
    ),
    "the solver whose right answer was overridden": (
        solved(act("s", "solver", 0, r"\boxed{42}"), act("v", "verifier", 1, r"\boxed{41}"), outcome=FAILED),
        MATH_TEAM, "s", True, 6, 6, [],
    ),
    "a verifier that corrects a wrong answer": (
        solved(act("s", "solver", 0, r"\boxed{41}"), act("v", "verifier", 1, r"\boxed{42}")), MATH_TEAM, "v", False, 9, 10, [],
    ),
    "a verifier that passes a wrong answer on": (
        solved(act("s", "solver", 0, r"\boxed{41}"), act("v", "verifier", 1, r"\boxed{41}")), MATH_TEAM, "v", False, 0, 2, ["verifier"],
    ),
    "silence": (trace(act("s", "solver", 0, "")), MATH_TEAM, "s", False, 0, 1, ["solver"]),
    "nothing but thinking": (trace(act("s", "solver", 0, "<think>hm")), MATH_TEAM, "s", False, 0, 1, ["solver"]),
    "cut off at the length limit": (
        trace(act("s", "solver", 0, "First we", finish_reason="length")),
        MATH_TEAM, "s", False, 0, 4, ["solver"]
    ),
    "round in circles": (trace(act("s", "solver", 0, "so we get the sum " * 100)), MATH_TEAM, "s", False, 0, 4, ["solver"]),
    "a code block left open": (trace(act("s", "solver", 0, "```python\nprint(1)")), MATH_TEAM, "s", False, 4, 4, ["solver"]),
}  # fmt: skip


def test_there_are_at_least_thirty_golden_cases():
    assert len(GOLDEN) >= 30


@pytest.mark.parametrize(("tr", "team", "action", "hindsight", "low", "high", "blame"), GOLDEN.values(), ids=GOLDEN.keys())
async def test_golden(tr, team, action, hindsight, low, high, blame):
    verdict = await EvidenceCoach().score(case_for(tr, action, team, hindsight=hindsight))
    assert low <= verdict.score <= high, verdict
    assert sorted(verdict.blame) == blame, verdict
    assert verdict.reason


async def test_who_owed_the_file_scores_below_who_reported_it():
    tr = trace(ENGINEER_NO_TEST, MODELER_OK, act("an", "analyst", 2, "X_test.pkl is missing."), outcome=FAILED)
    scores = {c.agent: (await EvidenceCoach().score(c)).score for c in cases_for(tr, DS_TEAM)}
    assert scores["engineer"] < scores["analyst"]


@pytest.mark.parametrize(
    "case",
    [make_case(output="", executions=(), error="connection lost"), make_case(executions=(ran("lost"),))],
    ids=["call failed", "sandbox lost"],
)
async def test_what_the_infrastructure_broke_has_no_verdict(case):
    verdict = await EvidenceCoach().score(case)
    assert verdict.score is None
    assert verdict.error


async def test_the_same_case_has_the_same_verdict():
    judge = EvidenceCoach()
    a, b = await judge.score(make_case()), await judge.score(make_case())
    assert (a.score, a.reason, a.blame, a.coach) == (b.score, b.reason, b.blame, b.coach)


async def test_a_users_rule_adds_to_the_score_and_the_reason():
    def no_units(case):
        return None if "cm" in case.output else [Finding("gives no unit", delta=-1.5, blame=(case.agent,)), Finding("also", delta=0)]

    plain, more = EvidenceCoach(), EvidenceCoach(extra=[no_units])
    a, b = await plain.score(make_case()), await more.score(make_case())
    assert b.score == a.score - 1.5
    assert "gives no unit" in b.reason and b.blame == ("executor",)
    assert a.coach != b.coach
    assert [f.rule for f in more.findings(make_case())][-1] == "no_units"


async def test_a_rule_that_fails_gives_no_score_and_is_named():
    def broken(case):
        return 1 / 0

    with pytest.raises(CoachError, match=r"'broken'.*act-b.*ZeroDivisionError"):
        await EvidenceCoach(extra=[broken]).score(make_case())


@pytest.mark.parametrize("returned", [7, "bad", [3], Finding("x", delta=math.nan), Finding("x", ceiling=math.inf)])
async def test_a_rule_that_returns_something_else_is_named(returned):
    def odd(case):
        return returned

    with pytest.raises(CoachError, match="'odd'"):
        await EvidenceCoach(extra=[odd]).score(make_case())


@pytest.mark.parametrize(
    ("findings", "score"),
    [
        ([], 5),
        ([Finding("", 9)], 10),
        ([Finding("", -9)], 0),
        ([Finding("", floor=7)], 7),
        ([Finding("", ceiling=2)], 2),
        ([Finding("", floor=8), Finding("", ceiling=3)], 3),
        ([Finding("", 3, floor=6), Finding("", floor=4)], 8),
        ([Finding("", floor=20)], 10),
        ([Finding("", ceiling=-3)], 0),
    ],
)
def test_deltas_then_floors_then_ceilings(findings, score):
    assert combine(findings) == score


def test_a_base_outside_the_scale_is_refused():
    with pytest.raises(ConfigError, match="base"):
        EvidenceCoach(base=11)


async def test_the_outcome_coach_gives_every_action_the_outcome_and_nothing_without_one():
    tr = trace(ENGINEER_OK, MODELER_OK, outcome=Outcome(False, "weak", score=0.3))
    verdicts = [await OutcomeCoach().score(c) for c in cases_for(tr, DS_TEAM)]
    assert [v.score for v in verdicts] == [3.0, 3.0]
    none = await OutcomeCoach().score(case_for(tr, "de", DS_TEAM))
    assert none.score is None
    assert "hindsight" in none.error


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{41}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b}c", None),
        ("steps\n#### 1,234", "1,234"),
        ("The answer is 42.", "42."),
        ("**Answer:** 7", "** 7"),
        ("no number here", None),
    ],
)
def test_the_last_stated_answer_is_found(text, answer):
    assert answer_in(text) == answer


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("42.", "42", True),
        ("** 7", "7", True),
        ("1,234", "1234", True),
        ("0.50", "1/2", True),
        (r"\frac{1}{2}", "0.5", True),
        ("$42$", r"\boxed{42}", True),
        ("41", "42", False),
        ("x + 1", "1 + x", None),
        ("1/0", "3", None),
        ("1e999999999", "42", None),
        ("9" * 400, "42", None),
        (None, "42", None),
    ],
)
def test_answers_are_compared_where_that_is_certain(answer, reference, same):
    assert same_answer(answer, reference) is same
