"""A case is built from the record, holds what it may hold, and copes with an episode that still runs."""

import random
from dataclasses import replace

import pytest

from mappa_graph.coach import AgentCard, Case, EvidenceCoach, Step, case_for, cases_for, transition_case
from mappa_graph.coach import case as casing
from mappa_graph.coach.case import Cases, net_changes, normal_path, split_thinking
from mappa_graph.coach.pending import attempts
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


def tangled(seed):
    """An episode with agents in turn and side by side, attempts of several of them, files that come and go, and nodes without a call."""
    draw = random.Random(seed)
    texts = ["", "plain", "<think>a</think>b", "a</think>b", "x<think>cut off", "<think>c</think>d<think>e</think>f"]
    changes = [(path, kind) for path in ("a.csv", "./a.csv", "b\\c.pkl", "d.txt") for kind in ("created", "changed", "deleted")]
    n = draw.randrange(1, 30)
    actions = []
    for i in range(n):
        runs = [
            Execution(f"x{k}", "ok", files=tuple(FileChange(*draw.choice(changes)) for _ in range(draw.randrange(4))))
            for k in range(draw.randrange(3))
        ]
        more = {"ended": draw.choice([0.0, float(i)]), "error": draw.choice([None, "E: no"]), "finish_reason": draw.choice([None, "stop"])}
        more |= {"messages": ({"role": "user", "content": f"m{i}"},), "tool_calls": ({"id": f"c{i}"},) * draw.randrange(3)}
        agent, order = draw.choice(["solver", "executor", "verifier"]), draw.randrange(2 * n)  # some at the same place
        actions.append(act(f"a{i}", agent, order, draw.choice(texts), *runs, transition_id=f"t{draw.randrange(n)}", **more))
    edges = tuple((i, j) for j in range(n) for i in range(j) if draw.random() < 0.2)
    quiet = tuple(Transition(f"q{i}", draw.choice(["loader", "solver"]), "p", i, input=i, output="o", started=float(i)) for i in range(3))
    made = trace(*actions, outcome=Outcome(True), reference="42", stratum="s")
    return replace(made, edges=edges, transitions=(*made.transitions, *quiet))


def files_of(actions, given):
    found = dict.fromkeys(map(normal_path, given), "")
    for action in actions:
        for change in (c for e in action.executions for c in e.files):
            found.pop(normal_path(change.path), None)
            if change.change != "deleted":
                found[normal_path(change.path)] = action.agent
    return found


def by_definition(tr, wanted, team, hindsight, given, reference, action_id):
    """What the case of some actions is by what its fields say, made from the whole trace."""
    ordered = sorted(tr.actions, key=lambda a: a.order)
    acts = [a for a in ordered if a.id in wanted]
    first = ordered.index(acts[0])
    earlier, later = ordered[:first], [a for a in ordered[first:] if a.id not in wanted]
    steps = [[Step(a.id, a.agent, split_thinking(a.output)[1], a.executions) for a in side] for side in (earlier, later)]
    return Case(
        action_id, tr.episode.id, tr.episode.environment, tr.episode.task, tuple(team), acts[0].agent,
        turn=sum(a.agent == acts[0].agent for a in earlier), messages=tuple(acts[0].messages),
        output="\n\n".join(filter(None, (split_thinking(a.output)[1] for a in acts))),
        thinking="\n\n".join(filter(None, (split_thinking(a.output)[0] for a in acts))),
        tool_calls=tuple(c for a in acts for c in a.tool_calls), executions=tuple(e for a in acts for e in a.executions),
        error=acts[-1].error, finish_reason=acts[-1].finish_reason, files_before=files_of(earlier, given), files_after=net_changes(acts),
        before=tuple(steps[0]), after=tuple(steps[1]) if hindsight else (), reference=tr.episode.reference if reference else None,
        outcome=tr.episode.outcome if hindsight else None, stratum=tr.episode.stratum,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_cases_from_one_book_are_what_their_fields_say_in_whatever_order_they_are_asked_for(seed):
    tr, draw = tangled(seed), random.Random(seed)
    given, reference, hindsight = draw.sample(["./a.csv", "z"], draw.randrange(3)), draw.random() < 0.5, draw.random() < 0.5
    options = {"reveal_reference": reference, "files_given": given}
    book = Cases(tr, DS_TEAM, **options)
    ids = [a.id for a in tr.actions]
    for id in draw.sample(ids, len(ids)):
        expected = by_definition(tr, {id}, DS_TEAM, hindsight, given, reference, id)
        assert book.action(id, hindsight=hindsight) == expected == case_for(tr, id, DS_TEAM, hindsight=hindsight, **options)
    in_order = [a.id for a in sorted(tr.actions, key=lambda a: a.order)]
    assert cases_for(tr, DS_TEAM, **options) == [by_definition(tr, {id}, DS_TEAM, True, given, reference, id) for id in in_order]
    for id in {a.transition_id for a in tr.actions}:
        wanted = {a.id for a in tr.actions if a.transition_id == id}
        expected = by_definition(tr, wanted, DS_TEAM, hindsight, given, reference, id)
        assert book.transition(id, hindsight=hindsight) == expected == transition_case(tr, id, DS_TEAM, hindsight=hindsight, **options)
    for group in attempts(tr):
        about = next(a for a in tr.actions if a.id == group[0]).transition_id
        alone = replace(tr, actions=tuple(a for a in tr.actions if a.transition_id != about or a.id in group))
        assert book.attempt(group, hindsight=hindsight) == by_definition(alone, set(group), DS_TEAM, hindsight, given, reference, group[0])
    for t in tr.transitions[-3:]:
        found = book.transition(t.id, hindsight=hindsight)
        earlier = [a for a in sorted(tr.actions, key=lambda a: a.order) if a.ended and a.ended <= t.started]
        assert [s.action_id for s in found.before] == [a.id for a in earlier] and found.files_before == files_of(earlier, given)
    with pytest.raises(CoachError, match="no action 'z'"):
        book.attempt([ids[0], "z"])


@pytest.mark.parametrize("hindsight", [False, True])
def test_what_the_cases_of_an_episode_share_is_made_once(hindsight, monkeypatch):
    tr = trace(*(act(f"a{i}", "solver", i, f"<think>t</think>{i}", ran(writes=[f"f{i % 7}"])) for i in range(300)))
    work = []
    for name in ("split_thinking", "_write"):
        real = getattr(casing, name)
        monkeypatch.setattr(casing, name, lambda *args, name=name, real=real: (work.append(name), real(*args))[1])
    made = cases_for(tr, (), hindsight=hindsight)
    assert work.count("split_thinking") == 300 and work.count("_write") == 299
    assert sum(len(c.before) for c in made) == 300 * 299 // 2
    assert all(one is other for one, other in zip(made[-1].before, made[-2].before, strict=False))
