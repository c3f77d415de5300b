"""`environment(...)`: MathChat as an `Environment`, with its tasks, sandbox pool, grading, rules and demonstrations."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mappa_graph.agent import Agent
from mappa_graph.environment import Environment, Task
from mappa_graph.errors import ConfigError, TaskError
from mappa_graph.record import Outcome
from mappa_graph.sandboxes import Limits, SandboxPool

from .box import MathChatContext, Pool
from .demonstrations import Demonstration, demonstrations
from .grading import grade, quick_grade
from .graph import build_graph
from .prompts import AGENTS, ROLES, Style, Visibility, check_style
from .rules import RULES
from .tasks import LEVELS, load_tasks, word_problems


def environment(
    *,
    visibility: Visibility = "full",
    prompts: Style = "standard",
    executor_turns: int = 2,
    n_train: int = 4096,
    n_heldout: int = 512,
    levels: Sequence[int] = LEVELS,
    seed: int = 0,
    tasks_file: str | Path | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    cell_timeout_s: float | None = None,
    opens_thinking: bool = False,
    frozen: Sequence[str] = (),
    coach_sees_reference: bool = True,
    n_demonstrations: int = 12_000,
    imperfection: float = 0.6,
    sandbox: Mapping[str, Any] | Pool | None = None,
) -> Environment:
    """The MathChat environment.

    Args:
        visibility, prompts, executor_turns, cell_timeout_s, opens_thinking: as `build_graph`.
        n_train, n_heldout, levels, seed: of the word problems (`word_problems`), where no file is given.
        tasks_file, on_bad_row: a problem file (`load_tasks`) in place of them, of which every fifth problem is held out.
        frozen: agents that are not trained.
        coach_sees_reference: whether coaches are shown the right answer.
        n_demonstrations, imperfection: of the warm start of a tiny model (`demonstrations`).
        sandbox: settings of the `SandboxPool` that is opened once for a run, or a pool that is open already and stays open.

    Raises `ConfigError` or `TaskError` for what can't be used.
    """
    check_style(prompts, visibility)
    unknown = [name for name in frozen if name not in AGENTS]
    if unknown:
        raise ConfigError(f"mathchat has no agent {', '.join(map(repr, unknown))} to freeze", hint=f"it has: {', '.join(AGENTS)}")
    loaded = None if tasks_file is None else load_tasks(tasks_file, on_bad_row=on_bad_row)
    limits = pool_limits(sandbox or {}) if sandbox is None or isinstance(sandbox, Mapping) else getattr(sandbox, "limits", None)
    facts: dict[str, Any] = {} if loaded is None else {"rows_skipped": loaded.skipped}

    @cache
    def tasks(split: str) -> Sequence[Task]:
        counts = {"train": n_train, "heldout": n_heldout}
        if split not in counts:
            raise TaskError(f"mathchat has no task split {split!r}", hint=f"it has: {', '.join(counts)}")
        return tuple(word_problems(split, counts[split], seed, levels))

    @asynccontextmanager
    async def shared() -> AsyncIterator[Pool]:
        if sandbox is None or isinstance(sandbox, Mapping):
            async with make_pool(sandbox or {}) as pool:
                facts["isolation"] = wall_of(pool)
                yield pool
        else:
            facts["isolation"] = wall_of(sandbox)
            yield sandbox

    def demonstrated() -> list[Demonstration]:
        return demonstrations(n_demonstrations, seed, imperfection, levels=levels, visibility=visibility, style=prompts)

    return Environment(
        name="mathchat",
        agents=[Agent(name, role=ROLES[name], trainable=name not in frozen) for name in AGENTS],
        build_graph=partial(
            build_graph,
            visibility=visibility,
            prompts=prompts,
            executor_turns=executor_turns,
            cell_timeout_s=cell_timeout_s,
            opens_thinking=opens_thinking,
        ),
        tasks=tasks if loaded is None else loaded,
        grade=grade_state,
        to_input=graph_input,
        shared=shared,
        resources=resources,
        coach_sees_reference=coach_sees_reference,
        rules=RULES,
        demonstrations=demonstrated,
        facts=lambda: dict(facts),
        deadlines=cell_deadline(cell_timeout_s, limits),
    )


def cell_deadline(cell_timeout_s: float | None, limits: Limits | None) -> dict[str, float]:
    """The longest that one run of code may take, in seconds, by the setting that says so; empty where a foreign pool doesn't tell."""
    if cell_timeout_s is not None:
        return {"cell_timeout_s": cell_timeout_s}
    return {} if limits is None else {"sandbox.limits.cell_s": limits.cell_s}


def wall_of(pool: Pool) -> str:
    """The name of the wall that a pool's sessions stand behind, for reports."""
    isolation = getattr(pool, "isolation", None)
    return str(getattr(isolation, "wall", isolation or "unknown"))


def make_pool(settings: Mapping[str, Any]) -> SandboxPool:
    """A `SandboxPool` from plain settings; `limits` may be a mapping. Raises `ConfigError` for a setting it does not have."""
    return SandboxPool(**{**settings, "limits": pool_limits(settings)})


def pool_limits(settings: Mapping[str, Any]) -> Limits:
    """The limits in settings of a pool, which are checked for names that a pool doesn't have. Raises `ConfigError`."""
    try:
        inspect.signature(SandboxPool).bind(**settings)
        limits = settings.get("limits")
        return Limits(**limits) if isinstance(limits, Mapping) else limits or Limits()
    except TypeError as error:
        raise ConfigError(f"the sandbox settings {dict(settings)!r} can't be used: {error}", hint="see SandboxPool and Limits") from error


def graph_input(task: Task) -> dict[str, str]:
    return {"problem": task.prompt}


async def grade_state(task: Task, state: Any) -> Outcome:
    """The grade of the verifier's final text; algebra is compared in a thread, so that the loop goes on."""
    final, reference = str(state.get("final") or ""), task.reference
    if reference is None:
        raise TaskError(f"task {task.id!r} has no reference to grade against")
    quick = quick_grade(final, reference)
    return quick if quick is not None else await asyncio.to_thread(grade, final, reference)


def resources(task: Task, pool: Pool) -> AbstractAsyncContextManager[MathChatContext]:
    """The context of one episode: a sandbox session, which takes a kernel only when code comes."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[MathChatContext]:
        async with pool.session() as box:
            yield MathChatContext(box=box)

    return opened()
