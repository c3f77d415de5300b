"""Scoring what a store holds without a score, from where the last pass stopped."""

import asyncio
from dataclasses import replace

import pytest

from mappa_graph.coach import Budget, EvidenceCoach, LLMCoach, case_for, signs
from mappa_graph.coach.pending import UnscoredWatch, as_generated, better_actions, pending_actions, score_pending
from mappa_graph.errors import CoachError, ConfigError
from mappa_graph.record import Outcome, Transition, Verdict
from mappa_graph.store import TraceStore
from mappa_graph.trainers.batch import samples_from_trace
from tests.fakes.coach_cases import MATH_TEAM, ScriptedModel, act, ran, trace, verdict_json, verdicts_json


def episode(id, **more):
    return trace(
        act(f"{id}-s", "solver", 0, f"plan {id}", transition_id=f"{id}-t1", messages=({"role": "user", "content": "sum"},)),
        act(f"{id}-x", "executor", 1, f"code {id}", ran(stdout="42"), transition_id=f"{id}-t2"),
        act(f"{id}-y", "executor", 2, f"more {id}", ran(stdout="43"), transition_id=f"{id}-t2"),
        id=id,
        outcome=Outcome(True),
        **more,
    )


@pytest.fixture
def store(tmp_path):
    with TraceStore(tmp_path / "trace.db") as store:
        for i in range(4):
            store.save_episode(episode(f"e{i}", iteration=i % 2))
        yield store


def scores(store):
    return {a: v.score for t in store.traces() for a, v in t.verdicts.items()}


async def test_every_pending_action_is_scored_and_kept(store):
    done = await score_pending(store, EvidenceCoach(), MATH_TEAM)
    assert (done.episodes, done.pending, done.scored, done.unscored) == (4, 12, 12, 0)
    assert len(scores(store)) == 12
    assert None not in scores(store).values()
    assert (await score_pending(store, EvidenceCoach(), MATH_TEAM)).pending == 0


async def test_a_pass_goes_on_where_the_budget_stopped_the_last_one(store):
    first = LLMCoach(ScriptedModel(lines=[verdict_json(6)]), budget=Budget(calls=5), retries=0)
    stopped = await score_pending(store, first, MATH_TEAM, concurrency=1)
    assert (stopped.scored, stopped.unscored) == (5, 7)
    assert any("budget" in cause for cause in stopped.causes)
    model = ScriptedModel(lines=[verdict_json(3)])
    rest = await score_pending(store, LLMCoach(model, retries=0), MATH_TEAM)
    assert (rest.pending, rest.scored, len(model.heard)) == (7, 7, 7)
    assert sorted(scores(store).values()) == [3.0] * 7 + [6.0] * 5


async def test_a_failing_pass_takes_no_score_away(store):
    await score_pending(store, EvidenceCoach(), MATH_TEAM)
    before = scores(store)
    down = LLMCoach(ScriptedModel(lines=[RuntimeError("down")]), retries=0)
    done = await score_pending(store, down, MATH_TEAM, again=True)
    assert done.unscored == 12
    assert scores(store) == before


async def test_the_episodes_can_be_chosen(store):
    assert (await score_pending(store, EvidenceCoach(), MATH_TEAM, iteration=1)).episodes == 2
    assert {a.split("-")[0] for a in scores(store)} == {"e1", "e3"}


async def test_a_transitions_score_is_shared_by_its_actions(store):
    done = await score_pending(store, LLMCoach(ScriptedModel(lines=[verdict_json(4)]), retries=0), MATH_TEAM, unit="transition")
    assert (done.scored, done.calls) == (12, 8)
    assert set(scores(store).values()) == {4.0}


async def test_hindsight_asks_once_for_each_episode_and_the_pass_tells_what_it_cost(store):
    lines = [verdicts_json(("#1", 1), ("#2", 2), ("#3", 3))]
    model = ScriptedModel(lines=lines)
    done = await score_pending(store, LLMCoach(model, retries=0), MATH_TEAM, when="episode")
    assert len(model.heard) == 4
    assert scores(store)["e2-y"] == 3
    assert done.per_episode()["calls"] == pytest.approx(1)
    assert done.per_episode()["tokens"] > 0


async def test_before_the_tools_answered_nothing_of_them_is_in_the_case(store):
    case = case_for(episode("e"), "e-x", MATH_TEAM)
    early = as_generated(case)
    assert (early.executions, early.files_after, early.output) == ((), (), case.output)
    model = ScriptedModel(lines=[verdict_json(4)])
    await score_pending(store, LLMCoach(model, retries=0), MATH_TEAM, when="generated", iteration=0)
    assert all("stdout" not in heard[-1].content.split("== Earlier")[0] for heard in model.heard)


async def test_a_run_stops_when_too_many_actions_have_no_score(store):
    down = LLMCoach(ScriptedModel(lines=[RuntimeError("no route to host")]), retries=0)
    with pytest.raises(CoachError, match=r"no score for 4 of 4 actions.*no route to host"):
        await score_pending(store, down, MATH_TEAM, watch=UnscoredWatch(0.5, least=4), concurrency=1)


def test_the_watch_lets_a_few_failures_pass():
    watch = UnscoredWatch(0.2, least=10)
    for i in range(100):
        watch.add(Verdict(None, error="x") if i % 5 == 4 else Verdict(5.0))
    with pytest.raises(CoachError, match="more than 20%"):
        watch.add(None)


async def test_hindsight_by_transition_asks_once_and_shares_the_scores(store):
    model = ScriptedModel(lines=[verdicts_json(("#1", 1), ("#2", 2))])
    done = await score_pending(store, LLMCoach(model, retries=0), MATH_TEAM, unit="transition", when="episode")
    assert (done.scored, len(model.heard)) == (12, 4)
    assert [scores(store)[f"e1-{a}"] for a in "sxy"] == [1, 2, 2]


async def test_a_transition_that_is_not_over_is_not_scored_as_one(store):
    with pytest.raises(ConfigError, match="transition"):
        await score_pending(store, EvidenceCoach(), MATH_TEAM, unit="transition", when="generated")


async def test_nodes_without_an_agent_are_scored_for_the_record_and_are_no_actions(store):
    plain = trace(act("e9-s", "solver", 0, "plan", transition_id="e9-t1"), id="e9")
    store.save_episode(replace(plain, transitions=(*plain.transitions, Transition("e9-router", "router", "router", 1, output="left"))))
    for pending in (13, 0):
        done = await score_pending(store, EvidenceCoach(), MATH_TEAM, nodes=True)
        assert done.pending == pending
    kept = store.episode("e9")
    assert kept.verdicts.keys() == {"e9-s", "e9-router"}
    assert signs([kept]).score == kept.verdicts["e9-s"].score
    assert samples_from_trace(kept, gamma=0.5)[1]["no_call"] == 1


async def test_a_killed_pass_keeps_what_it_had(store):
    seen = asyncio.Event()

    class Slow(EvidenceCoach):
        async def score(self, case):
            if case.episode_id == "e2":
                await asyncio.sleep(60)
            return await super().score(case)

    def progress(verdict):
        if len(scores(store)) >= 6:
            seen.set()

    task = asyncio.ensure_future(score_pending(store, Slow(), MATH_TEAM, concurrency=2, progress=progress))
    await asyncio.wait_for(seen.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(scores(store)) == 6
    assert (await score_pending(store, EvidenceCoach(), MATH_TEAM)).pending == 6


def test_pending_actions_are_those_without_a_score():
    tr = episode("e")
    tr = type(tr)(tr.episode, tr.transitions, tr.actions, verdicts={"e-s": Verdict(5.0), "e-x": Verdict(None, error="down")})
    assert pending_actions(tr) == ["e-x", "e-y"]


def test_better_actions_become_preference_rows():
    tr = episode("e")
    tr = type(tr)(
        tr.episode,
        tr.transitions,
        tr.actions,
        verdicts={"e-s": Verdict(3.0, better_action="sum the column"), "e-x": Verdict(9.0), "e-y": Verdict(2.0, better_action="more e")},
    )
    assert list(better_actions([tr])) == [
        {
            "prompt": [{"role": "user", "content": "sum"}],
            "chosen": "sum the column",
            "rejected": "plan e",
            "agent": "solver",
            "score": 3.0,
            "action": "e-s",
            "episode": "e",
        }
    ]
