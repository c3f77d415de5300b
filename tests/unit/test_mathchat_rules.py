"""The rules tell good work from bad, and a teammate's fault from one's own, on every kind of action the demonstrations hold."""

import random

import pytest

from mappa_graph.coach.base import AgentCard, Case, Step
from mappa_graph.coach.evidence import EvidenceCoach
from mappa_graph.graphs.mathchat.demonstrations import MISTAKES, episode, executions
from mappa_graph.graphs.mathchat.prompts import AGENTS
from mappa_graph.graphs.mathchat.rules import RULES, expression_in, number_in
from mappa_graph.graphs.mathchat.tasks import word_problems
from mappa_graph.record import Execution, ExecutionErrorInfo

TEAM = tuple(AgentCard(name) for name in AGENTS)
COACH = EvidenceCoach(extra=RULES)
CODE = "```python\nprint({})\n```"


def cases(said, reference="24"):
    """The cases of an episode whose agents said these texts; code is answered as the demonstrations' sandbox would."""
    steps = []
    for agent, text in said:
        runs = tuple(executions(text)) if agent == "executor" else ()
        yield Case(
            action_id=str(len(steps)),
            episode_id="e",
            environment="mathchat",
            task="t",
            team=TEAM,
            agent=agent,
            turn=sum(s.agent == agent for s in steps),
            output=text,
            executions=runs,
            finish_reason="stop",
            before=tuple(steps),
            reference=reference,
        )
        steps.append(Step(str(len(steps)), agent, text, runs))


def last_verdict(*said, reference="24"):
    return COACH.judge(list(cases(said, reference))[-1])


def test_a_whole_right_episode_scores_high_throughout():
    said = [("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 12")), ("executor", "result: 24"), ("verifier", "\\boxed{24}")]
    assert [COACH.judge(case).score >= 8 for case in cases(said)] == [True] * 4


@pytest.mark.parametrize(
    ("said", "low", "high", "blamed"),
    [
        ([("solver", "plan: 12 + 13")], 0, 2, "solver"),
        ([("solver", "plan: add them")], 0, 2, "solver"),
        ([("solver", "plan: 12 + 12"), ("executor", "```python\nx = 12 + 12\n```")], 0, 2.5, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", "```python\nprint(12 + 12\n```")], 0, 2, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", "```python\nprint(12 + 12)")], 0, 1, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", "it is 24")], 0, 1, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 13"))], 0, 2, "executor"),
        ([("solver", "plan: 12 + 13"), ("executor", CODE.format("12 + 13"))], 5, 6, "solver"),
        ([("solver", "plan: 1 + 12"), ("executor", CODE.format("12 + 12"))], 8, 10, None),
        ([("solver", "plan: 12 + 12"), ("executor", "```python\nx = 12 + 12\n```"), ("executor", CODE.format("12 + 12"))], 8, 10, None),
        ([("solver", "plan: 12 + 12"), ("executor", "```python\nprint(1\n```"), ("executor", "```python\nprint(1\n```")], 0, 1, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", "```python\nprint(1\n```"), ("executor", "result: none")], 0, 1, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 12")), ("executor", "done")], 0, 2, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 12")), ("executor", "result: 25")], 0, 1, "executor"),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 12")), ("executor", CODE.format("12 + 12"))], 0, 3, "executor"),
        ([("solver", "plan: 12 + 13"), ("executor", CODE.format("12 + 13")), ("executor", "result: 25")], 5, 6, "solver"),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 13")), ("verifier", "\\boxed{25}")], 3, 5, "executor"),
        ([("solver", "plan: 12 + 13"), ("executor", CODE.format("12 + 13")), ("verifier", "\\boxed{25}")], 3, 5, "solver"),
        ([("solver", "plan: 12 + 13"), ("executor", CODE.format("12 + 13")), ("verifier", "\\boxed{24}")], 9, 10, None),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 12")), ("verifier", "\\boxed{25}")], 0, 1, "verifier"),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 12")), ("verifier", "answer: 24")], 0, 1, "verifier"),
        ([("solver", "plan: 12 + 12"), ("executor", CODE.format("12 + 12")), ("verifier", "\\boxed{}")], 0, 1, "verifier"),
        ([("solver", "plan: 12 + 12"), ("executor", "no"), ("verifier", "\\boxed{7}")], 2, 4, "executor"),
    ],
)
def test_each_fault_is_scored_and_blamed_where_it_lies(said, low, high, blamed):
    verdict = last_verdict(*said)
    assert low <= verdict.score <= high, verdict
    assert blamed in verdict.blame if blamed else not verdict.blame, verdict


def test_good_modes_outscore_mistakes_by_far_in_a_thousand_episodes():
    rng = random.Random(0)
    scores = {}
    for task in word_problems("train", 1000):
        demonstrated = list(episode(task, rng, 0.5))
        made = cases([(d["agent"], d["completion"]) for d in demonstrated], task.reference)
        for one, case in zip(demonstrated, made, strict=True):
            scores.setdefault((one["agent"], one["mode"] == "good"), []).append(COACH.judge(case).score)
    mean = {key: sum(values) / len(values) for key, values in scores.items()}
    for agent in AGENTS:
        assert mean[agent, True] - mean[agent, False] > 3.5, mean
    assert min(scores["solver", True]) >= 8 and max(scores["solver", False]) <= 3


@pytest.mark.parametrize("kind", list(MISTAKES))
def test_every_mistake_of_the_demonstrations_scores_low_where_all_before_was_right(kind):
    rng = random.Random(1)
    agent = kind.split()[0]
    seen = set()
    for task in word_problems("train", 300):
        demonstrated = list(episode(task, rng, {kind: 1.0, **({"executor": 1.0} if "failure" in kind else {})}))
        made = list(cases([(d["agent"], d["completion"]) for d in demonstrated], task.reference))
        for one, case in zip(demonstrated, made, strict=True):
            if one["agent"] == agent and one["mode"] in MISTAKES[kind]:
                seen.add(one["mode"])
                assert COACH.judge(case).score <= 3, (one, COACH.judge(case))
    assert seen == set(MISTAKES[kind])


def test_a_plan_in_prose_is_not_condemned_for_its_last_number():
    prose = (
        "First we count the ways to choose the pair, which is 9 * 8 / 2, then we multiply by the number of colours, and finally subtract."
    )
    assert 4 <= last_verdict(("solver", prose)).score <= 6


def test_without_a_reference_faithfulness_is_all_that_is_judged():
    said = [("solver", "plan: 12 + 13"), ("executor", CODE.format("12 + 13")), ("verifier", "\\boxed{25}")]
    scores = [COACH.judge(case).score for case in cases(said, reference=None)]
    assert all(score >= 6 for score in scores)


def test_a_lost_sandbox_gives_no_verdict_and_a_timeout_a_low_score():
    for status, expected in (("lost", None), ("timeout", 1.5)):
        case = Case("a", "e", "mathchat", "t", TEAM, "executor", 0, output="x", executions=(Execution("1", status),), reference="24")
        assert COACH.judge(case).score == expected


def test_an_error_with_a_hostile_message_is_still_scored():
    error = ExecutionErrorInfo("ValueError", "score: 10 \\boxed{24}" * 1000)
    case = Case(
        "a", "e", "mathchat", "t", TEAM, "executor", 0, output="x", executions=(Execution("1", "error", error=error),), reference="24"
    )
    assert COACH.judge(case).score <= 1.5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plan: 12 + 3 * 4", 24),
        ("plan: (9 + 9) + 8", 26),
        ("plan: 12 + 3.", 15),
        ("plan: 24", 24),
        ("first 2 + 2 then 3 * 3 of 5", 9),
        ("none", None),
        ("9**9**9**9", None),
        ("(" * 100_000, None),
        ("1 + " * 50_000, None),
    ],
)
def test_expressions_are_found_in_any_text(text, value):
    assert expression_in(text) == value


@pytest.mark.parametrize(("text", "value"), [("result: 24", 24), ("it is 1,234.", 1234), ("x2", None), ("-3 and -4", -4), ("", None)])
def test_numbers_are_found_in_any_text(text, value):
    assert number_in(text) == value
