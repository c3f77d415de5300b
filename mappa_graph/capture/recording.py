"""`Recording`: one episode in the making, from the events of its run tree.

A node attempt is a chain run that enters a new checkpoint namespace; a model or tool run belongs to the nearest one above it in
the run tree (metadata can be overridden by the app, parents can't). An action is complete, and ready for its coach, when its tool calls
are answered; without tool calls, when its node has ended. Whoever feeds `take` gets the actions that became ready in `ready`.
"""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from dataclasses import replace
from typing import Any
from uuid import UUID

from ..record import Episode, EpisodeStatus, EpisodeTrace, Execution, ExecutionErrorInfo, ExecutionStatus, Transition, Verdict
from . import joins
from .actions import CallTaken, Kept, act
from .lineage import Lineage, edges
from .model import OPEN, Acted, Attempt, Graph, Llm, Run, Status, ToolUse
from .render import Renderer, error_text
from .snapshot import CommandSnap, SendSnap, found
from .structure import Structure
from .tap import (
    ChainEnd,
    ChainStart,
    Event,
    Failed,
    Generation,
    Interrupted,
    LlmEnd,
    LlmStart,
    LlmStream,
    ToolEnd,
    ToolStart,
    ToolText,
    is_control_flow,
    names,
)
from .team import Team

_LAST = 1e18
"""A position after all events."""


class Recording:
    """All that is known of one root run. Not safe for several threads."""

    def __init__(self, id: str, team: Team, structure: Structure, taken: CallTaken) -> None:
        self.id = id
        self.team = team
        self.structure = structure
        self.episode = Episode(id)
        self.begun = False
        self.verdicts: dict[str, Verdict] = {}
        self.ended: EpisodeStatus | None = None
        self.opened = 0
        """How many root runs it has had: more than one, if it was interrupted and resumed."""
        self.ready: list[Acted] = []
        self.top = Attempt(id="", node="", path="", step=0, task_id="", graph=None)
        self.attempts: list[Attempt] = []
        self.llms: list[Llm] = []
        self.by_call: dict[str, list[Acted]] = {}
        """Tool call id -> actions that made a call with it."""
        self.runs: dict[UUID, Run] = {}
        self.namespaces: dict[str, Attempt] = {}
        self.open_llms = 0
        self._taken = taken
        self._graphs: dict[UUID, Graph] = {}
        self._tools: dict[UUID, ToolUse] = {}
        self._root: Run | None = None
        self._interrupted = False
        self._renderer = Renderer()

    @property
    def actions(self) -> list[Acted]:
        return [a for llm in self.llms for a in llm.actions]

    # -- events

    def take(self, event: Event) -> None:
        what = event.what
        if isinstance(what, ChainStart):
            self._chain_start(event, what)
        elif isinstance(what, ChainEnd):
            self._chain_end(event, what)
        elif isinstance(what, LlmStart):
            self._llm_start(event, what)
        elif isinstance(what, LlmEnd):
            self._llm_end(event, what.generations, None)
        elif isinstance(what, LlmStream):
            self._streaming(event, what)
        elif isinstance(what, ToolStart):
            self._tool_start(event, what)
        elif isinstance(what, ToolEnd):
            self._tool_end(event, what.output)
        elif isinstance(what, ToolText):
            self._tool_text(event, what)
        elif isinstance(what, Failed):
            self._failed(event, what)
        elif isinstance(what, Interrupted):
            self._interrupted = True

    def _run(self, event: Event) -> Run:
        parent = self.runs.get(event.parent_id) if event.parent_id is not None else None
        if parent is None and self._root is not None and event.run_id != self._root.id:
            parent = self._root
        owner = self.top if parent is None else parent.owner
        run = self.runs[event.run_id] = Run(event.run_id, parent, owner, event.at, event.seq)
        return run

    def _chain_start(self, event: Event, start: ChainStart) -> None:
        if not start.node:
            run = self._run(event)
            if event.parent_id is None or run.parent is None:
                self._open_root(run, start)
            return
        run = self._run(event)
        enclosing = run.owner
        graph = self._graph(run.parent, enclosing)
        ns = str(start.metadata.get("langgraph_checkpoint_ns", ""))
        name = next((s.split(":")[0] for s in reversed(ns.split("|")) if not s.isdigit()), start.name)
        path: tuple[Any, ...] = start.metadata.get("langgraph_path") or ()
        triggers = tuple(start.metadata.get("langgraph_triggers") or ())
        pushed = len(path) > 0 and path[0] == "__pregel_push"
        functional = pushed and len(path) == 4 and isinstance(path[1], tuple)
        task_id = ns.rsplit(":", 1)[-1]
        prior = graph.by_task.get(task_id, [])
        attempt = Attempt(
            id=str(event.run_id), node=name, path=f"{enclosing.path}/{name}" if enclosing is not self.top else name,
            step=int(start.metadata.get("langgraph_step", 0)), task_id=task_id, graph=graph, enclosing=enclosing, number=len(prior) + 1,
            started=event.at, seq=event.seq, input=self._renderer.json(start.input), triggers=triggers, pushed=pushed,
            functional=functional, hidden="langsmith:hidden" in start.tags, metadata=start.metadata,
            input_object=start.input_object if pushed else None,
        )  # fmt: skip
        attempt.tool_messages_in = {m for m in found(start.input) if m.role == "tool"}
        run.owner = attempt
        run.what = attempt
        if prior and prior[-1].status == "interrupted":
            attempt.graphs = list(prior[-1].graphs)
            attempt.items = [i for i in prior[-1].items if not isinstance(i, Llm)]
        graph.attempts.append(attempt)
        graph.by_task.setdefault(task_id, []).append(attempt)
        if functional:
            enclosing.items.append(attempt)
        self.attempts.append(attempt)
        self.namespaces[ns] = attempt

    def _open_root(self, run: Run, start: ChainStart) -> None:
        self._root = run
        self.opened += 1
        run.what = start.name
        self.top.graphs_seen = 0
        if self.ended is None and not self.episode.started:
            thread = start.metadata.get("thread_id")
            known = self.episode
            self.episode = replace(known, started=run.started, thread_id=known.thread_id or (None if thread is None else str(thread)))
            self.top.id, self.top.node, self.top.path, self.top.started = str(run.id), start.name, start.name, run.started
            self.top.seq = run.seq
            self.top.input = self._renderer.json(start.input)
        self.ended, self._interrupted = None, False

    def _graph(self, parent: Run | None, enclosing: Attempt) -> Graph:
        """The graph invocation whose run is `parent`; one that an interrupted attempt began goes on in the attempt that resumes it."""
        key = parent.id if parent is not None else UUID(int=0)
        graph = self._graphs.get(key)
        if graph is None:
            place = enclosing.graphs_seen
            enclosing.graphs_seen += 1
            if place < len(enclosing.graphs):
                graph = enclosing.graphs[place]
                graph.enclosing = enclosing
            else:
                graph = Graph(enclosing)
                enclosing.graphs.append(graph)
                if parent is None or parent.what is not enclosing:
                    enclosing.items.append(graph)
            self._graphs[key] = graph
        return graph

    def _chain_end(self, event: Event, end: ChainEnd) -> None:
        run = self.runs.get(event.run_id)
        if run is None:
            return
        run.end_seq = event.seq
        if run is self._root:
            self._end("interrupted" if self._interrupted else "done", None, event)
        elif isinstance(run.what, Attempt):
            self._end_attempt(run.what, event, "done", end.output)
        elif end.output is not None and run.parent is not None and isinstance(run.parent.what, Attempt):
            self._routed(run.parent.what, end.output)

    @staticmethod
    def _routed(attempt: Attempt, output: Any) -> None:
        """What a conditional edge's function returned."""
        for target in output if isinstance(output, list) else [output]:
            if isinstance(target, SendSnap):
                attempt.sends.append(target)
            elif isinstance(target, str):
                attempt.goto.add(target)

    def _end_attempt(self, attempt: Attempt, event: Event, status: Status, output: Any, error: str | None = None) -> None:
        attempt.status, attempt.ended, attempt.end_seq, attempt.error = status, event.at, event.seq, error
        attempt.returned = found(output)
        for part in output if isinstance(output, list) else [output]:
            if isinstance(part, CommandSnap):
                attempt.goto.update(names(part.goto))
                attempt.sends += [g for g in part.goto if isinstance(g, SendSnap)]
            elif isinstance(part, SendSnap):
                attempt.sends.append(part)
        attempt.output = self._renderer.json(output)
        if not attempt.graphs:
            joins.answer_from_return(self, attempt)
        for llm in attempt.llms:
            for action in llm.actions:
                self._settle(action)
                if action.complete:
                    self.ready.append(action)

    def _failed(self, event: Event, failed: Failed) -> None:
        run = self.runs.get(event.run_id)
        if run is None:
            return
        run.end_seq = event.seq
        error, text = failed.error, error_text(failed.error)
        what = run.what
        if isinstance(what, Llm):
            self._llm_end(event, [], failed)
        elif isinstance(what, ToolUse):
            self._tool_failed(event, what, failed)
        elif run is self._root:
            cancelled = type(error).__name__ in ("CancelledError", "GeneratorExit", "KeyboardInterrupt")
            if is_control_flow(error):
                self._end("interrupted", None, event)
            else:
                self._end("cancelled" if cancelled else "failed", text, event)
        elif isinstance(what, Attempt):
            if failed.update is not None and is_control_flow(error):
                self._end_attempt(what, event, "done", failed.update)
            elif is_control_flow(error):
                self._end_attempt(what, event, "interrupted", None)
            elif type(error).__name__ in ("CancelledError", "GeneratorExit"):
                self._end_attempt(what, event, "cancelled", None, text)
            else:
                self._end_attempt(what, event, "failed", None, text)

    # -- model runs

    def _llm_start(self, event: Event, start: LlmStart) -> None:
        run = self._run(event)
        attempt = run.owner
        llm = Llm(str(event.run_id), attempt, start.metadata, start.model, start.n, start.messages, event.at, event.seq)
        run.what = llm
        self.open_llms += 1
        self.llms.append(llm)
        attempt.llms.append(llm)
        attempt.items.append(llm)
        if attempt.graph is not None:
            joins.answer_from_prompt(self, llm)
            attempt.graph.llms.append(llm)

    def _llm_end(self, event: Event, generations: list[Generation], failed: Failed | None) -> None:
        run = self.runs.get(event.run_id)
        if run is None or not isinstance(run.what, Llm):
            return
        run.end_seq = event.seq
        self._ended_llm(run.what, generations, failed, event.seq, event.at)

    def _streaming(self, event: Event, stream: LlmStream) -> None:
        run = self.runs.get(event.run_id)
        if run is not None and isinstance(run.what, Llm):
            run.what.stream_id = stream.id

    def _ended_llm(self, llm: Llm, generations: list[Generation], failed: Failed | None, seq: float, at: float) -> None:
        if llm.end_seq == OPEN:
            self.open_llms -= 1
        llm.end_seq = seq
        for action in act(llm, generations, failed, at, self.team, self._taken):
            llm.actions.append(action)
            for id in action.calls:
                self.by_call.setdefault(id, []).append(action)
            self._settle(action)

    # -- tool runs

    def _tool_start(self, event: Event, start: ToolStart) -> None:
        run = self._run(event)
        use = ToolUse(str(event.run_id), start.name, start.inputs, start.tool_call_id, run.owner, None, event.at, event.seq)
        use.action = joins.cause_of(self, use)
        if use.action is not None:
            use.action.running += 1
        run.what = use
        run.owner.tools.append(use)
        self._tools[event.run_id] = use

    def _tool_text(self, event: Event, text: ToolText) -> None:
        use = self._tools.get(event.run_id)
        if use is not None:
            setattr(use, text.stream, getattr(use, text.stream) + text.text)

    def _tool_end(self, event: Event, output: Any) -> None:
        run = self.runs.get(event.run_id)
        if run is not None and isinstance(run.what, ToolUse):
            run.end_seq = event.seq
            self._answer(run.what, joins.execution_of(run.what, output, event.at))

    def _tool_failed(self, event: Event, use: ToolUse, failed: Failed) -> None:
        error = failed.error
        if is_control_flow(error) and failed.update is None:
            use.ended = True
            if use.action is not None:
                use.action.running -= 1
            return
        if is_control_flow(error):
            self._answer(use, joins.execution_of(use, failed.update, event.at))
            return
        trace = "".join(traceback.format_exception(error))
        info = ExecutionErrorInfo(type(error).__name__, str(error), trace)
        status: ExecutionStatus = "killed" if type(error).__name__ in ("CancelledError", "GeneratorExit") else "error"
        done = joins.execution_of(use, None, event.at)
        self._answer(use, replace(done, status=status, error=info))

    def _answer(self, use: ToolUse, execution: Execution) -> None:
        use.ended = True
        action = use.action
        if action is None:
            return
        action.running -= 1
        action.executions.append(execution)
        if use.tool_call_id is not None and use.tool_call_id in action.calls:
            action.answered.add(use.tool_call_id)
        elif execution.tool_call_id is not None:
            action.answered.add(execution.tool_call_id)
        self._settle(action)

    # -- completion

    def _settle(self, action: Acted) -> None:
        """Puts the action on `ready` once it is complete."""
        attempt = action.llm.attempt
        if action.complete or action.running or attempt.status == "interrupted":
            return
        done = not action.waiting if action.calls else attempt.status != "running"
        if done:
            self.complete(action)

    def complete(self, action: Acted) -> None:
        if not action.complete:
            action.complete = True
            self.ready.append(action)

    def _end(self, status: EpisodeStatus, error: str | None, event: Event) -> None:
        self.ended = status
        self.top.end_seq, self.top.ended = event.seq, event.at
        self.top.status = status
        self.episode = replace(self.episode, status=status, error=error, ended=event.at)
        if status != "interrupted":
            self.complete_all()

    def complete_all(self) -> None:
        """Nothing more will happen: what has not been completed is complete as it is."""
        for action in self.actions:
            self.complete(action)

    def close(self, status: EpisodeStatus, error: str | None, at: float) -> None:
        """Ends what still runs, for an episode whose root run gave no end."""
        for attempt in self.attempts:
            if attempt.status == "running":
                attempt.status, attempt.ended = "cancelled", at
        for llm in self.llms:
            if llm.end_seq == OPEN:
                # LangChain reports no end of a call that was cancelled.
                self._ended_llm(llm, [], Failed(CancelledError("the episode ended before the model had answered")), _LAST, at)
        for use in self._tools.values():
            if not use.ended:
                lost = joins.execution_of(use, None, at)
                self._answer(use, replace(lost, status="lost", note="the episode ended before the tool answered"))
        if self.ended is None:
            self.ended = status
            self.episode = replace(self.episode, status=status, error=error, ended=at)
        self.complete_all()

    # -- records

    def partial(self) -> EpisodeTrace:
        """The record so far, without parents and edges: what a coach's case is made of."""
        actions = tuple(a.record(i, True) for i, a in enumerate(self.actions))
        return EpisodeTrace(self.episode, tuple(self._transition(t, ()) for t in self._recorded()), actions, (), dict(self.verdicts))

    def trace(self) -> EpisodeTrace:
        """The whole record, calls aside."""
        recorded = self._recorded()
        ids = {t.id for t in recorded}
        lineage = Lineage(self.structure, recorded)
        ordered = sorted(self.llms, key=lambda llm: llm.seq)
        acted = [a for llm in ordered for a in llm.actions]
        position = {a.base.id: i for i, a in enumerate(acted)}
        linked = edges([self.top, *self.attempts], ordered, lineage, position)
        transitions = tuple(self._transition(t, lineage.shown_parents(t, ids)) for t in recorded)
        kept = Kept()
        actions = tuple(a.record(i, kept(a)) for i, a in enumerate(acted))
        return EpisodeTrace(self.episode, transitions, actions, linked, dict(self.verdicts))

    def _recorded(self) -> list[Attempt]:
        shown = [a for a in self.attempts if not a.hidden]
        return [self.top, *shown] if self.top.llms else shown

    @staticmethod
    def _transition(attempt: Attempt, parents: tuple[str, ...]) -> Transition:
        known = attempt.frozen
        if known is None or known.parents != parents or known.status != attempt.status:
            known = attempt.frozen = Transition(
                id=attempt.id, node=attempt.node, path=attempt.path, step=attempt.step, task_id=attempt.task_id, attempt=attempt.number,
                parents=parents, status=attempt.status, input=attempt.input, output=attempt.output, error=attempt.error,
                started=attempt.started, ended=attempt.ended,
            )  # fmt: skip
        return known
