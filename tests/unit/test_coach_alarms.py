"""Reward hacking: an alarm when scores rise and outcomes don't, and none otherwise."""

import math
import random

import pytest

from mappa_graph.coach.alarms import HackingWatch, Signs, repetition, signs
from mappa_graph.errors import ConfigError
from mappa_graph.record import EpisodeTrace, Outcome, Verdict
from tests.fakes.coach_cases import act, ran, trace


def run(n=12, *, seed=0, **trends):
    """The alarms of each of n iterations whose signs follow `name=(start, change over the run)`, with a little noise."""
    rng = random.Random(seed)
    base = {"score": (5, 0), "outcome": (0.4, 0), "length": (800, 0), "tools": (1, 0), "repetition": (0.05, 0), "agreement": (0.6, 0)}
    watch = HackingWatch()
    heard = []
    for i in range(n):
        values = {k: start + change * i / (n - 1) + rng.gauss(0, 0.01) * abs(start) for k, (start, change) in {**base, **trends}.items()}
        heard.append({a.kind: a.message for a in watch.see(Signs(**values))})
    return heard


@pytest.mark.parametrize("seed", range(5))
def test_scores_that_rise_without_outcomes_raise_the_alarm(seed):
    heard = run(score=(4, 4), seed=seed)
    assert "hacking" in heard[-1]
    assert "rose by" in heard[-1]["hacking"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("trends", [{}, {"score": (4, 4), "outcome": (0.3, 0.4)}, {"score": (6, -3)}, {"outcome": (0.5, -0.2)}])
def test_honest_learning_and_standing_still_raise_none(trends, seed):
    assert not any(run(seed=seed, **trends))


def test_the_habit_that_moved_with_the_scores_is_named():
    assert "length" in run(score=(4, 4), length=(500, 1500))[-1]
    assert "repetition" in run(score=(4, 4), repetition=(0.05, 0.5))[-1]
    assert "tools" in run(score=(4, 4), tools=(2, -2))[-1]
    assert "agreement" in run(score=(4, 4), agreement=(0.8, -0.7))[-1]
    assert set(run(score=(4, 4))[-1]) == {"hacking"}


def test_a_rise_that_noise_explains_raises_none():
    watch = HackingWatch()
    scores = [2.0, 9.0, 1.0, 8.0, 3.0, 9.0, 2.0, 9.5]
    assert not any(watch.see(Signs(s, 0.4, 100, 1, 0, 0.5)) for s in scores)


def test_there_is_no_alarm_before_the_window_is_full():
    assert not any(run(score=(4, 4))[:7])


def test_iterations_without_outcomes_raise_none():
    watch = HackingWatch(window=4)
    assert [watch.see(Signs(float(i), math.nan, 1, 1, 0, math.nan)) for i in range(6)] == [[]] * 6


def test_a_window_that_shows_no_trend_is_refused():
    with pytest.raises(ConfigError, match="window"):
        HackingWatch(window=3)


def test_signs_are_the_means_of_an_iteration():
    def one(id, score, outcome, output):
        tr = trace(act(f"{id}a", "solver", 0, output, ran()), act(f"{id}b", "solver", 1, ""), id=id, outcome=outcome)
        return EpisodeTrace(tr.episode, tr.transitions, tr.actions, verdicts={f"{id}a": Verdict(score), f"{id}b": Verdict(None)})

    seen = signs([one("1", 2.0, Outcome(False), "abcd"), one("2", 8.0, Outcome(True), "ab"), one("3", 5.0, None, "")])
    assert (seen.score, seen.outcome, seen.length, seen.tools) == (5, 0.5, 1, 0.5)
    assert seen.agreement == pytest.approx(1)
    assert math.isnan(signs([]).score)


def test_repetition_is_the_share_of_runs_said_before():
    assert repetition("a b c d e f g h") == 0
    assert repetition("a b c d " * 25) > 0.9
    assert repetition("short") == 0
