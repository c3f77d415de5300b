"""An environment: a graph, its agents, its tasks, how a task becomes the graph's input, and how an episode is graded.

`Environment` holds functions of the user's own; it neither wraps nor changes the graph they build. Everything it is given is
checked when it is made, so that a mistake shows before a model is loaded.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from .agent import Agent
from .coach.base import AgentCard
from .errors import ConfigError, EpisodeError, TaskError
from .record import EpisodeTrace, Outcome

Grade = Callable[["Task", Any], Outcome | float | bool | Awaitable[Outcome | float | bool]]
Tasks = Sequence["Task"] | Mapping[str, Sequence["Task"]] | Callable[[str], Sequence["Task"]]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `prompt` is its text; `reference` never enters the graph, only grading (and the coach, where allowed)."""

    id: str
    prompt: str
    reference: str | None = None
    stratum: str = ""
    """What it is balanced and reported by: difficulty level, task type, …"""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """What is trained on.

    Args:
        name: shown in reports and stored with every episode.
        agents: who acts, in the order of the pipeline. Every trainable agent's name must be a model the graph calls.
        build_graph: `build_graph(models) -> CompiledStateGraph`, where `models[agent.name]` is a LangChain chat model that
            reaches the agent's policy. Called once per run.
        tasks: `{"train": [...], "heldout": [...]}`, a function of the split's name, or one list, of which every fifth task
            (by a hash of its id, so that the split never changes) is held out.
        to_input: the graph's input for a task; default `{"messages": [("user", task.prompt)]}`.
        grade: `grade(task, final_state)` -> `Outcome`, a number in 0..1, or a bool; may be async.
        resources: `resources(task)` -> async context manager held open for one episode; what it yields is handed to the graph
            as its `context` (a sandbox session, for one).
        shared: `shared()` -> async context manager opened once for many episodes (a sandbox pool, for one). Where it is given,
            `resources` is called as `resources(task, what it yielded)`, and the runner closes it when it ends.
        coach_sees_reference: whether the coach's case holds the task's reference.
        rules: extra rules for `EvidenceCoach`, as `(case) -> Finding | None` functions.
        demonstrations: makes the examples (`{"agent", "messages", "completion"}`) that model "tiny" is warm-started on.
        deadlines: time limits in seconds that must each be shorter than an episode's, by the name of their setting, e.g.
            `{"cell_timeout_s": 60}`.
        metrics: `metrics(traces)` -> name -> number, what an evaluation says beside accuracy (`{"fair_f1": 0.61}`); a checkpoint can be
            chosen by one of them.
        facts: what a report should say of the environment once it ran, e.g. `{"isolation": "bubblewrap"}`.
    """

    name: str
    agents: Sequence[Agent]
    build_graph: Callable[[Mapping[str, Any]], Any]
    tasks: Tasks
    grade: Grade
    to_input: Callable[[Task], Any] | None = None
    resources: Callable[..., AbstractAsyncContextManager[Any]] | None = None
    shared: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    coach_sees_reference: bool = True
    rules: Sequence[Callable[..., Any]] = ()
    demonstrations: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    facts: Callable[[], Mapping[str, Any]] | None = None
    metrics: Callable[[Sequence[EpisodeTrace]], Mapping[str, float]] | None = None
    deadlines: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.agents:
            raise ConfigError(f"environment {self.name!r} has no agents", hint='give at least one: agents=[Agent("solver")]')
        names = [a.name for a in self.agents]
        if len(set(names)) != len(names):
            raise ConfigError(f"environment {self.name!r} names an agent twice: {names}")
        if self.shared is not None and self.resources is None:
            raise ConfigError(
                f"environment {self.name!r} gives shared without resources", hint="resources(task, shared) hands it to an episode"
            )

    def check_deadlines(self, episode_s: float) -> None:
        """Raises `ConfigError` unless every one of `deadlines` lies inside an episode of `episode_s` seconds."""
        for name, value in self.deadlines.items():
            if not value < episode_s:
                raise ConfigError(
                    f"{name} = {value:g} s of environment {self.name!r} does not lie inside rollout.episode_timeout_s = {episode_s:g} s",
                    hint=f"lower {name}, or raise rollout.episode_timeout_s",
                )

    @property
    def team(self) -> tuple[AgentCard, ...]:
        return tuple(AgentCard(a.name, a.role, tuple(a.reads), tuple(a.writes)) for a in self.agents)

    def agent(self, name: str) -> Agent:
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise ConfigError(f"environment {self.name!r} has no agent {name!r}", hint=f"it has: {', '.join(a.name for a in self.agents)}")

    def split(self, name: str) -> list[Task]:
        """The tasks of a split ("train", "heldout"; "all" where they are one list), ids checked to be unique."""
        if callable(self.tasks):
            chosen = list(self.tasks(name))
        elif isinstance(self.tasks, Mapping):
            if name not in self.tasks:
                raise TaskError(f"environment {self.name!r} has no task split {name!r}", hint=f"it has: {', '.join(self.tasks)}")
            chosen = list(self.tasks[name])
        else:
            chosen = [t for t in self.tasks if name == "all" or _held_out(t) == (name != "train")]
        if not chosen:
            raise TaskError(f"the {name!r} split of environment {self.name!r} is empty")
        seen: set[str] = set()
        for task in chosen:
            if task.id in seen:
                raise TaskError(f"task id {task.id!r} occurs twice in the {name!r} split of {self.name!r}", hint="ids must be unique")
            seen.add(task.id)
        return chosen

    def graph_input(self, task: Task) -> Any:
        return self.to_input(task) if self.to_input else {"messages": [("user", task.prompt)]}

    async def outcome(self, task: Task, state: Any) -> Outcome:
        """The grade of a final state. Raises `EpisodeError` when the user's grading function fails or gives something else."""
        try:
            graded = self.grade(task, state)
            if inspect.isawaitable(graded):
                graded = await graded
        except Exception as error:
            raise EpisodeError(f"grading task {task.id!r} failed: {type(error).__name__}: {error}") from error
        if isinstance(graded, Outcome):
            return graded
        if isinstance(graded, bool):
            return Outcome(success=graded)
        if isinstance(graded, int | float) and 0.0 <= graded <= 1.0:
            return Outcome(success=graded >= 1.0, score=float(graded))
        raise EpisodeError(f"grading task {task.id!r} gave {graded!r}", hint="return an Outcome, a bool, or a number in 0..1")


def _held_out(task: Task) -> bool:
    return int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:4], "big") % 5 == 0
