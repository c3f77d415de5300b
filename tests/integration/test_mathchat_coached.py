"""MathChat under the runner: what the agents did is recorded with its executions, and each action is scored on what it did."""

from mappa_graph.coach import EvidenceCoach
from mappa_graph.graphs import mathchat
from mappa_graph.rollout import Job, Runner, Sampling
from mappa_graph.store import TraceStore
from tests.fakes.openai_server import OpenAIServer


async def test_actions_carry_their_executions_and_scores_tell_whose_fault_it_was(tmp_path):
    environment = mathchat.environment(prompts="compact", n_train=2, n_heldout=2, sandbox={"size": 1, "preload": []})
    right, wrong = environment.split("train")

    def reply(body):
        text = body["messages"][1]["content"]
        task = right if right.prompt in text else wrong
        expression = task.data["expression"] + (" + 1" if task is wrong else "")
        answer = int(task.reference) + (task is wrong)
        if body["model"] == "solver":
            return f"<think>hm</think>plan: {expression}"
        if body["model"] == "executor":
            return f"```python\nprint({expression})\n```" if len(body["messages"]) == 2 else f"result: {answer}"
        return f"\\boxed{{{answer}}}"

    with OpenAIServer(reply) as server, TraceStore(tmp_path / "trace.db") as store:
        async with Runner(environment, server.url, store).open() as runner:
            traces = await runner.run([Job(right), Job(wrong)], Sampling(), EvidenceCoach(extra=environment.rules))
    for trace in traces:
        assert trace.episode.status == "done", trace.episode.error
        assert [a.agent for a in trace.actions] == ["solver", "executor", "executor", "verifier"]
        assert [len(a.executions) for a in trace.actions] == [0, 1, 0, 0]
        assert len({a.transition_id for a in trace.actions}) == 4
        assert trace.actions[1].executions[0].status == "ok"
    scores = [[trace.verdicts[a.id].score for a in trace.actions] for trace in traces]
    assert [trace.episode.outcome.success for trace in traces] == [True, False]
    assert min(scores[0]) >= 8
    assert scores[1][0] <= 2 and 4 <= scores[1][1] <= 6 and 4 <= scores[1][2] <= 6 and scores[1][3] <= 5
    assert trace.verdicts[traces[1].actions[1].id].blame == ("solver",)
