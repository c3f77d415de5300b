"""Several coaches as one."""

import pytest

from mappa_graph.coach import EvidenceCoach, Finding, score_episode
from mappa_graph.coach.combine import Bounded, Cascade, Panel, weighted_median
from mappa_graph.errors import CoachError, ConfigError
from mappa_graph.record import Verdict
from tests.fakes.coach_cases import episode_cases, make_case, ran


class Says:
    """A coach that says one thing, and counts how often it is asked."""

    def __init__(self, score, name="says", whole=False, **more):
        self.name, self.value, self.more, self.asked = name, score, more, 0
        if whole:
            self.score_episode = self._whole

    async def score(self, case):
        self.asked += 1
        if isinstance(self.value, Exception):
            raise self.value
        error = None if self.value is not None else "no idea"
        return Verdict(self.value, reason=f"{self.name} thinks so", coach=self.name, error=error, **self.more)

    async def _whole(self, cases):
        self.asked += 1
        return {c.action_id: Verdict(self.value, coach=self.name) for c in cases[1:]}


async def test_a_panel_takes_the_median_and_records_the_disagreement():
    verdict = await Panel([Says(2), Says(9), Says(8)]).score(make_case())
    assert verdict.score == 8
    assert verdict.usage["disagreement"] == 7
    assert verdict.usage["votes"] == 3


async def test_a_panel_takes_a_weighted_mean():
    assert (await Panel([Says(2), Says(8)], how="mean", weights=[1, 3]).score(make_case())).score == 6.5


async def test_who_gives_no_verdict_takes_no_part():
    verdict = await Panel([Says(None), Says(CoachError("down")), Says(4)]).score(make_case())
    assert verdict.score == 4
    assert verdict.usage["votes"] == 1


async def test_without_a_quorum_there_is_no_verdict_and_the_causes_are_told():
    verdict = await Panel([Says(None), Says(CoachError("down")), Says(4)], quorum=2).score(make_case())
    assert verdict.score is None
    assert "no idea" in verdict.error and "down" in verdict.error


async def test_a_panel_blames_whom_most_blame_and_adds_up_the_usage():
    votes = [Says(1, blame=("solver",), usage={"calls": 1}), Says(2, blame=("solver", "x"), usage={"calls": 2}), Says(3)]
    verdict = await Panel(votes).score(make_case())
    assert verdict.blame == ("solver",)
    assert verdict.usage["calls"] == 3


async def test_a_mistake_in_a_coachs_code_is_not_taken_for_a_missing_verdict():
    with pytest.raises(ZeroDivisionError):
        await Panel([Says(ZeroDivisionError()), Says(4)]).score(make_case())


@pytest.mark.parametrize("settings", [{"how": "mode"}, {"weights": [1]}, {"weights": [1, 0]}, {"quorum": 3}, {"quorum": 0}])
def test_a_panel_that_makes_no_sense_is_refused(settings):
    with pytest.raises(ConfigError):
        Panel([Says(1), Says(2)], **settings)


def test_weights_move_the_median():
    assert weighted_median([(1, 1), (5, 1), (9, 5)]) == 9
    assert weighted_median([(1, 1), (9, 1)]) == 5


@pytest.mark.parametrize(("cheap", "asked", "score"), [(9, 0, 9), (5, 1, 2), (None, 1, 2), (1, 0, 1)])
async def test_the_strong_coach_is_asked_where_the_cheap_one_is_unsure(cheap, asked, score):
    strong = Says(2, "strong")
    verdict = await Cascade(Says(cheap), strong).score(make_case())
    assert (strong.asked, verdict.score) == (asked, score)
    assert verdict.usage["escalated"] == asked


async def test_a_silent_strong_coach_leaves_the_cheap_ones_score():
    verdict = await Cascade(Says(5, "cheap"), Says(None)).score(make_case())
    assert (verdict.score, verdict.coach) == (5, "cascade(cheap)")


async def test_evidence_is_a_ceiling_on_an_opinion():
    case = make_case(executions=(ran(error=("SyntaxError", "bad")),))
    verdict = await Bounded(Says(9)).score(case)
    assert verdict.score == 4
    assert verdict.usage["moved"] == -5
    assert "SyntaxError" in verdict.reason
    assert "executor" in verdict.blame


async def test_evidence_is_a_floor_under_an_opinion():
    def delivered(case):
        return Finding("the file is there", floor=6)

    assert (await Bounded(Says(1), EvidenceCoach(rules=[delivered])).score(make_case())).score == 6
    inside = await Bounded(Says(8), EvidenceCoach(rules=[delivered])).score(make_case())
    assert (inside.score, inside.usage["moved"]) == (8, 0)


async def test_where_evidence_allows_no_score_the_opinion_is_not_asked_for():
    says = Says(9)
    verdict = await Bounded(says).score(make_case(output="", executions=(), error="lost"))
    assert (verdict.score, says.asked) == (None, 0)


async def test_combined_coaches_score_episodes_and_lose_no_action():
    cases = episode_cases(3)
    whole = Says(5, "whole", whole=True)
    verdicts = await score_episode(Panel([whole, Says(7)], how="mean"), cases)
    assert {k: v.score for k, v in verdicts.items()} == {"act-0": 7, "act-1": 6, "act-2": 6}
    assert whole.asked == 1
    escalated = await score_episode(Cascade(Says(5, whole=True), Says(1)), cases)
    assert [v.score for v in escalated.values()] == [1, 1, 1]
    bounded = await score_episode(Bounded(Says(5, whole=True)), cases)
    assert [v.score for v in bounded.values()] == [None, 5, 5]


async def test_combinations_nest():
    verdict = await Bounded(Cascade(Panel([Says(4), Says(6)]), Says(9)), EvidenceCoach()).score(make_case())
    assert verdict.score == 9
    assert verdict.coach.startswith("bounded(cascade)(cascade(")
