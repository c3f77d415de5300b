"""Scripted teams through the whole of it: gateway, graph, real sandbox, recording, coach and grading.

The good team succeeds on every built-in task; each planted fault is blamed on the agent that made it, also in hindsight, and no one else
is punished for it.
"""

import json

import pytest

from mappa_graph.coach import EvidenceCoach
from mappa_graph.gateway import Gateway
from mappa_graph.graphs import dsbench
from mappa_graph.graphs.dsbench.box import WORKSPACE
from mappa_graph.graphs.dsbench.factory import PRELOAD
from mappa_graph.graphs.dsbench.rules import noted
from mappa_graph.graphs.dsbench.scripted import FAULTS, Line, ScriptedEngine, script
from mappa_graph.rollout import Job, Runner, Sampling
from mappa_graph.sandboxes import SandboxPool
from mappa_graph.store import TraceStore
from mappa_graph.trainers.batch import samples_from_trace

AGENTS = ["data_engineer", "modeler", "analyst"]
VALID_ALL_THE_SAME = ("trains on the id", "leaks the target")
"""Faults that still give a submission that can be graded."""
BRINGS_DOWN = ("forgets X_test", "another name", "crashes", "loops")
"""Faults that an agent further down runs into."""


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(size=3, preload=PRELOAD) as pool:
        yield pool


async def play(pool, path, says, *, when="completed", tasks=("builtin/penguins",), coach=None, **options):
    environment = dsbench.environment(sandbox=pool, **options)
    known = {task.id: task for split in ("train", "heldout") for task in environment.split(split)}
    chosen = [known[name] for name in tasks] if tasks else list(known.values())
    coach = coach or EvidenceCoach(extra=environment.rules)
    with TraceStore(path / "trace.db") as store:
        async with Gateway(ScriptedEngine(says), store) as gateway:
            async with Runner(environment, gateway.url, store, when=when).open() as runner:
                traces = await runner.run([Job(task) for task in chosen], Sampling(), coach)
    assert [trace.episode.status for trace in traces] == ["done"] * len(chosen), [trace.episode.error for trace in traces]
    return traces


def verdicts(trace):
    return [(action.agent, trace.verdicts[action.id]) for action in trace.actions]


async def test_the_good_team_succeeds_on_every_built_in_task(pool, tmp_path):
    traces = await play(pool, tmp_path, script("good"), tasks=())
    assert len(traces) >= 12
    looks = [noted(trace.actions[0].executions[0], WORKSPACE)["files"] for trace in traces]
    assert len({json.dumps(look) for look in looks}) == len(traces)  # side by side, each in a workspace of its own
    failed = {t.episode.task_id: t.episode.outcome.reason for t in traces if not t.episode.outcome.success}
    assert not failed
    for trace in traces:
        assert [a.agent for a in trace.actions] == AGENTS, trace.episode.task_id
        assert min(v.score for _, v in verdicts(trace)) >= 7, (trace.episode.task_id, verdicts(trace))
        assert not any(v.blame for _, v in verdicts(trace)), (trace.episode.task_id, verdicts(trace))


@pytest.mark.parametrize("when", ["completed", "episode"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_is_blamed_on_the_agent_that_made_it(pool, tmp_path, fault, when):
    (trace,) = await play(pool, tmp_path, script(fault), when=when)
    culprit = FAULTS[fault].agent
    assert trace.episode.outcome.success is (fault in VALID_ALL_THE_SAME), trace.episode.outcome
    mine = [verdict for agent, verdict in verdicts(trace) if agent == culprit]
    assert max(v.score for v in mine) <= 3 and min(v.score for v in mine) <= 2, mine
    assert all(v.blame == (culprit,) for v in mine if v.blame) and any(v.blame for v in mine)
    for agent, verdict in verdicts(trace):
        if agent != culprit:
            assert agent not in verdict.blame, (agent, verdict)
            assert verdict.score is None or verdict.score >= 3, (agent, verdict)


@pytest.mark.parametrize("fault", BRINGS_DOWN)
async def test_who_is_stopped_by_another_names_the_culprit_and_stays_near_the_middle(pool, tmp_path, fault):
    (trace,) = await play(pool, tmp_path, script(fault))
    stopped = [verdict for agent, verdict in verdicts(trace) if agent == "analyst"]
    assert stopped and all(3 <= verdict.score <= 5 for verdict in stopped), stopped
    assert all(FAULTS[fault].agent in verdict.blame for verdict in stopped)


async def test_cases_hold_what_the_files_hold_and_who_owes_what_is_missing(pool, tmp_path):
    class Keeps(EvidenceCoach):
        def __init__(self, **options):
            super().__init__(**options)
            self.cases = []

        async def score(self, case):
            self.cases.append(case)
            return await super().score(case)

    coach = Keeps(extra=dsbench.RULES)
    (trace,) = await play(pool, tmp_path, script("forgets X_test"), coach=coach)
    cases = {case.action_id: case for case in coach.cases}
    engineer, modeler, analyst, _ = (cases[action.id] for action in trace.actions)
    said = noted(engineer.executions[0], WORKSPACE)
    looks = {look["name"]: look for look in said["files"]}
    assert looks["X_train.pkl"]["shape"][0] == said["task"]["train_rows"] == looks["y_train.pkl"]["shape"][0]
    assert "bill_length_mm" in looks["X_train.pkl"]["columns"] and looks["X_train.pkl"]["holds"] == []
    assert said["missing"] == {"X_test.pkl": "data_engineer declared to write it, and no action did"}
    assert modeler.files_before["X_train.pkl"] == "data_engineer" and "X_test.pkl" not in analyst.files_before
    assert [c.path for c in modeler.files_after] == ["model.pkl"]
    assert "RandomForestClassifier" in noted(modeler.executions[0], WORKSPACE)["files"][0]["type"]


@pytest.mark.parametrize("sees", [True, False])
async def test_the_analysts_case_has_the_grade_only_where_the_coach_may_know_it_and_no_agent_ever_does(pool, tmp_path, sees):
    (trace,) = await play(pool, tmp_path, script("good"), coach_sees_grade=sees)
    graded = [action.agent for action in trace.actions if "[grade]" in "".join(e.note for e in action.executions)]
    assert graded == (["analyst"] if sees else [])
    said = json.dumps([list(action.messages) for action in trace.actions])
    assert "[grade]" not in said and "accuracy 1" not in said


async def test_both_styles_are_recorded_with_executions_per_agent_and_give_samples_to_train_on(pool, tmp_path):
    for style in ("blocks", "tools"):
        (tmp_path / style).mkdir()
        (trace,) = await play(pool, tmp_path / style, script("forgets X_test"), style=style)
        by_agent = {agent: [a for a in trace.actions if a.agent == agent] for agent in AGENTS}
        assert {agent: sum(len(a.executions) for a in actions) for agent, actions in by_agent.items()} == {
            "data_engineer": 1 if style == "blocks" else 4,
            "modeler": 1,
            "analyst": 1,
        }
        assert all(bool(a.tool_calls) is (style == "tools") for a in trace.actions if a.executions)
        samples, left_out = samples_from_trace(trace, gamma=0.5)
        assert sorted({s.policy for s in samples}) == sorted(AGENTS) and len(samples) == len(trace.actions)
        assert not any(left_out.values()), left_out
        assert all(bytes(s.completion_ids[:-1]).decode() for s in samples)


async def test_the_tools_style_succeeds_and_its_analyst_is_never_shown_the_grade(pool, tmp_path):
    (trace,) = await play(pool, tmp_path, script("good"), style="tools", tasks=("builtin/diabetes",))
    assert trace.episode.outcome.success and [a.agent for a in trace.actions] == AGENTS
    assert "[grade]" in trace.actions[-1].executions[0].note
    assert "[grade]" not in json.dumps([list(a.messages) for a in trace.actions])


async def test_the_tools_style_stops_after_its_turns(pool, tmp_path):
    says = script("crashes")
    (trace,) = await play(pool, tmp_path, says, style="tools", turns=2)
    assert [a.agent for a in trace.actions].count("modeler") == 2


async def test_a_pickle_with_a_payload_is_opened_in_the_sandbox_only(pool, tmp_path):
    touched = tmp_path / "touched"
    code = (
        "import pickle\n"
        "class Bad:\n"
        "    def __reduce__(self):\n"
        f"        return (open, ({str(touched)!r}, 'w'))\n"
        "for name in ('X_train.pkl', 'y_train.pkl', 'X_test.pkl'):\n"
        "    pickle.dump(Bad(), open(name, 'wb'))\n"
    )

    def says(agent, messages):
        return Line("Saved.", code) if agent == "data_engineer" else script("good")(agent, messages)

    (trace,) = await play(pool, tmp_path, says)
    assert not touched.exists()
    agent, verdict = verdicts(trace)[0]
    assert agent == "data_engineer" and verdict.score <= 2 and "can't be loaded" in verdict.reason
    assert all(v.score is None or v.score >= 3 for a, v in verdicts(trace) if a != "data_engineer")


async def test_a_submission_that_is_no_text_or_too_large_is_refused_with_the_cause(pool):
    from mappa_graph.graphs.dsbench.box import Desk
    from mappa_graph.graphs.dsbench.factory import grade_state

    task = dsbench.load_tasks(split="train")[0]
    async with pool.session() as box:
        desk = Desk(box, submission_bytes=1000)
        assert await desk.submission() == (None, "")
        for make, cause in (
            ("open('submission.csv', 'wb').write(b'\\xff\\xfe\\x00' * 9)", "not text"),
            ("open('submission.csv', 'w').write('x' * 2000)", "1000"),
            ("import os; os.remove('submission.csv'); os.symlink('/etc/passwd', 'submission.csv')", None),
        ):
            await box.run(make)
            text, problem = await desk.submission()
            assert text is None
            if cause is None:  # a link is no file of the workspace
                assert problem == ""
                continue
            assert cause in problem
            outcome = await grade_state(task, {"submission": text, "submission_problem": problem})
            assert not outcome.success and problem in outcome.reason
