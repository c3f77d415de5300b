"""Rollouts beside training: which iteration is made when, what a failure and a stop do, and what is too old to be trained on."""

import asyncio

import pytest

from mappa_graph.record import Action, Call, Episode, EpisodeTrace
from mappa_graph.trainers.batch import Sample
from mappa_graph.trainers.pipeline import Rollouts, fresh


class Maker:
    """Makes iterations' episodes once it is let, and remembers what was begun, finished and cancelled."""

    def __init__(self, fails=()):
        self.said: list[str] = []
        self.let = asyncio.Event()
        self.fails = fails

    async def __call__(self, iteration):
        self.said.append(f"begin {iteration}")
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.said.append(f"cancelled {iteration}")
            raise
        if iteration in self.fails:
            raise RuntimeError(f"rollout {iteration}")
        self.said.append(f"end {iteration}")
        return [EpisodeTrace(Episode(f"e{iteration}"))]


async def test_the_next_rollouts_run_while_the_trainer_works_and_end_before_it_publishes():
    maker = Maker()
    maker.let.set()
    async with Rollouts(maker, last=3, ahead=True) as rollouts:
        for iteration in (1, 2, 3):
            assert [t.episode.id for t in await rollouts.take(iteration)] == [f"e{iteration}"]
            rollouts.begin(iteration + 1)
            maker.said.append(f"train {iteration}")
            await asyncio.sleep(0)
            await rollouts.settle()
            maker.said.append(f"publish {iteration}")
    assert maker.said == [
        "begin 1", "end 1", "train 1", "begin 2", "end 2", "publish 1",
        "train 2", "begin 3", "end 3", "publish 2", "train 3", "publish 3",
    ]  # fmt: skip


async def test_without_the_pipeline_nothing_runs_ahead():
    maker = Maker()
    maker.let.set()
    async with Rollouts(maker, last=3, ahead=False) as rollouts:
        await rollouts.take(1)
        rollouts.begin(2)
        await rollouts.settle()
        assert maker.said == ["begin 1", "end 1"]
        await rollouts.take(2)
    assert maker.said[-1] == "end 2"


async def test_a_failure_ahead_is_raised_when_its_iteration_comes_and_not_before():
    maker = Maker(fails={2})
    maker.let.set()
    async with Rollouts(maker, last=3, ahead=True) as rollouts:
        await rollouts.take(1)
        rollouts.begin(2)
        await rollouts.settle()
        with pytest.raises(RuntimeError, match="rollout 2"):
            await rollouts.take(2)


async def test_leaving_stops_what_runs_ahead():
    maker = Maker()
    with pytest.raises(ValueError, match="the update failed"):
        async with Rollouts(maker, last=3, ahead=True) as rollouts:
            rollouts.begin(2)
            await asyncio.sleep(0)
            raise ValueError("the update failed")
    assert maker.said == ["begin 2", "cancelled 2"]


def made(agent, action, version):
    call = Call(action, agent, version, (1,), (2,), (-0.1,), "stop")
    trace = EpisodeTrace(Episode(f"e-{action}"), actions=(Action(action, "t", agent, agent, 0),), calls={action: call})
    return trace, Sample(agent, agent, f"e-{action}", action, (1,), (2,), (-0.1,), ret=0.5)


def test_what_older_weights_made_is_left_out_and_counted_by_agent():
    pairs = [made("solver", "a", 6), made("solver", "b", 5), made("solver", "c", 4), made("verifier", "d", 6)]
    traces, samples = [t for t, _ in pairs], [s for _, s in pairs]
    kept, left_out, ages = fresh(samples, traces, 6, 1)
    assert [s.action_id for s in kept] == ["a", "b", "d"] and left_out == {"stale": 1}
    assert ages == {
        "solver": {"staleness_mean": 1.0, "staleness_max": 2, "stale": 1},
        "verifier": {"staleness_mean": 0.0, "staleness_max": 0, "stale": 0},
    }
    assert fresh(samples, traces, 6, 2)[0] == samples and fresh(samples, traces, 6, 2)[1] == {}
    assert fresh([], [], 3, 1) == ([], {}, {})
