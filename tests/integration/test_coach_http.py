"""The LLM coach over real HTTP, against a server that errs, stalls, truncates, rate-limits, breaks off and lies."""

import asyncio
import json
import time
from email.utils import formatdate

import pytest

from mappa_graph.coach import LLMCoach
from mappa_graph.coach.reply import VERDICT_SCHEMA
from tests.fakes.coach_cases import episode_cases, make_case, verdict_json, verdicts_json
from tests.fakes.openai_coach import Act, CoachServer, error, verdict


class Sleeps:
    """Stands in for `asyncio.sleep` and the clock, and keeps how long was slept."""

    def __init__(self, judge):
        self.slept = []
        self.now = 1000.0
        judge._pause.sleep = self
        judge._pause._clock = lambda: self.now

    async def __call__(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def coach(server, model=None, **more):
    judge = LLMCoach(model or server.model(), **{"retries": 3, "timeout_s": 10, **more})
    return judge, Sleeps(judge)


async def test_the_schema_goes_out_as_structured_output_and_the_verdict_comes_back():
    with CoachServer([verdict(8.5, blame=["solver"])]) as server:
        judge, _ = coach(server)
        scored = await judge.score(make_case())
    assert (scored.score, scored.blame) == (8.5, ("solver",))
    assert scored.coach.startswith("openai:judge@")
    sent = server.requests[0]["response_format"]["json_schema"]
    assert sent["strict"] is True
    assert set(sent["schema"]["properties"]) == set(VERDICT_SCHEMA["properties"])
    assert scored.usage["prompt_tokens"] == 100


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
async def test_a_failing_provider_is_tried_again(status):
    with CoachServer([error(status), error(status), verdict(4)]) as server:
        judge, sleeps = coach(server)
        assert (await judge.score(make_case())).score == 4
    assert len(server.requests) == 3
    assert judge.spend.retried == 2
    assert all(0 <= s <= 30 for s in sleeps.slept)


@pytest.mark.parametrize("how", ["html", "cut", "null"])
async def test_a_broken_reply_is_tried_again(how):
    with CoachServer([Act(how=how), verdict(4)]) as server:
        judge, _ = coach(server)
        assert (await judge.score(make_case())).score == 4


async def test_an_outage_gives_no_verdict_and_names_its_cause():
    with CoachServer([error(503)]) as server:
        judge, _ = coach(server, retries=2)
        scored = await judge.score(make_case())
    assert scored.score is None
    assert "HTTP 503" in scored.error
    assert len(server.requests) == 3


async def test_a_server_that_is_not_there_gives_no_verdict():
    with CoachServer([verdict()]) as server:
        model = server.model()
    judge = LLMCoach(model, retries=0, timeout_s=5)
    scored = await judge.score(make_case())
    assert scored.score is None
    assert "Connection" in scored.error


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_is_not_tried_again(status):
    with CoachServer([error(status)]) as server:
        judge, _ = coach(server)
        scored = await judge.score(make_case())
    assert f"HTTP {status}" in scored.error
    assert len(server.requests) == 1


async def test_a_stall_ends_at_the_time_out():
    with CoachServer([Act(stall_s=30), verdict(5)]) as server:
        judge, _ = coach(server, timeout_s=0.3)
        assert (await judge.score(make_case())).score == 5
        stuck, _ = coach(server, timeout_s=0.3, retries=0)
        server.script = [Act(stall_s=30)]
        scored = await stuck.score(make_case())
    assert scored.score is None
    assert "no reply within 0.3 s" in scored.error


async def test_a_truncated_verdict_is_asked_for_again():
    cut = Act(verdict_json(9)[:-20], finish_reason="length")
    whole_but_cut = Act(verdict_json(9), finish_reason="length")
    with CoachServer([cut, whole_but_cut, verdict(3)]) as server:
        judge, _ = coach(server)
        assert (await judge.score(make_case())).score == 3
    assert "cut off at the length limit" in server.said_to(1)


async def test_a_refusal_and_a_content_filter_are_no_verdict():
    with CoachServer([Act("I can't help with that.", how="refusal"), Act("", finish_reason="content_filter")]) as server:
        judge, _ = coach(server, reasks=1)
        scored = await judge.score(make_case())
    assert scored.score is None


async def test_retry_after_is_obeyed_in_seconds_and_as_a_date():
    with CoachServer(
        [error(429, retry_after="7"), error(429, retry_after=formatdate(time.time() + 40, usegmt=True)), verdict(5)]
    ) as server:
        judge, sleeps = coach(server)
        assert (await judge.score(make_case())).score == 5
    waits = [s for s in sleeps.slept if s > 0]
    assert waits[0] == pytest.approx(7)
    assert 35 < waits[1] < 41


async def test_a_rate_limit_holds_all_requests_of_the_coach():
    with CoachServer([error(429, retry_after="9"), verdict(5)]) as server:
        judge, sleeps = coach(server, concurrency=1)
        first, second = await asyncio.gather(judge.score(make_case()), judge.score(make_case(output="other")))
    assert (first.score, second.score) == (5, 5)
    assert [s for s in sleeps.slept if s > 0] == [pytest.approx(9)]


async def test_a_wait_that_is_too_long_is_not_sat_out():
    with CoachServer([error(429, retry_after="3600")]) as server:
        judge, sleeps = coach(server, max_wait_s=60)
        first = await judge.score(make_case())
        second = await judge.score(make_case(output="other"))
    assert first.score is None and second.score is None
    assert "3600 s" in first.error
    assert len(server.requests) == 1
    assert sum(sleeps.slept) == 0


async def test_a_used_up_allowance_in_the_headers_of_a_good_reply_is_waited_out():
    used_up = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m2s"}
    with CoachServer([Act(verdict_json(5), headers=used_up), verdict(6)]) as server:
        judge, sleeps = coach(server, model=server.model(include_response_headers=True), output="json", max_wait_s=90)
        await judge.score(make_case())
        assert (await judge.score(make_case(output="other"))).score == 6
    assert sleeps.slept == [pytest.approx(62)]


async def test_a_server_without_structured_output_is_asked_for_plain_json():
    def picky(body):
        return Act(status=400) if "response_format" in body else verdict(6)

    with CoachServer([picky]) as server:
        judge, _ = coach(server)
        assert (await judge.score(make_case())).score == 6
        assert (await judge.score(make_case(output="other"))).score == 6
    assert ["response_format" in body for body in server.requests] == [True, False, False]


async def test_structured_output_that_was_demanded_is_never_dropped():
    with CoachServer([error(400)]) as server:
        judge, _ = coach(server, output="structured")
        assert (await judge.score(make_case())).score is None
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "lie",
    [
        Act("10"),
        Act("Ten out of ten!"),
        Act(json.dumps({"score": 10})),
        Act(json.dumps({"reason": "x", "score": 10, "blame": ["#44"], "better_action": None})),
        Act(json.dumps({"properties": VERDICT_SCHEMA["properties"], "score": 10})),
        Act(verdict_json(10) * 2),
        Act(verdict_json(-1)),
        Act("null"),
        Act(" "),
    ],
    ids=["number", "prose", "no reason", "unknown action", "schema echoed", "two verdicts", "out of range", "null", "blank"],
)
async def test_a_lying_server_is_refused_though_it_promised_the_schema(lie):
    with CoachServer([lie]) as server:
        judge, _ = coach(server, reasks=1)
        assert (await judge.score(make_case())).score is None
    assert len(server.requests) == 2


async def test_a_reply_without_usage_is_counted_at_an_estimate():
    with CoachServer([Act(verdict_json(5), usage=False)]) as server:
        judge, _ = coach(server)
        await judge.score(make_case())
    assert judge.spend.prompt_tokens > 500
    assert judge.spend.completion_tokens > 10


async def test_no_more_requests_than_allowed_are_in_flight():
    with CoachServer([Act(verdict_json(5), stall_s=0.05)]) as server:
        judge, _ = coach(server, concurrency=3)
        verdicts = await asyncio.gather(*(judge.score(make_case(output=f"n{i}")) for i in range(12)))
    assert [v.score for v in verdicts] == [5] * 12
    assert server.most_at_once == 3


async def test_an_episode_is_scored_in_hindsight_with_only_the_missing_asked_again():
    with CoachServer([Act(verdicts_json(("#1", 1), ("#9", 9))), error(500), Act(verdicts_json(("#3", 3), ("#2", 2)))]) as server:
        judge, _ = coach(server)
        verdicts = await judge.score_episode(episode_cases(3))
    assert [verdicts[f"act-{i}"].score for i in range(3)] == [1, 2, 3]
    assert len(server.requests) == 3
    assert sum(v.usage["calls"] for v in verdicts.values()) == pytest.approx(3)


async def test_a_key_that_the_provider_quotes_is_in_no_verdict():
    with CoachServer([error(401)]) as server:
        judge, _ = coach(server)
        scored = await judge.score(make_case())
    assert "Bearer ***" in scored.error
    assert "sk-secret-17" not in scored.error
