"""A case is built from the record, holds what it may hold, and copes with an episode that still runs."""

import pytest

from mappa_graph.coach import AgentCard, EvidenceCoach, case_for, cases_for, transition_case
from mappa_graph.coach.case import split_thinking
from mappa_graph.errors import CoachError
from mappa_graph.record import Episode, EpisodeTrace, Execution, FileChange, Outcome, Transition
from tests.fakes.coach_cases import DS_TEAM, act, ran, trace


def three():
    return trace(
        act("a", "engineer", 0, "<think>load it</think>saved", ran(writes=["X_train.pkl", "tmp.csv"])),
        act("b", "modeler", 1, "fitted", ran(writes=["model.pkl"], deletes=["tmp.csv"])),
        act("c", "analyst", 2, "done"),
        reference="42",
        outcome=Outcome(True, "good"),
        stratum="regression",
        environment="ds",
    )


@pytest.mark.parametrize(
    ("text", "thinking", "output"),
    [
        ("plain", "", "plain"),
        ("<think>a</think>b", "a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("<THINK>a</Think>b", "a", "b"),
        ("x<think>cut off while thinking", "cut off while thinking", "x"),
        ("<think>a</think>b<think>c</think>d", "a\nc", "bd"),
        ("<think>a<think>b</think>c", "a<think>b", "c"),
        ("a</think>b</think>c", "a", "b</think>c"),
        ("", "", ""),
    ],
)
def test_thinking_is_split_from_output(text, thinking, output):
    assert split_thinking(text) == (thinking, output)


def test_a_case_holds_what_was_known_then():
    case = case_for(three(), "b", DS_TEAM)
    assert (case.agent, case.environment, case.task, case.stratum) == ("modeler", "ds", "Sum the price column.", "regression")
    assert [(s.action_id, s.agent, s.output) for s in case.before] == [("a", "engineer", "saved")]
    assert case.after == ()
    assert case.outcome is None
    assert case.reference == "42"
    assert case.card.writes == ("model.pkl",)


def test_hindsight_adds_what_came_after_and_the_outcome():
    case = case_for(three(), "b", DS_TEAM, hindsight=True)
    assert [s.action_id for s in case.after] == ["c"]
    assert case.outcome == Outcome(True, "good")


def test_the_reference_is_shown_only_where_allowed():
    assert case_for(three(), "b", DS_TEAM, reveal_reference=False, hindsight=True).reference is None


def test_files_are_known_with_who_wrote_them_last():
    tr = three()
    assert case_for(tr, "a", DS_TEAM, files_given=["train.csv", "./test.csv"]).files_before == {"train.csv": "", "test.csv": ""}
    assert case_for(tr, "b", DS_TEAM).files_before == {"X_train.pkl": "engineer", "tmp.csv": "engineer"}
    assert case_for(tr, "c", DS_TEAM).files_before == {"X_train.pkl": "engineer", "model.pkl": "modeler"}


def test_what_an_action_did_to_a_file_is_told_once():
    made = FileChange("out.csv", "created", 1)
    more = FileChange("./out.csv", "changed", 9)
    scratch = (FileChange("s", "created"), FileChange("s", "deleted"))
    tr = trace(act("a", "analyst", 0, "", Execution("1", "ok", files=(made, *scratch)), Execution("2", "ok", files=(more,))))
    assert case_for(tr, "a", ()).files_after == (FileChange("out.csv", "created", 9),)


def test_turns_are_counted_by_agent_and_in_order_of_time():
    tr = trace(act("late", "a", 3), act("first", "a", 0), act("other", "b", 1), act("second", "a", 2))
    assert [(c.action_id, c.turn) for c in cases_for(tr, ())] == [("first", 0), ("other", 0), ("second", 1), ("late", 2)]


def test_all_cases_of_an_episode_are_those_of_its_actions_one_by_one():
    tr = three()
    assert cases_for(tr, DS_TEAM) == [case_for(tr, a, DS_TEAM, hindsight=True) for a in ("a", "b", "c")]


def test_a_running_episode_gives_a_case_of_what_there_is():
    tr = EpisodeTrace(Episode("e"), (), (act("a", "solver", 0, ""),))
    case = case_for(tr, "a", (), hindsight=True)
    assert (case.outcome, case.after, case.reference, case.executions) == (None, (), None, ())
    assert case.card == AgentCard("solver")


def test_an_unknown_action_is_an_error_that_names_it():
    with pytest.raises(CoachError, match="no action 'z'"):
        case_for(three(), "z", DS_TEAM)


def test_a_transition_is_one_case_of_all_its_actions():
    tr = trace(
        act("a", "engineer", 0, "one", ran(stdout="1"), transition_id="t"),
        act("b", "engineer", 1, "<think>x</think>two", ran(writes=["X_train.pkl"]), transition_id="t", finish_reason="stop"),
        act("c", "modeler", 2, "three"),
    )
    case = transition_case(tr, "t", DS_TEAM, hindsight=True)
    assert (case.action_id, case.agent, case.output, case.thinking) == ("t", "engineer", "one\n\ntwo", "x")
    assert len(case.executions) == 2
    assert [s.action_id for s in case.after] == ["c"]
    assert case.finish_reason == "stop"
    assert [c.path for c in case.files_after] == ["X_train.pkl"]


async def test_a_transition_without_a_marked_call_can_be_scored_for_the_record():
    tr = EpisodeTrace(Episode("e", task="t"), (Transition("t1", "loader", "loader", 0, input={"n": 1}, output="loaded"),), ())
    case = transition_case(tr, "t1", DS_TEAM)
    assert (case.agent, case.output) == ("", "loaded")
    assert (await EvidenceCoach().score(case)).score == 5


def test_an_unknown_transition_is_an_error():
    with pytest.raises(CoachError, match="no transition 'z'"):
        transition_case(three(), "z", DS_TEAM)
