"""The DSBench graph without kernel or server: turns, their ends, what is handed from agent to agent, and options that can't work."""

import json

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from mappa_graph import Agent, Task
from mappa_graph.errors import ConfigError, SandboxError, TaskError
from mappa_graph.graphs import dsbench
from mappa_graph.graphs.dsbench.box import WORKSPACE, Desk, DSBenchContext
from mappa_graph.graphs.dsbench.catalogue import CATALOGUE, expand, right
from mappa_graph.graphs.dsbench.demonstrations import demonstrations, statistics
from mappa_graph.graphs.dsbench.factory import grade_state
from mappa_graph.graphs.dsbench.facts import facts_of, table
from mappa_graph.graphs.dsbench.graph import build_graph
from mappa_graph.graphs.dsbench.rules import noted
from mappa_graph.graphs.dsbench.text import says_done, summary_of
from mappa_graph.record import Execution, ExecutionErrorInfo, FileChange
from mappa_graph.sandboxes import Preview

TEAM = [Agent("first", writes=["a.txt", "b.txt"]), Agent("second", reads=["a.txt"], writes=["submission.csv"])]


class Box:
    """Stands for a session: code `write NAME` makes a file, `fail` raises, anything else prints itself."""

    def __init__(self):
        self.held = {}
        self.ran = []

    async def run(self, code, timeout_s=None, *, name="python", tool_call_id=None):
        self.ran.append(code)
        if code == "fail":
            return Execution("e", "error", code=code, error=ExecutionErrorInfo("ValueError", "no"))
        changes = []
        for word in code.removeprefix("write ").split() if code.startswith("write ") else []:
            changes.append(FileChange(word, "changed" if word in self.held else "created", 3))
            self.held[word] = b"1,2"
        return Execution("e", "ok", code=code, stdout=f"ran {code}", files=tuple(changes))

    async def preview(self, name, rows=5, timeout_s=20.0):
        if "broken" in name:
            raise SandboxError("no helper could be started")
        return Preview(name, type="text")

    async def get(self, name, limit=None):
        if name not in self.held:
            raise SandboxError(f"no file {name}")
        return self.held[name]

    async def files(self):
        return {name: len(data) for name, data in self.held.items()}


class Says(GenericFakeChatModel):
    """Says its lines in order and keeps its prompts."""

    prompts: list = []  # noqa: RUF012

    def _generate(self, messages, *args, **kwargs):
        self.prompts.append(messages)
        return super()._generate(messages, *args, **kwargs)


def code(text):
    return f"Here:\n```python\n{text}\n```"


async def run(first, second, **options):
    box = Box()
    models = {
        name: Says(messages=iter([AIMessage(text) for text in lines]), prompts=[]) for name, lines in (("first", first), ("second", second))
    }
    graph = build_graph(models, team=TEAM, **options)
    state = await graph.ainvoke({"task": "do it"}, context=DSBenchContext(Desk(box, TEAM)))
    return state, box, {name: [[m.text for m in prompt] for prompt in model.prompts] for name, model in models.items()}


async def test_a_part_ends_when_what_is_owed_is_there():
    state, _, prompts = await run([code("write a.txt"), code("write b.txt"), "never asked"], [code("write submission.csv"), "never"])
    assert [len(turns) for turns in state["turns"].values()] == [2, 1] and state["submission"] == "1,2"
    assert "Not there yet: b.txt" in prompts["first"][1][-1]
    assert [(note["name"], note["by"]) for note in state["files"]] == [("a.txt", "first"), ("b.txt", "first"), ("submission.csv", "second")]
    json.dumps(state)


async def test_a_part_ends_with_the_marker_unless_its_code_failed():
    state, box, _ = await run(["All is well.\nDONE"], [f"{code('fail')}\nDONE", code("write submission.csv")])
    assert [len(turns) for turns in state["turns"].values()] == [1, 2] and box.ran == ["fail", "write submission.csv"]
    assert [turn["status"] for turn in state["turns"]["second"]] == ["error", "ok"]


async def test_a_failed_agent_does_not_stop_the_pipeline_and_turns_are_bounded():
    state, _, prompts = await run([code("fail")] * 3, ["words"] * 3, turns=3)
    assert [len(turns) for turns in state["turns"].values()] == [3, 3] and state["submission"] is None
    assert "Missing, though you need it: a.txt" in prompts["second"][0][1]
    assert "no ```python block" in prompts["second"][1][-1]


async def test_code_after_a_failed_block_does_not_run():
    _, box, _ = await run([f"{code('fail')}\n{code('write a.txt b.txt')}", "DONE"], ["DONE"])
    assert box.ran == ["fail"]


async def test_thinking_is_neither_run_nor_passed_on():
    state, box, prompts = await run([f"<think>{code('fail')} secret</think>Ready.\nDONE"], ["DONE"])
    assert box.ran == [] and "secret" not in json.dumps([state, prompts])
    assert state["summaries"][0] == {"agent": "first", "text": "Ready."} and "Ready." in prompts["second"][0][1]


async def test_looks_are_bounded_in_number_and_time_and_one_that_fails_costs_nothing():
    names = " ".join(f"f{i}.pkl" for i in range(9))
    desk = Desk(Box(), [Agent("a", writes=["f8.pkl"])])
    execution = await desk.run(f"write {names} notes.txt broken.pkl")
    looked = [look["name"] for look in noted(execution, WORKSPACE)["files"]]
    assert looked[0] == "f8.pkl" and len(looked) == 6 and "notes.txt" not in looked  # declared files come first
    failed = noted(await desk.run("write broken.csv"), WORKSPACE)["files"]
    assert failed == [{"name": "broken.csv", "unseen": "no helper could be started"}]
    hurried = await Desk(Box(), look_s=0.0).run("write a.pkl")
    assert noted(hurried, WORKSPACE)["files"] == [] and hurried.status == "ok"


async def test_a_second_task_on_the_same_thread_starts_afresh():
    from langgraph.checkpoint.memory import InMemorySaver

    models = {a.name: GenericFakeChatModel(messages=iter([AIMessage("one\nDONE"), AIMessage("two\nDONE")])) for a in TEAM}
    graph = build_graph(models, team=TEAM)
    graph.checkpointer = InMemorySaver()
    config = {"configurable": {"thread_id": "1"}}
    await graph.ainvoke({"task": "one"}, config, context=DSBenchContext(Desk(Box(), TEAM)))
    state = await graph.ainvoke({"task": "two"}, config, context=DSBenchContext(Desk(Box(), TEAM)))
    assert {name: [t["text"] for t in turns] for name, turns in state["turns"].items()} == {"first": ["two\nDONE"], "second": ["two\nDONE"]}
    assert [s["text"] for s in state["summaries"]] == ["two", "two"]


async def test_without_a_desk_the_error_says_what_to_give():
    models = {a.name: GenericFakeChatModel(messages=iter([])) for a in TEAM}
    with pytest.raises(SandboxError, match="without a sandbox session"):
        await build_graph(models, team=TEAM).ainvoke({"task": "x"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"models": {"data_engineer": None}}, "no model for modeler, analyst"),
        ({"models": {}, "turns": 0}, "turns is 0"),
        ({"models": {}, "visibility": "some"}, "visibility is 'some'"),
        ({"models": {}, "style": "free"}, "style is 'free'"),
        ({"models": {}, "prompts": "compact", "style": "tools"}, "has no tools"),
        ({"models": {}, "cell_timeout_s": -1}, "cell_timeout_s is -1"),
        ({"models": {}, "team": [Agent("begin")]}, "can't have the team"),
        ({"models": {}, "team": []}, "can't have the team"),
    ],
)
def test_graph_options_that_cannot_work_are_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        build_graph(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"frozen": ["judge"]}, "no agent 'judge' to freeze"),
        ({"tasks": [Task("a", "b")]}, "need files and grade"),
        ({"tasks": [], "files": len, "grade": len, "folder": "x"}, "both tasks and folder"),
        ({"sandbox": {"kernels": 1}}, "sandbox settings"),
    ],
)
def test_environment_options_that_cannot_work_are_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        dsbench.environment(**options)


async def test_a_grade_of_ones_own_may_be_a_bool_or_a_number_and_nothing_else():
    task = Task("t", "p")
    for graded, success in ((True, True), (0.5, False), (1.0, True)):
        assert (await grade_state(task, {"submission": "x"}, grade=lambda t, s, g=graded: g)).success is success
    with pytest.raises(TaskError, match="gave 7"):
        await grade_state(task, {"submission": "x"}, grade=lambda t, s: 7)


def test_the_environment_declares_who_reads_and_writes_what_and_what_must_end_in_time():
    environment = dsbench.environment(frozen=["modeler"], sandbox={"limits": {"cell_s": 7}})
    assert [a.name for a in environment.agents] == ["data_engineer", "modeler", "analyst"] and not environment.agent("modeler").trainable
    written = {name: agent.name for agent in environment.agents for name in agent.writes}
    assert written["X_test.pkl"] == "data_engineer" and written["model.pkl"] == "modeler" and written["submission.csv"] == "analyst"
    assert environment.deadlines == {"sandbox.limits.cell_s": 7} and environment.metrics is dsbench.environment_metrics


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("DONE", True),
        ("It is ready.\n**DONE**", True),
        ("I am not DONE yet", False),
        ("```python\nDONE\n```", False),
        ("```python\nx = 1\nDONE", False),
        ("done", False),
    ],
)
def test_the_marker_counts_alone_on_a_line_outside_of_code(text, done):
    assert says_done(text) is done


def test_a_summary_is_the_last_message_with_words_without_code_and_marker():
    assert summary_of(["Alpha.", "```python\nz\n```\nDONE"]) == "Alpha."
    assert summary_of([]) == ""


def test_facts_come_from_the_task_and_its_tables():
    task = Task(
        "t", "p", data={"kind": "classification", "id_column": "id", "targets": ["y"], "labels": {"y": ["a", "b"]}, "form": "label"}
    )
    facts = facts_of(task, {"train.csv": b'id,y\n1,"a\nb"\n2,b\n', "test.csv": b"id\n3\n"})
    assert facts == {
        "kind": "classification",
        "id": "id",
        "targets": ["y"],
        "labels": ["a", "b"],
        "form": "label",
        "train_rows": 2,
        "test_rows": 1,
    }
    assert table(b"") == {"rows": 0, "columns": [], "head": ""}
    assert table(b"a,b\n" + b"1,2\n" * 400_000)["rows"] is None


def test_recipes_are_named_exactly_and_only_by_their_own_agent():
    assert expand("modeler", "use classifier") == CATALOGUE["modeler"]["classifier"]
    for text in ("classifier", "use  classifier x", "use features", "use classifier\nuse regressor", "USE classifier", "use " + "a" * 99):
        assert expand("modeler", text) is None
    for agent, recipes in CATALOGUE.items():
        assert right(agent, {"kind": "regression", "form": "number"}) in recipes
        for name, text in recipes.items():
            compile(text, f"{agent}/{name}", "exec")


def test_demonstrations_are_mostly_wrong_and_a_fixed_function_of_their_arguments():
    made = demonstrations(600, seed=1, imperfection=0.7)
    assert made == demonstrations(600, seed=1, imperfection=0.7) and len(made) == 600
    assert 0.2 < sum(one["right"] for one in made) / len(made) < 0.4
    assert all(expand(one["agent"], one["completion"]) for one in made)
    shares = statistics(made)
    assert max(shares["data_engineer"], key=shares["data_engineer"].get) == "no test"
    assert all(one["right"] for one in demonstrations(60, imperfection=0.0))
    with pytest.raises(ConfigError, match="imperfection is 2"):
        demonstrations(1, imperfection=2)
