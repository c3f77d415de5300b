"""What a recording is made of while it grows: runs, node attempts, graph invocations, model runs, tool runs, actions.

`seq` numbers are positions in the order of events; `OPEN` stands for an end that has not come. These objects belong to the worker
thread; what leaves it are the frozen records of `mappa_graph.record`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from ..record import Action, Execution, Transition
from .snapshot import Message, SendSnap

OPEN = float("inf")

Status = Literal["running", "done", "failed", "interrupted", "cancelled"]


@dataclass(slots=True, eq=False)
class Run:
    """One callback run of any kind."""

    id: UUID
    parent: Run | None
    owner: Attempt
    """The node attempt that it belongs to; for a node attempt's own run, the attempt itself."""
    started: float
    seq: float
    end_seq: float = OPEN
    what: Any = None
    """`Attempt`, `Llm`, `ToolUse`, or None for a chain that is none of these."""


@dataclass(slots=True, eq=False)
class Graph:
    """One invocation of a graph; `enclosing` is the attempt that it runs in (the recording's `top` for the root graph)."""

    enclosing: Attempt
    attempts: list[Attempt] = field(default_factory=list)
    by_task: dict[str, list[Attempt]] = field(default_factory=dict)
    llms: list[Llm] = field(default_factory=list)

    @property
    def seq(self) -> float:
        return self.attempts[0].seq if self.attempts else OPEN

    @property
    def end_seq(self) -> float:
        return max((a.end_seq for a in self.attempts), default=OPEN)

    def steps(self) -> dict[int, list[Attempt]]:
        """The last attempt of each task, by step. Tasks of the functional API are in no step."""
        out: dict[int, list[Attempt]] = {}
        for attempts in self.by_task.values():
            last = attempts[-1]
            if not last.functional:
                out.setdefault(last.step, []).append(last)
        return out


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of one graph node; for a run outside any graph, the root run as a whole."""

    id: str
    node: str
    path: str
    step: int
    task_id: str
    graph: Graph | None
    """None for the recording's `top`."""
    enclosing: Attempt | None = None
    """The attempt that the graph ran in when this one was started."""
    number: int = 1
    status: Status = "running"
    started: float = 0.0
    ended: float = 0.0
    seq: float = -1
    end_seq: float = OPEN
    input: Any = None
    output: Any = None
    """JSON-ready."""
    error: str | None = None
    triggers: tuple[str, ...] = ()
    pushed: bool = False
    functional: bool = False
    hidden: bool = False
    input_object: Any = None
    goto: set[str] = field(default_factory=set)
    sends: list[SendSnap] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    items: list[Llm | Graph | Attempt] = field(default_factory=list)
    """What ran directly inside, in order of start: model runs, graph invocations, `@task`s."""
    graphs: list[Graph] = field(default_factory=list)
    graphs_seen: int = 0
    llms: list[Llm] = field(default_factory=list)
    tools: list[ToolUse] = field(default_factory=list)
    tool_messages_in: set[Message] = field(default_factory=set)
    returned: list[Message] = field(default_factory=list)
    frozen: Transition | None = None
    """Its record, where it is settled."""
    fixed_parents: tuple[str, ...] | None = None
    """Set for an attempt that was read back from a store."""

    @property
    def superseded(self) -> bool:
        """Whether a later attempt was made of the same task."""
        return self.graph is not None and self.graph.by_task[self.task_id][-1] is not self


@dataclass(slots=True, eq=False)
class Llm:
    """One run of a chat model."""

    id: str
    attempt: Attempt
    metadata: dict[str, Any]
    model: str
    n: int
    prompt: list[Message]
    started: float
    seq: float
    end_seq: float = OPEN
    stream_id: str | None = None
    """The id that the server gave in the first chunk of a stream."""
    actions: list[Acted] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Acted:
    """An action in the making: its record, and what has become of it so far."""

    base: Action
    llm: Llm
    known: bool
    message: Message | None
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tool call id -> call."""
    answered: set[str] = field(default_factory=set)
    running: int = 0
    executions: list[Execution] = field(default_factory=list)
    complete: bool = False
    submitted: bool = False
    kept_before: bool | None = None
    """Set for an action that was read back from a store."""
    _built: Action | None = None
    _key: tuple[Any, ...] = ()

    def record(self, order: int, kept: bool) -> Action:
        key = (order, kept, len(self.executions))
        if self._built is None or key != self._key:
            self._built = dataclasses.replace(self.base, order=order, kept=kept, executions=tuple(self.executions))
            self._key = key
        return self._built

    @property
    def waiting(self) -> bool:
        """Whether a tool call of it is unanswered."""
        return not self.answered.issuperset(self.calls)


@dataclass(slots=True, eq=False)
class ToolUse:
    """One run of a tool."""

    id: str
    name: str
    inputs: Any
    tool_call_id: str | None
    attempt: Attempt
    action: Acted | None
    started: float
    seq: float
    ended: bool = False
    stdout: str = ""
    stderr: str = ""
