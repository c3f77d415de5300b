"""A case as text: everything a coach must see is there, and labelled as what it is."""

from mappa_graph.coach.render import Limits, render_case, render_episode
from mappa_graph.record import FileChange, Outcome
from tests.fakes.coach_cases import DS_TEAM, Step, episode_cases, make_case, ran


def full_case():
    return make_case(
        team=DS_TEAM,
        agent="analyst",
        turn=1,
        thinking="maybe the join is wrong",
        tool_calls=({"name": "python", "args": {"code": "predict()"}},),
        executions=(ran(error=("KeyError", "'price'"), stdout="loading\n", stderr="a warning", code="predict()", note="kernel kept"),),
        files_before={"model.pkl": "modeler", "train.csv": ""},
        files_after=(FileChange("submission.csv", "created", 120, "aa"),),
        finish_reason="tool_calls",
        before=(Step("act-a", "modeler", "fitted a forest", (ran(stdout="auc 0.8", writes=["model.pkl"]),)),),
        after=(Step("act-c", "analyst", "trying again"),),
        reference="0.91",
        outcome=Outcome(False, "no submission", score=0.2),
    )


def test_the_whole_evidence_is_in_the_case():
    text = render_case(full_case())
    for part in (
        "Sum the price column.",
        "predicts and submits",
        "must write:",
        '"submission.csv"',
        "maybe the join is wrong",
        "I ran the code and got 42.",
        "finish reason: tool_calls",
        '{"name": "python", "args": {"code": "predict()"}}',
        "status error",
        "predict()",
        "loading",
        "a warning",
        "KeyError: 'price'",
        "kernel kept",
        '"model.pkl" (by modeler)',
        '"train.csv" (by the task)',
        '"submission.csv" (created, 120 bytes)',
        "fitted a forest",
        "auc 0.8",
        "trying again",
        "0.91",
        "failure, value 0.2 of 1",
        "no submission",
        "turn 2 of this agent",
    ):
        assert part in text, part


def test_the_same_case_is_the_same_text():
    assert render_case(full_case()) == render_case(full_case())


def test_without_hindsight_and_reference_nothing_of_them_is_told():
    text = render_case(make_case())
    assert "Reference" not in text
    assert "Outcome" not in text
    assert "after it" not in text


def test_a_tool_call_without_a_result_is_said_to_have_none():
    assert "no result of a tool is known" in render_case(make_case(tool_calls=({"name": "python"},), executions=()))


def test_of_a_long_history_the_first_and_the_latest_messages_are_kept():
    messages = tuple({"role": "user", "content": f"message {i} " + "x" * 500} for i in range(100))
    text = render_case(make_case(messages=messages))
    assert "message 0 " in text
    assert "message 99 " in text
    assert "message 50 " not in text
    assert "messages left out" in text


def test_of_many_actions_the_first_and_the_latest_are_kept():
    steps = tuple(Step(f"s{i}", "solver", f"step number {i}!") for i in range(300))
    text = render_case(make_case(before=steps), Limits(steps=8000))
    assert "step number 0!" in text
    assert "step number 299!" in text
    assert "actions left out" in text
    assert "Action #301, the one to score" in text


def test_an_episode_shows_each_action_under_its_label_whatever_the_order():
    cases = episode_cases(3)
    text = render_episode(cases[::-1])
    assert [line.split(":")[0] for line in text.split("\n") if line.startswith("== Action")] == [
        "== Action #3",
        "== Action #2",
        "== Action #1",
    ]
    assert text.count("Outcome of the episode") == 1


def test_an_episode_of_many_floods_stays_within_bounds():
    cases = episode_cases(40)
    flooded = [make_case(c.action_id, output="y" * 100_000, before=c.before, executions=(ran(stdout="z" * 90_000),)) for c in cases]
    assert len(render_episode(flooded)) < 250_000
