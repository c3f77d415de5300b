"""Records go to JSON and back unchanged, and refuse what would poison training."""

import json
import math

import pytest

from mappa_graph.record import (
    Action,
    Call,
    Episode,
    EpisodeTrace,
    Execution,
    ExecutionErrorInfo,
    FileChange,
    Outcome,
    Transition,
    Verdict,
    from_json,
    to_json,
)


def trace() -> EpisodeTrace:
    execution = Execution(
        "e",
        "error",
        code="1/0",
        error=ExecutionErrorInfo("ZeroDivisionError", "division by zero"),
        files=(FileChange("a.csv", "created", 3),),
    )
    return EpisodeTrace(
        Episode("ep", outcome=Outcome(False, "wrong", answer="4", metrics={"f1": 0.5}), thread_id="t"),
        transitions=(Transition("n", "solve", "solve", 1, parents=("m",), input={"x": [1, None]}),),
        actions=(
            Action("a", "n", "solver", "solver", 0, call_id="c", messages=({"role": "user", "content": "hi"},), executions=(execution,)),
        ),
        edges=((0, 1), (1, 2)),
        verdicts={"a": Verdict(7.5, "good", blame=("b",)), "b": Verdict(None, error="TimeoutError")},
        calls={"a": Call("c", "solver", 3, (1, 2), (3, 4), (-0.5, -0.25), "stop", sampling={"temperature": 1.0})},
    )


def test_a_trace_survives_json():
    assert from_json(EpisodeTrace, json.loads(json.dumps(to_json(trace())))) == trace()


def test_defaults_are_not_written():
    assert to_json(Outcome(True)) == {"success": True}


@pytest.mark.parametrize("score", [-0.1, 10.1, math.nan, math.inf])
def test_a_score_outside_the_scale_is_refused(score):
    with pytest.raises(ValueError, match=r"0\.\.10"):
        Verdict(score)


def test_logprobs_must_match_the_tokens():
    with pytest.raises(ValueError, match="1 logprobs for 2"):
        Call("c", "p", 0, (1,), (2, 3), (-0.1,), "stop")


def test_an_outcome_is_worth_its_score_or_else_its_success():
    assert (Outcome(True).value, Outcome(False).value, Outcome(False, score=0.25).value) == (1.0, 0.0, 0.25)
    with pytest.raises(ValueError, match="outside 0"):
        Outcome(True, score=1.5)
