"""Whether a coach can be trusted, measured on coaches whose faults are known."""

import json
import math
import random

import pytest

from mappa_graph.coach import LLMCoach
from mappa_graph.coach.statistic import cohen_d, deviation, mean, pearson, ranks, slope, spearman
from mappa_graph.coach.validation import Label, position_effects, read_labels, self_agreement, spread, summary, validate
from mappa_graph.errors import CoachError, ConfigError
from mappa_graph.record import Verdict
from tests.fakes.coach_cases import MATH_TEAM, ScriptedModel, episode_cases, make_case, verdict_json

CASES = [make_case(f"a{i}", agent=MATH_TEAM[i % 3].name, before=(), output=f"work {i}") for i in range(60)]
LABELS = {f"a{i}": Label(i % 11, (MATH_TEAM[i % 3].name,) if i % 11 < 4 else ()) for i in range(60)}


class Rule:
    """A coach that gives `rule(case)`; None is no verdict."""

    name = "rule"

    def __init__(self, rule, blame=lambda case: ()):
        self.rule, self.blame = rule, blame

    async def score(self, case):
        score = self.rule(case)
        return Verdict(score, blame=self.blame(case), coach="rule", error=None if score is not None else "x")


def label_of(case):
    return LABELS[case.action_id].score


async def test_a_coach_that_says_what_the_labels_say_is_perfect():
    found = await validate(Rule(label_of, lambda c: LABELS[c.action_id].blame), CASES, LABELS)
    assert (found.n, found.unscored) == (60, 0)
    assert (found.rank, found.linear, found.error, found.bias) == (pytest.approx(1), pytest.approx(1), 0, 0)
    assert found.blame_accuracy == 1
    assert all(b.coach == b.label for b in found.curve)


async def test_a_shift_is_told_apart_from_disorder():
    shifted = await validate(Rule(lambda c: label_of(c) * 0.5 + 5), CASES, LABELS)
    assert shifted.rank == pytest.approx(1)
    assert shifted.bias > 2
    random.seed(1)
    noise = await validate(Rule(lambda c: random.uniform(0, 10)), CASES, LABELS)
    assert abs(noise.rank) < 0.35
    assert noise.rank_interval[0] < 0 < noise.rank_interval[1]
    assert "don't train on it" in summary(noise)


async def test_unfairness_to_one_agent_shows():
    found = await validate(Rule(lambda c: max(0.0, label_of(c) - 3 * (c.agent == "verifier"))), CASES, LABELS)
    assert found.bias_by_agent["verifier"] < -2
    assert found.bias_by_agent["solver"] == 0


async def test_wrong_blame_shows_in_the_confusion():
    found = await validate(Rule(label_of, lambda c: ("solver",) if label_of(c) < 4 else ()), CASES, LABELS)
    assert found.blame[("verifier", "solver")] > 0
    assert ("verifier", "verifier") not in found.blame
    assert found.blame_accuracy < 1


async def test_blame_by_action_id_counts_as_blame_of_its_agent():
    labels = {"act-1": Label(2, ("solver",))}
    found = await validate(Rule(lambda c: 2.0, lambda c: ("act-0",)), episode_cases(3), labels)
    assert found.blame == {("solver", "solver"): 1}


async def test_cases_without_a_score_are_counted_and_left_out():
    def some(case):
        if case.action_id.endswith("7"):
            raise CoachError("down")
        return None if case.action_id.endswith("3") else label_of(case)

    found = await validate(Rule(some), CASES, LABELS)
    assert (found.n, found.unscored) == (48, 12)
    assert found.rank == pytest.approx(1)


async def test_no_labels_is_an_error():
    with pytest.raises(ConfigError, match="label"):
        await validate(Rule(label_of), CASES, {})


async def test_a_coach_that_disagrees_with_itself_is_found_out_despite_its_cache(tmp_path):
    rng = random.Random(3)
    judge = LLMCoach(ScriptedModel(lines=[lambda m: verdict_json(round(rng.uniform(0, 10), 1))]), cache=tmp_path / "v.db", retries=0)
    found = await self_agreement(judge, CASES[:30])
    assert found.n == 30
    assert found.difference > 1.5
    assert found.within_one < 0.6
    steady = await self_agreement(Rule(label_of), CASES)
    assert (steady.difference, steady.within_one, steady.rank) == (0, 1, pytest.approx(1))


async def test_a_coach_that_favours_what_it_is_shown_first_is_found_out():
    class First(Rule):
        async def score_episode(self, cases):
            return {c.action_id: Verdict(8.0 - 4.0 * i / (len(cases) - 1)) for i, c in enumerate(cases)}

    found = await position_effects(First(None), [episode_cases(4) for _ in range(5)])
    assert found.n == 20
    assert found.first_over_last == pytest.approx(8 / 3)
    assert "favours a place" in summary(position=found)
    fair = await position_effects(Rule(lambda c: float(len(c.before))), [episode_cases(4)])
    assert (fair.first_over_last, fair.difference) == (0, 0)
    assert fair.trend == pytest.approx(1)


def test_labels_are_read_from_lines_and_a_bad_one_is_named(tmp_path):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"action": "a", "score": 7, "blame": ["solver"]}\n\n{"action": "b", "score": 0}\n')
    assert read_labels(path) == {"a": Label(7, ("solver",)), "b": Label(0, None)}
    for bad in ('{"action": "a"}', '{"action": "a", "score": 11}', "[1]", "{"):
        path.write_text(json.dumps({"action": "x", "score": 1}) + "\n" + bad)
        with pytest.raises(ConfigError, match="line 2"):
            read_labels(path)
    with pytest.raises(ConfigError, match="can't read"):
        read_labels(tmp_path / "none.jsonl")


async def test_the_summary_tells_what_was_measured():
    text = summary(await validate(Rule(label_of), CASES, LABELS), await self_agreement(Rule(label_of), CASES))
    assert "rank correlation 1.00" in text
    assert "60 actions" in text


def test_spread_skips_what_has_no_score():
    assert spread([Verdict(4.0), Verdict(6.0), Verdict(None)]) == (5.0, pytest.approx(math.sqrt(2)))


def test_statistics_agree_with_known_values():
    x, y = [1.0, 2.0, 2.0, 4.0, 5.0, 7.0], [2.0, 1.0, 3.0, 3.0, 6.0, 5.0]
    assert ranks(x) == [1, 2.5, 2.5, 4, 5, 6]
    assert spearman(x, y) == pytest.approx(0.8088, abs=1e-4)
    assert pearson(x, y) == pytest.approx(0.8086, abs=1e-4)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert deviation([2, 4]) == pytest.approx(math.sqrt(2))
    assert math.isnan(mean([]))
    assert cohen_d([3, 4, 5], [1, 2, 3]) == pytest.approx(2.0)
    assert cohen_d([3, 3], [1, 1]) == math.inf
    assert slope([1, 2, 3, 4]) == (pytest.approx(1), math.inf)
    assert slope([5, 5, 5]) == (0, 0)
    b, t = slope([1, 2, 2, 4])
    assert (b, t) == (pytest.approx(0.9), pytest.approx(3.4017, abs=1e-3))
