"""Environments check what they are given, and grades what a user's function gives."""

import pytest

from mappa_graph import Agent, Environment, Outcome, Task
from mappa_graph.errors import ConfigError, EpisodeError, TaskError

TASKS = [Task(f"t{i}", f"problem {i}") for i in range(100)]


def make(**changes):
    parts = {
        "name": "toy",
        "agents": [Agent("a"), Agent("b")],
        "build_graph": lambda models: None,
        "tasks": TASKS,
        "grade": lambda t, s: True,
    }
    return Environment(**{**parts, **changes})


def test_one_list_is_split_for_good_and_without_overlap():
    train, heldout = ({t.id for t in make().split(s)} for s in ("train", "heldout"))
    assert train | heldout == {t.id for t in TASKS} and not train & heldout and 10 <= len(heldout) <= 30
    again = make(tasks=list(reversed(TASKS)))
    assert {t.id for t in again.split("heldout")} == heldout


def test_splits_may_be_a_mapping_or_a_function():
    assert make(tasks={"train": TASKS[:2], "heldout": TASKS[2:3]}).split("heldout") == TASKS[2:3]
    assert make(tasks=lambda split: TASKS[:4] if split == "train" else TASKS[4:]).split("train") == TASKS[:4]
    with pytest.raises(TaskError, match="no task split 'test'"):
        make(tasks={"train": TASKS}).split("test")
    with pytest.raises(TaskError, match="is empty"):
        make(tasks={"train": []}).split("train")
    with pytest.raises(TaskError, match="'t0' occurs twice"):
        make(tasks={"train": [TASKS[0], TASKS[0]]}).split("train")


def test_bad_teams_are_refused():
    with pytest.raises(ConfigError, match="has no agents"):
        make(agents=[])
    with pytest.raises(ConfigError, match="names an agent twice"):
        make(agents=[Agent("a"), Agent("a")])
    with pytest.raises(ConfigError, match="not a valid name"):
        Agent("the solver@1")


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, Outcome(True)), (False, Outcome(False)), (0.25, Outcome(False, score=0.25)), (1, Outcome(True, score=1.0))],
)
async def test_grades_may_be_bools_numbers_or_outcomes(given, expected):
    assert await make(grade=lambda t, s: given).outcome(TASKS[0], {}) == expected

    async def later(task, state):
        return expected

    assert await make(grade=later).outcome(TASKS[0], {}) == expected


@pytest.mark.parametrize("given", [None, 3.0, "yes", float("nan")])
async def test_a_grade_that_is_none_of_these_is_an_error_with_a_way_out(given):
    with pytest.raises(EpisodeError, match="return an Outcome"):
        await make(grade=lambda t, s: given).outcome(TASKS[0], {})


async def test_a_failing_grade_names_the_task_and_the_cause():
    with pytest.raises(EpisodeError, match=r"grading task 't3' failed: ZeroDivisionError"):
        await make(grade=lambda t, s: 1 / 0).outcome(TASKS[3], {})


def test_a_deadline_must_lie_inside_an_episodes_and_is_checked_before_any_model_work():
    from mappa_graph.config import make_config
    from mappa_graph.display import Display
    from mappa_graph.rollout import Runner
    from mappa_graph.trainers.run import resolve_models

    environment = make(deadlines={"cell_timeout_s": 120.0})
    environment.check_deadlines(120.5)
    said = r"cell_timeout_s = 120 s of environment 'toy' does not lie inside rollout.episode_timeout_s = 120 s"
    with pytest.raises(ConfigError, match=said):
        environment.check_deadlines(120)
    with pytest.raises(ConfigError, match=said):
        Runner(environment, "http://127.0.0.1:1/v1", None, timeout_s=120)
    config = make_config({"model": "no-such/model", "rollout": {"episode_timeout_s": 120}})
    with pytest.raises(ConfigError, match=said):
        resolve_models(environment, config, Display(quiet=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cell_timeout_s": 200}, "cell_timeout_s = 200"),
        ({"sandbox": {"limits": {"cell_s": 300}}}, "sandbox.limits.cell_s = 300"),
        ({"cell_timeout_s": 200, "sandbox": {"limits": {"cell_s": 10}}}, "cell_timeout_s = 200"),
    ],
)
def test_the_cells_of_mathchat_end_before_its_episodes(options, named):
    from mappa_graph.graphs import mathchat

    mathchat.environment().check_deadlines(120)
    with pytest.raises(ConfigError, match=named):
        mathchat.environment(**options).check_deadlines(120)


@pytest.mark.parametrize("sandbox", [{"limits": {"cell_s": 0}}, {"limits": {"seconds": 3}}, {"kernels": 2}])
def test_sandbox_settings_that_do_not_exist_are_refused_when_the_environment_is_made(sandbox):
    from mappa_graph.graphs import mathchat

    with pytest.raises(ConfigError, match="sandbox"):
        mathchat.environment(sandbox=sandbox)
