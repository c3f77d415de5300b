"""Scoring a large store: what a pass holds in memory does not grow with an episode's length or with the number of causes."""

from mappa_graph.coach import EvidenceCoach, pending
from mappa_graph.coach.case import Cases
from mappa_graph.coach.pending import score_pending
from mappa_graph.errors import CoachError
from mappa_graph.store import TraceStore
from tests.fakes.coach_cases import MATH_TEAM, act, trace


class Failing(EvidenceCoach):
    async def score(self, case):
        raise CoachError(f"no answer for {case.action_id}")


def stored(tmp_path, actions):
    store = TraceStore(tmp_path / "trace.db")
    store.save_episode(trace(*(act(f"a{i}", "solver", i, f"step {i}") for i in range(actions)), id="long"))
    return store


async def made_and_scored(tmp_path, monkeypatch, when):
    """The most cases of one episode that were made and not yet scored, with two at once."""
    waiting, most = 0, 0

    class Counted(Cases):
        def action(self, *args, **options):
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            return super().action(*args, **options)

    class Counting(EvidenceCoach):
        async def score(self, case):
            nonlocal waiting
            waiting -= 1
            return await super().score(case)

    monkeypatch.setattr(pending, "Cases", Counted)
    with stored(tmp_path, 40) as store:
        done = await score_pending(store, Counting(), MATH_TEAM, when=when, concurrency=2)
    assert done.scored == 40 and waiting == 0
    return most


async def test_a_long_episodes_cases_are_made_as_they_are_scored(tmp_path, monkeypatch):
    for when in ("completed", "generated", "episode"):
        assert await made_and_scored(tmp_path / when, monkeypatch, when) <= 2


async def test_causes_are_counted_without_end_and_kept_up_to_a_hundred(tmp_path):
    with stored(tmp_path, 150) as store:
        done = await score_pending(store, Failing(), MATH_TEAM)
    assert len(done.causes) == 101
    assert done.causes["other causes"] == 50
    assert sum(done.causes.values()) == done.unscored == 150


async def test_one_failing_action_does_not_take_the_scores_of_its_episode(tmp_path):
    class Once(EvidenceCoach):
        async def score(self, case):
            if case.action_id == "a1":
                raise CoachError("down")
            return await super().score(case)

    with stored(tmp_path, 3) as store:
        done = await score_pending(store, Once(), MATH_TEAM, when="episode")
        assert {id: v.score is None for id, v in store.episode("long").verdicts.items()} == {"a0": False, "a1": True, "a2": False}
    assert (done.scored, done.unscored) == (2, 1)
