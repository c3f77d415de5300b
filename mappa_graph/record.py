"""The records that everything else passes around: plain frozen data, JSON in and out, no behaviour beyond checks.

A *call* is what the gateway saw (tokens); an *action* is what the graph saw (a call by a marked agent inside a node attempt);
they meet in `Action.call_id`. An `EpisodeTrace` is one run of a graph with everything that is known of it, and is the unit
that the store keeps, the coach judges and the trainer learns from. Times are unix seconds, durations seconds.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

EpisodeStatus = Literal["running", "done", "failed", "cancelled", "interrupted"]
ExecutionStatus = Literal["ok", "error", "timeout", "killed", "lost"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Call:
    """One completion of one request to a policy, as the gateway saw it."""

    id: str
    """The response id; the client's message carries the same one, which is how an action finds its tokens."""
    policy: str
    version: int
    """Which version of the policy's weights produced the tokens (0 = the first weights)."""
    prompt_ids: tuple[int, ...]
    """Token ids the engine was given, template and all. Empty = the engine did not return tokens: never trained on."""
    completion_ids: tuple[int, ...]
    """Token ids the engine sampled, end-of-sequence included where it was sampled."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each completion id at the call's temperature, from the engine, same length as `completion_ids`."""
    finish_reason: FinishReason
    text: str = ""
    index: int = 0
    """Which of the request's `n` completions this is."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The effective sampling parameters: temperature, top_p, max_tokens, seed, stop, …"""
    messages: Sequence[Mapping[str, Any]] = ()
    tool_calls: Sequence[Mapping[str, Any]] = ()
    agent: str | None = None
    """Agent and episode as named by request headers, where the client sent them."""
    episode: str | None = None
    started: float = 0.0
    ended: float = 0.0
    last_version: int | None = None
    """The version at the call's end, where weights were swapped in place while it ran: each token is of one from `version` to this."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError(f"call {self.id}: {len(self.logprobs)} logprobs for {len(self.completion_ids)} completion ids")


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file in a sandbox workspace, as an execution left it."""

    path: str
    change: Literal["created", "changed", "deleted"]
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class ExecutionErrorInfo:
    """The exception that ended an execution; the traceback is free of terminal escapes."""

    type: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """One tool or sandbox run that an action caused."""

    id: str
    status: ExecutionStatus
    name: str = "python"
    code: str = ""
    """The code or, for other tools, the arguments as JSON."""
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
    """The last value as text."""
    error: ExecutionErrorInfo | None = None
    duration_s: float = 0.0
    files: tuple[FileChange, ...] = ()
    tool_call_id: str | None = None
    note: str = ""
    """What the agent was told beside the output, e.g. that a kill lost the kernel's state."""
    truncated: bool = False
    """Whether the middle of stdout or stderr was cut."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One attempt of one graph node: what went in, what came out."""

    id: str
    """Run id of the node attempt."""
    node: str
    path: str
    """Node names from the root graph down, joined by "/", e.g. `planner/model`."""
    step: int
    task_id: str = ""
    attempt: int = 1
    parents: tuple[str, ...] = ()
    """Ids of the transitions that led to this one."""
    status: Literal["running", "done", "failed", "interrupted", "cancelled"] = "done"
    input: Any = None
    output: Any = None
    error: str | None = None
    started: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Action:
    """One call by a marked agent inside a transition, with the executions that followed from it."""

    id: str
    """Run id of the chat-model run (LangSmith uses the same id)."""
    transition_id: str
    agent: str
    policy: str
    order: int
    """Position in the episode by start time, from 0."""
    call_id: str | None = None
    """`Call.id`, or None where the message carried none: observed, never trained on."""
    call_index: int = 0
    messages: Sequence[Mapping[str, Any]] = ()
    """What the agent saw, as OpenAI-style `{role, content, …}` dicts."""
    output: str = ""
    """The text it produced, thinking included."""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str | None = None
    executions: tuple[Execution, ...] = ()
    error: str | None = None
    trainable: bool = True
    kept: bool = True
    """False for a completion that never reached the graph's state (a retried attempt, a discarded sample)."""
    started: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The deterministic grade of an episode; a coach never decides it."""

    success: bool
    reason: str = ""
    score: float | None = None
    """0..1; None means `float(success)`."""
    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return float(self.success) if self.score is None else self.score

    def __post_init__(self) -> None:
        if self.score is not None and not 0.0 <= self.score <= 1.0:
            raise ValueError(f"outcome score {self.score!r} is outside 0..1")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a coach says of an action. `score` None = no verdict: out of loss and statistics, and counted."""

    score: float | None
    """0 (worst) to 10 (best)."""
    reason: str = ""
    blame: tuple[str, ...] = ()
    """Ids of the actions (or names of the agents) that the fault is traced to."""
    better_action: str | None = None
    coach: str = ""
    """Name and version of who scored."""
    error: str | None = None
    """Why there is no score."""
    duration_s: float = 0.0
    usage: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.score is not None and not (math.isfinite(self.score) and 0.0 <= self.score <= 10.0):
            raise ValueError(f"verdict score {self.score!r} is not a number in 0..10; give None where there is no verdict")


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that went wrong, recorded once."""

    kind: str
    """Boundary: config, gateway, engine, sandbox, coach, store, task, episode, trainer, deadline, callback, foreign."""
    type: str
    message: str
    episode: str | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a graph on one task."""

    id: str
    """Root run id of the graph."""
    environment: str = ""
    task_id: str = ""
    task: str = ""
    """The task as text, as a coach or a reader is shown it."""
    reference: str | None = None
    stratum: str = ""
    split: str = "train"
    """train, or the name of an evaluation ("heldout/greedy@12")."""
    iteration: int = 0
    sample: int = 0
    thread_id: str | None = None
    status: EpisodeStatus = "running"
    error: str | None = None
    outcome: Outcome | None = None
    started: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class EpisodeTrace:
    """An episode with all that is known of it. `edges` are (earlier, later) positions in `actions`."""

    episode: Episode
    transitions: tuple[Transition, ...] = ()
    actions: tuple[Action, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """By action id."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """By action id; only for actions whose call was found."""


R = TypeVar("R")


def to_json(record: Any) -> Any:
    """A record as JSON-ready data; fields that hold their default are left out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        out: dict[str, Any] = {}
        for f in dataclasses.fields(record):
            value = getattr(record, f.name)
            if f.default is not dataclasses.MISSING and value == f.default:
                continue
            if f.default_factory is not dataclasses.MISSING and value == f.default_factory():
                continue
            out[f.name] = to_json(value)
        return out
    if isinstance(record, Mapping):
        return {str(k): to_json(v) for k, v in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(v) for v in record]
    return record


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(typing.cast(type, cls))


def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
    """The record of type `cls` that `to_json` wrote. Unknown keys raise `TypeError`."""
    hints = _hints(typing.cast(Hashable, cls))
    return cls(**{name: _revive(hints.get(name), value) for name, value in data.items()})


def _revive(hint: Any, value: Any) -> Any:
    if value is None or hint is None:
        return value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        chosen = next((a for a in typing.get_args(hint) if a is not type(None)), None)
        return _revive(chosen, value)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_json(typing.cast(type, hint), value)
    if origin in (tuple, Sequence) and isinstance(value, list | tuple):
        args = typing.get_args(hint)
        inner = args[0] if args else None
        return tuple(_revive(inner, v) for v in value)
    if origin is not None and isinstance(value, Mapping):
        args = typing.get_args(hint)
        return {k: _revive(args[1] if len(args) > 1 else None, v) for k, v in value.items()}
    return value
