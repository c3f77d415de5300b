"""Pieces of the loop that need no model: which tasks come when, the shuffling control, and the count of retokenised tokens."""

from collections import Counter

import pytest

from mappa_graph import Task
from mappa_graph.record import Action, Call, Episode, EpisodeTrace, Verdict
from mappa_graph.trainers.batch import Sample
from mappa_graph.trainers.sampling import tasks_of
from mappa_graph.trainers.metrics import retokenised, shuffle_scores

TASKS = [Task(f"t{i}", "p") for i in range(10)]


def test_every_task_comes_once_an_epoch_whatever_the_batch_size():
    seen = [t.id for iteration in range(1, 11) for t in tasks_of(TASKS, 3, iteration, seed=0)]
    for epoch in range(3):
        assert Counter(seen[10 * epoch : 10 * epoch + 10]) == Counter(t.id for t in TASKS)


def test_the_order_of_tasks_follows_from_the_seed_alone():
    assert tasks_of(TASKS, 4, 2, seed=5) == tasks_of(TASKS, 4, 2, seed=5)
    assert any(tasks_of(TASKS, 4, i, seed=5) != tasks_of(TASKS, 4, i, seed=6) for i in range(1, 4))


def test_a_batch_larger_than_the_task_list_wraps_around():
    assert len(tasks_of(TASKS, 25, 1, seed=0)) == 25


def episode(n: int, scores: dict[str, list[float | None]]) -> EpisodeTrace:
    actions = [Action(f"{n}/{a}/{i}", "t", a, a, i) for a, values in scores.items() for i in range(len(values))]
    verdicts = {f"{n}/{a}/{i}": Verdict(s) for a, values in scores.items() for i, s in enumerate(values)}
    return EpisodeTrace(Episode(f"e{n}"), actions=tuple(actions), verdicts=verdicts)


def test_shuffled_scores_stay_with_their_agent_and_missing_ones_stay_missing():
    traces = [episode(n, {"a": [float(n % 11)], "b": [None, 10.0 - n % 11]}) for n in range(40)]
    shuffled = shuffle_scores(traces, seed="s")

    def scores(which, agent):
        return [t.verdicts[x.id].score for t in which for x in t.actions if x.agent == agent]

    for agent in "ab":
        assert Counter(scores(shuffled, agent)) == Counter(scores(traces, agent))
        assert scores(shuffled, agent) != scores(traces, agent)
    assert all(t.verdicts[f"{n}/b/0"].score is None for n, t in enumerate(shuffled))
    assert shuffle_scores(traces, seed="s") == shuffled


@pytest.mark.parametrize(("ids", "expected"), [((5, 6), 0), ((5, 7), 2)])
def test_tokens_that_are_not_the_engines_are_counted(ids, expected):
    call = Call("c", "a", 0, (1, 2), (5, 6), (-0.1, -0.2), "stop")
    trace = EpisodeTrace(Episode("e"), actions=(Action("x", "t", "a", "a", 0),), calls={"x": call})
    sample = Sample("a", "a", "e", "x", (1, 2), ids, (-0.1, -0.2), 1.0, 0.5)
    assert retokenised([trace], [sample]) == expected
    assert retokenised([], [sample]) == 2
