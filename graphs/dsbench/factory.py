"""`environment(...)`: DSBench as an `Environment`, with its tasks, sandbox pool, grading, coach's rules and demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mappa_graph.environment import Environment, Task
from mappa_graph.errors import ConfigError, TaskError
from mappa_graph.graphs.mathchat.box import Pool
from mappa_graph.graphs.mathchat.factory import cell_deadline, make_pool, pool_limits, wall_of
from mappa_graph.record import Outcome

from .box import Desk, DSBenchContext
from .demonstrations import Demonstration, demonstrations
from .facts import facts_of
from .graph import build_graph
from .grading import grade_submission
from .metrics import environment_metrics
from .prompts import AGENTS, TEAM, Prompts, Style, Visibility, check_style
from .rules import RULES
from .tasks import load_tasks, sandbox_files

PRELOAD = (
    *("numpy", "pandas", "sklearn.pipeline", "sklearn.compose", "sklearn.impute", "sklearn.preprocessing"),
    *("sklearn.linear_model", "sklearn.ensemble", "sklearn.model_selection", "sklearn.metrics"),
)
"""Modules that are there at once in every kernel: importing scikit-learn anew would cost each episode most of a second."""


def environment(
    *,
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
    """The DSBench environment.

    Args:
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
    unknown = [name for name in frozen if name not in AGENTS]
    if unknown:
        raise ConfigError(f"dsbench has no agent {', '.join(map(repr, unknown))} to freeze", hint=f"it has: {', '.join(AGENTS)}")
    settings = {"preload": PRELOAD, **sandbox} if isinstance(sandbox, Mapping) else {"preload": PRELOAD}
    own_pool = sandbox is None or isinstance(sandbox, Mapping)
    limits = pool_limits(settings) if own_pool else getattr(sandbox, "limits", None)
    told: dict[str, Any] = {}

    @cache
    def tasks(split: str) -> Sequence[Task]:
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
        name="dsbench",
        agents=[replace(agent, trainable=agent.name not in frozen) for agent in TEAM],
        build_graph=partial(
            build_graph,
            style=style,
            prompts=prompts,
            visibility=visibility,
            turns=turns,
            cell_timeout_s=cell_timeout_s,
            opens_thinking=opens_thinking,
        ),
        tasks=tasks,
        grade=grade_state,
        to_input=graph_input,
        shared=shared,
        resources=partial(resources, coach_sees_grade=coach_sees_grade),
        coach_sees_reference=coach_sees_grade,
        rules=RULES,
        demonstrations=demonstrated,
        facts=lambda: dict(told),
        metrics=environment_metrics,
        deadlines=cell_deadline(cell_timeout_s, limits),
    )


def graph_input(task: Task) -> dict[str, Any]:
    return {"task": task.prompt, "facts": facts_of(task, sandbox_files(task))}


async def grade_state(task: Task, state: Any) -> Outcome:
    """The grade of what was handed in, in a thread; why it could not be read is the reason where it could not."""
    text, problem = state.get("submission"), str(state.get("submission_problem") or "")
    if not task.data.get("answers"):
        raise TaskError(f"task {task.id!r} has no answers to grade against")
    outcome = await asyncio.to_thread(grade_submission, task, text)
    return replace(outcome, reason=f"{outcome.reason}: {problem}") if text is None and problem else outcome


def resources(task: Task, pool: Pool, *, coach_sees_grade: bool = True) -> AbstractAsyncContextManager[DSBenchContext]:
    """The context of one episode: a desk on a sandbox session that begins with the task's files."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[DSBenchContext]:
        files = await asyncio.to_thread(sandbox_files, task)
        async with pool.session(files=files) as box:  # type: ignore[call-arg]
            grade = partial(grade_submission, task) if coach_sees_grade else None
            yield DSBenchContext(Desk(box, TEAM, facts=facts_of(task, files), given=files, grade=grade))

    return opened()
