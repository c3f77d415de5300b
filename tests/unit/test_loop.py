"""Pieces of the loop that need no model: the shuffling control, the count of retokenised tokens, and rows that are JSON."""

import json
import math
from collections import Counter

import pytest

from mappa_graph.record import Action, Call, Episode, EpisodeTrace, Verdict
from mappa_graph.trainers.batch import Sample
from mappa_graph.trainers.metrics import plain, retokenised, shuffle_scores, write_metrics


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


def test_rows_are_json_whatever_the_numbers(tmp_path):
    row = {"iteration": 1, "agents": {"a": {"kl": math.nan, "loss": 0.5}}, "list": [math.inf, (1, -math.inf)], "text": "nan", "no": None}
    write_metrics(tmp_path / "m.jsonl", [plain(row)])
    read = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert read == {"iteration": 1, "agents": {"a": {"kl": None, "loss": 0.5}}, "list": [None, [1, None]], "text": "nan", "no": None}
