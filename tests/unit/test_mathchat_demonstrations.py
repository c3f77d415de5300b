"""Demonstrations: the prompts are the graph's own, the imperfect team mostly fails, and a team of right actions never does."""

import random

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.graphs.mathchat.demonstrations import MISTAKES, demonstrations, episode, statistics, team_accuracy
from mappa_graph.graphs.mathchat.prompts import executor_messages, solver_messages
from mappa_graph.graphs.mathchat.tasks import word_problems


def test_the_imperfect_team_solves_little_and_the_perfect_one_all():
    assert 0.05 <= team_accuracy(2000) <= 0.15
    assert team_accuracy(500, imperfection=0.0) == 1.0


@pytest.mark.parametrize("kind", list(MISTAKES))
def test_right_modes_of_one_agent_alone_are_not_enough(kind):
    assert team_accuracy(800, imperfection={k: 0.6 for k in MISTAKES if k != kind}) < 0.45


def test_each_agents_most_frequent_mistake_is_made_more_often_than_the_right_thing():
    counts = statistics(demonstrations(6000))
    for agent in ("solver", "verifier"):
        modes = dict(counts[agent])
        good = modes.pop("good")
        assert max(modes.values()) > good > 0.3


def test_they_come_from_the_training_split_only():
    trained = {d["task_id"] for d in demonstrations(3000, seed=7)}
    assert all(name.startswith("train-") for name in trained)
    assert not trained & {t.id for t in word_problems("heldout", 500, 7)}


def test_every_agent_and_both_kinds_of_second_turn_are_shown_within_a_tiny_context():
    made = demonstrations(2000)
    assert {d["agent"] for d in made} == {"solver", "executor", "verifier"}
    second = [d["messages"][-1]["content"] for d in made if len(d["messages"]) == 4]
    assert any(text.startswith("output: ") for text in second)
    assert "error: SyntaxError" in second and "no output" in second
    assert max(len(d["completion"]) for d in made) <= 48
    assert max(sum(len(m["content"]) for m in d["messages"]) for d in made) <= 280


def test_prompts_are_those_the_graph_renders():
    task = word_problems("train", 1)[0]
    solver, executor, *_ = episode(task, random.Random(0), 0.0)
    assert solver["messages"] == solver_messages(task.prompt, style="compact")
    assert executor["messages"] == executor_messages(task.prompt, solver["completion"], style="compact")


def test_they_follow_from_the_arguments_alone():
    assert demonstrations(200, seed=3) == demonstrations(200, seed=3) != demonstrations(200, seed=4)
    assert len(demonstrations(100)) == 100
    full, previous = ([d["messages"] for d in demonstrations(300, visibility=v)] for v in ("full", "previous"))
    assert full != previous


@pytest.mark.parametrize("bad", [{"imperfection": 1.5}, {"imperfection": -0.1}, {"style": "long"}, {"visibility": "none"}])
def test_impossible_arguments_are_refused(bad):
    with pytest.raises(ConfigError):
        demonstrations(10, **bad)
