"""Each recipe does in the real sandbox what the demonstrations say that it does, so that a model is warmed up on what it will meet."""

from dataclasses import replace

import pytest

from mappa_graph.gateway import Gateway
from mappa_graph.graphs import dsbench
from mappa_graph.graphs.dsbench.catalogue import CATALOGUE, right
from mappa_graph.graphs.dsbench.demonstrations import effect, world_of
from mappa_graph.graphs.dsbench.factory import PRELOAD
from mappa_graph.graphs.dsbench.facts import facts_of
from mappa_graph.graphs.dsbench.prompts import TEAM
from mappa_graph.graphs.dsbench.scripted import Line, ScriptedEngine
from mappa_graph.graphs.dsbench.tasks import sandbox_files
from mappa_graph.rollout import Job, Runner, Sampling
from mappa_graph.sandboxes import SandboxPool
from mappa_graph.store import TraceStore

TASKS = ("builtin/penguins", "builtin/breast-cancer", "builtin/seattle-temperature")


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(size=2, preload=PRELOAD) as pool:
        yield pool


def known(name):
    (task,) = [task for task in dsbench.load_tasks(split="train") if task.id == name]
    return task, facts_of(task, sandbox_files(task))


@pytest.mark.parametrize("name", TASKS)
async def test_recipes_end_and_write_as_the_demonstrations_have_it(pool, name):
    task, facts = known(name)
    files = dict(sandbox_files(task))
    for agent in TEAM:
        for recipe, code in CATALOGUE[agent.name].items():
            async with pool.session(files=files) as box:
                execution = await box.run(code)
                if recipe == right(agent.name, facts):
                    assert execution.status == "ok", execution.error
                    handed_on = {path: await box.get(path) for path in agent.writes}
            there = set(files)
            model = right("modeler", facts) if "model.pkl" in there else ""
            error, written = effect(agent, recipe, replace(world_of(task), there=there, model=model))
            assert (execution.error.type if execution.error else "") == error, (agent.name, recipe, execution.error)
            made = {change.path for change in execution.files} & set(agent.writes)
            assert made == set(written), (agent.name, recipe)
        files |= handed_on


@pytest.mark.parametrize("name", TASKS)
async def test_the_right_recipes_named_in_few_words_succeed(pool, tmp_path, name):
    task, facts = known(name)
    environment = dsbench.environment(prompts="compact", sandbox=pool)
    engine = ScriptedEngine(lambda agent, messages: Line(f"use {right(agent, facts)}"))
    with TraceStore(tmp_path / "trace.db") as store:
        async with Gateway(engine, store) as gateway:
            async with Runner(environment, gateway.url, store).open() as runner:
                (trace,) = await runner.run([Job(task)], Sampling())
    assert trace.episode.outcome.success, trace.episode.outcome.reason
    shown = {d["messages"][1]["content"] for d in environment.demonstrations() if len(d["messages"]) == 2}
    assert [a.messages[1]["content"] in shown for a in trace.actions] == [True] * 3
