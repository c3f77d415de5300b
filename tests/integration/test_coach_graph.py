"""An LLM coach on a running LangGraph app: what it is shown and how often it is asked, for each `when`."""

import json

import pytest
from langchain.agents import create_agent

from mappa_graph import CoachCallback, Policy, TraceStore
from mappa_graph.coach import AgentCard, Bounded, EvidenceCoach, LLMCoach, score_pending
from tests.fakes.apps import asks, record, run_code, scripted
from tests.fakes.coach_cases import verdict_json, verdicts_json
from tests.fakes.openai_coach import Act, CoachServer, error
from tests.fakes.openai_server import OpenAIServer, tool_call

ASK = {"messages": [("user", "Run the sum.")]}


def coach_says(body):
    """Seven for every action asked about."""
    text = body["messages"][-1]["content"]
    last = text.strip().splitlines()[-1]
    if last.startswith("Score these actions: "):
        return Act(verdicts_json(*((name, 7) for name in last.removeprefix("Score these actions: ").rstrip(".").split(", "))))
    return Act(verdict_json(7))


@pytest.fixture
def agents():
    with OpenAIServer(scripted(solver=[asks(tool_call("run_code", {"code": "print('out')"})), "The sum is out."] * 9)) as server:
        yield server


def app(server):
    return create_agent(Policy("solver", base_url=server.url), tools=[run_code], name="solver")


@pytest.mark.parametrize(("when", "requests"), [("completed", 2), ("generated", 2), ("episode", 1)])
async def test_each_action_is_scored_by_the_requests_that_its_time_needs(agents, when, requests):
    with CoachServer([coach_says]) as judge:
        async with CoachCallback(LLMCoach(judge.model()), store=None, when=when) as callback:
            trace = await record(app(agents), ASK, callback)
    assert [trace.verdicts[a.id].score for a in trace.actions] == [7, 7]
    assert len(judge.requests) == requests
    assert not callback.failures


async def test_the_coach_sees_what_the_tool_answered_unless_it_is_asked_before(agents):
    seen = {}
    for when in ("completed", "generated"):
        with CoachServer([coach_says]) as judge:
            async with CoachCallback(LLMCoach(judge.model()), store=None, when=when) as callback:
                await record(app(agents), ASK, callback)
        seen[when] = next(judge.said_to(i) for i in range(2) if "Action #1, the one to score" in judge.said_to(i))
    assert "execution by tool" in seen["completed"] and "| out" in seen["completed"]
    assert "execution by tool" not in seen["generated"]
    assert "run_code" in seen["generated"]


async def test_the_coachs_own_calls_are_no_actions_of_the_graph(agents):
    with CoachServer([coach_says]) as judge:
        async with CoachCallback(LLMCoach(judge.model()), store=None) as callback:
            trace = await record(app(agents), ASK, callback)
    assert [a.agent for a in trace.actions] == ["solver", "solver"]
    assert callback.unknown == {}


async def test_an_app_runs_on_while_its_coach_is_down_and_is_scored_later(agents, tmp_path):
    with TraceStore(tmp_path / "trace.db") as store:
        with CoachServer([error(503)]) as judge:
            async with CoachCallback(LLMCoach(judge.model(), retries=0), store=store) as callback:
                trace = await record(app(agents), ASK, callback)
        assert [v.score for v in trace.verdicts.values()] == [None, None]
        assert all("HTTP 503" in v.error for v in trace.verdicts.values())
        with CoachServer([coach_says]) as judge:
            done = await score_pending(store, LLMCoach(judge.model()), [AgentCard("solver")])
        assert (done.pending, done.scored) == (2, 2)
        assert [v.score for t in store.traces() for v in t.verdicts.values()] == [7, 7]


async def test_evidence_bounds_the_opinion_on_a_running_app(agents):
    agents.reply = scripted(solver=[{"content": ""}])
    with CoachServer([coach_says]) as judge:
        async with CoachCallback(Bounded(LLMCoach(judge.model()), EvidenceCoach()), store=None) as callback:
            trace = await record(app(agents), ASK, callback)
    assert [v.score for v in trace.verdicts.values()] == [1]
    assert json.loads(json.dumps(dict(next(iter(trace.verdicts.values())).usage)))["moved"] == -6
