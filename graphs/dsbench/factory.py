"""`environment(...)`: DSBench as an `Environment`, with its tasks, sandbox pool, grading, coach's rules and demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mappa_graph.agent import Agent
from mappa_graph.environment import Environment, Task, Tasks
from mappa_graph.errors import ConfigError, TaskError
from mappa_graph.graphs.mathchat.box import Pool
from mappa_graph.graphs.mathchat.factory import cell_deadline, make_pool, pool_limits, wall_of
from mappa_graph.record import Outcome

from .box import SUBMISSION, Desk, DSBenchContext
from .demonstrations import Demonstration, demonstrations
from .facts import facts_of
from .grading import grade_submission
from .graph import build_graph
from .metrics import environment_metrics
from .prompts import TEAM, Prompts, Style, Visibility, check_style
from .recipes import source_folders
from .rules import RULES
from .state import DSBenchInput
from .tasks import load_tasks, sandbox_files

PRELOAD = (
    *("numpy", "pandas", "sklearn.pipeline", "sklearn.compose", "sklearn.impute", "sklearn.preprocessing"),
    *("sklearn.linear_model", "sklearn.ensemble", "sklearn.model_selection", "sklearn.metrics"),
)
"""Modules that are there at once in every kernel: importing scikit-learn anew would cost each episode most of a second."""


Files = Callable[[Task], Mapping[str, bytes]]
Graded = Outcome | float | bool
GradeText = Callable[[Task, str | None], Graded]


def environment(
    *,
    team: Sequence[Agent] = TEAM,
    tasks: Tasks | None = None,
    files: Files | None = None,
    grade: GradeText | None = None,
    handed_in: str = SUBMISSION,
    name: str = "dsbench",
    folder: str | Path | None = None,
    tasks_file: str | Path | None = None,
    prompts_file: str | Path | None = None,
    missing: Literal["error", "skip"] = "error",
    style: Style = "blocks",
    prompts: Prompts = "standard",
    visibility: Visibility = "full",
    turns: int = 4,
    seed: int = 0,
    cell_timeout_s: float | None = None,
    opens_thinking: bool = False,
    frozen: Sequence[str] = (),
    coach_sees_grade: bool = True,
    n_demonstrations: int = 6000,
    imperfection: float = 0.7,
    sandbox: Mapping[str, Any] | Pool | None = None,
) -> Environment:
    """The DSBench environment; or, with a team, tasks, files and a grade of one's own, any pipeline of agents that hand files on.

    Args:
        team: who acts, in order, with what each reads and writes.
        tasks: one's own, as `Environment` takes them. They need `files` and `grade` as well.
        files: `files(task)` -> name -> contents: what the sandbox begins with. Never put answers there.
        grade: `grade(task, text)` of what was handed in (None: nothing that can be read) -> an `Outcome`, a number in 0..1, or a bool. It
            runs in a thread.
        handed_in: the file that is handed in and graded.
        name: of the environment.
        folder, tasks_file, prompts_file, missing: the public benchmark's data (`load_tasks`); without a folder, the built-in tasks.
        style, prompts, visibility, turns, cell_timeout_s, opens_thinking: as `build_graph`.
        seed: of the built-in tasks.
        frozen: agents that are not trained.
        coach_sees_grade: whether the coach is told the grade of a submission as soon as the analyst has written it.
        n_demonstrations, imperfection: of the warm start of a tiny model (`demonstrations`).
        sandbox: settings of the `SandboxPool` that is opened once for a run, or a pool that is open already and stays open.

    Raises `ConfigError` or `TaskError` for what can't be used.
    """
    check_style(prompts, visibility, style)
    names = [agent.name for agent in team]
    unknown = [one for one in frozen if one not in names]
    if unknown:
        raise ConfigError(f"{name} has no agent {', '.join(map(repr, unknown))} to freeze", hint=f"it has: {', '.join(names)}")
    if (tasks is None) != (files is None) or (tasks is None) != (grade is None):
        raise ConfigError("tasks of one's own need files and grade beside them", hint="give all three, or none for DSBench's own")
    if tasks is not None and folder is not None:
        raise ConfigError("both tasks and folder are given", hint="folder is for the public benchmark's data")
    given, graded = files or sandbox_files, grade or grade_submission
    settings: dict[str, Any] = {"preload": PRELOAD, **(sandbox if isinstance(sandbox, Mapping) else {})}
    if tasks is None and folder is None:
        settings = {"hide": source_folders(), **settings}  # the tables that the built-in tasks were made from hold the answers
    own_pool = sandbox is None or isinstance(sandbox, Mapping)
    limits = pool_limits(settings) if own_pool else getattr(sandbox, "limits", None)
    told: dict[str, Any] = {}

    @cache
    def own_tasks(split: str) -> Sequence[Task]:
        found = load_tasks(folder, split=split, seed=seed, tasks_file=tasks_file, prompts_file=prompts_file, missing=missing)
        if found.notes:
            told["task_notes"] = [*told.get("task_notes", ()), *(note for note in found.notes if note not in told.get("task_notes", ()))]
        return found

    @asynccontextmanager
    async def shared() -> AsyncIterator[Pool]:
        if own_pool:
            async with make_pool(settings) as pool:
                told["isolation"] = wall_of(pool)
                yield pool
        else:
            assert sandbox is not None and not isinstance(sandbox, Mapping)
            told["isolation"] = wall_of(sandbox)
            yield sandbox

    def demonstrated() -> list[Demonstration]:
        return demonstrations(n_demonstrations, seed, imperfection, visibility=visibility, turns=turns)

    return Environment(
        name=name,
        agents=[replace(agent, trainable=agent.trainable and agent.name not in frozen) for agent in team],
        build_graph=partial(
            build_graph,
            team=team,
            style=style,
            prompts=prompts,
            visibility=visibility,
            turns=turns,
            cell_timeout_s=cell_timeout_s,
            opens_thinking=opens_thinking,
        ),
        tasks=own_tasks if tasks is None else tasks,
        grade=partial(grade_state, grade=graded),
        to_input=graph_input,
        shared=shared,
        resources=partial(resources, team=team, files=given, grade=graded, handed_in=handed_in, coach_sees_grade=coach_sees_grade),
        coach_sees_reference=coach_sees_grade,
        rules=RULES,
        demonstrations=demonstrated if tasks is None and team is TEAM else None,
        facts=lambda: dict(told),
        metrics=environment_metrics if tasks is None else None,
        deadlines=cell_deadline(cell_timeout_s, limits),
    )


def graph_input(task: Task) -> DSBenchInput:
    return {"task": task.prompt}


async def grade_state(task: Task, state: Any, *, grade: GradeText = grade_submission) -> Outcome:
    """The grade of what was handed in, in a thread; where it is there and could not be read, the reason says why."""
    text, problem = state.get("submission"), str(state.get("submission_problem") or "")
    outcome = await asyncio.to_thread(_outcome, grade, task, text)
    return replace(outcome, reason=f"{outcome.reason}: {problem}") if text is None and problem else outcome


def resources(
    task: Task,
    pool: Pool,
    *,
    team: Sequence[Agent] = TEAM,
    files: Files = sandbox_files,
    grade: GradeText = grade_submission,
    handed_in: str = SUBMISSION,
    coach_sees_grade: bool = True,
) -> AbstractAsyncContextManager[DSBenchContext]:
    """The context of one episode: a desk on a sandbox session that begins with the task's files."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[DSBenchContext]:
        given = await asyncio.to_thread(files, task)
        seen = partial(_outcome, grade, task) if coach_sees_grade else None
        async with pool.session(files=given) as box:  # type: ignore[call-arg]
            yield DSBenchContext(Desk(box, team, facts=facts_of(task, given), given=given, grade=seen, handed_in=handed_in))

    return opened()


def _outcome(grade: GradeText, task: Task, text: str | None) -> Outcome:
    graded = grade(task, text)
    if isinstance(graded, Outcome):
        return graded
    if not 0.0 <= float(graded) <= 1.0:
        raise TaskError(f"grading task {task.id!r} gave {graded!r}", hint="return an Outcome, a bool, or a number in 0..1")
    return Outcome(success=float(graded) >= 1.0, score=float(graded))
