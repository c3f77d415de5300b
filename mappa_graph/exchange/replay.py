"""A trace told again as the events that a live run would have given, to the very code that records live runs.

So a trace and a live record of one run agree by construction: which span is a node, who called whom, which tool run answers which
call, what was kept, what followed from what, is all decided in `mappa_graph.capture`. Here only the events are made. Where a
trace holds no LangGraph metadata (another framework, or a source that dropped it), the spans that enclose model calls stand for
nodes, and those that ran side by side share a step; that is a guess, and counted as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from ..capture.recording import Recording
from ..capture.resume import revived
from ..capture.snapshot import CommandSnap, Message
from ..capture.structure import Structure
from ..capture.tap import ChainEnd, ChainStart, Event, Failed, Generation, Interrupted, LlmEnd, LlmStart, ToolEnd, ToolStart
from ..capture.team import Team
from ..record import EpisodeTrace, Execution
from . import failures
from .generations import fill
from .messages import COMMAND, Reader, fields_of
from .spans import Span, moments, walk

_BAD_IN_PATH = re.compile(r"[|:/]+")
_INTERRUPTS = ("GraphInterrupt", "NodeInterrupt")

Taken = Callable[[str, int], bool]


def replay(
    root: Span, team: Team, structure: Structure, taken: Taken, lost: Counter[str], interrupted: EpisodeTrace | None = None
) -> EpisodeTrace:
    """The record of a trace; its episode's id is the trace's. `lost` counts, by field, what the source did not keep.

    `interrupted`: the record of the run that this trace resumes, which goes on in it.
    """
    recording = (
        Recording(root.trace_id, team, structure, taken) if interrupted is None else revived(interrupted, team, structure, lambda *_: False)
    )
    return _Replay(root, recording, lost).run()


def resumes(root: Span) -> bool:
    """Whether a run goes on with an interrupted one of its thread: it was given a command to, or nothing. A fork does not."""
    given = root.inputs
    if isinstance(given, dict) and given.keys() == {"input"}:
        given = given["input"]
    told = given is None or (isinstance(given, dict) and given.keys() == COMMAND and given["resume"] is not None)
    return told and bool(root.metadata.get("thread_id")) and not root.metadata.get("checkpoint_id")


class _Replay:
    def __init__(self, root: Span, recording: Recording, lost: Counter[str]) -> None:
        self.root = root
        self.lost = lost
        self.reader = Reader()
        self.recording = recording
        self.seq = 0
        self.interrupted = False
        self.nodes: dict[str, Mapping[str, Any]] = {}
        """Span id -> metadata of a node attempt."""

    def run(self) -> EpisodeTrace:
        spans = list(walk(self.root))
        self._find_nodes(spans)
        fill(spans, self.lost)
        last = self.root.start
        for at, ends, span in moments(self.root):
            last = max(last, at)
            if ends:
                self._end(span, at)
            else:
                self._start(span, at)
        recording = self.recording
        if recording.ended is None:
            self.lost["end of the run"] += 1
        if recording.ended != "interrupted":
            recording.close("cancelled", None, last)
        self.lost["send argument"] += sum(not s.read for s in self.reader.sends)
        self.lost["middle of a text over a million characters"] += self.reader.cut
        trace = recording.trace()
        forward = tuple(e for e in trace.edges if e[0] < e[1])
        if len(forward) < len(trace.edges):
            # Steps that go on after the step around them has ended, or clocks that disagree.
            self.lost["edge (it led back in time)"] += len(trace.edges) - len(forward)
            trace = replace(trace, edges=forward)
        return self._with_tracebacks(trace, spans)

    # -- which spans are node attempts

    def _find_nodes(self, spans: list[Span]) -> None:
        if not any(s.metadata.get("langgraph_checkpoint_ns") for s in spans if s.kind == "chain"):
            self._guess_nodes(spans)
            return
        spaces: dict[str, str] = {}
        for span in spans:
            outer = spaces.get(span.parent.id, "") if span.parent is not None else ""
            space = str(span.metadata.get("langgraph_checkpoint_ns") or "")
            if span.kind == "chain":
                if span is not self.root and space and space != outer and not outer.startswith(space + "|"):
                    self.nodes[span.id] = _typed(span)
                spaces[span.id] = space or outer
            else:
                spaces[span.id] = outer if span.kind == "tool" else ""
        self._put_back(spans)

    def _put_back(self, spans: list[Span]) -> None:
        """Calls that hang on the root though their namespace is a node's: something between the two was not traced."""
        by_space: dict[str, Span] = {}
        for span in spans:
            if span.id in self.nodes:
                by_space[str(self.nodes[span.id]["langgraph_checkpoint_ns"])] = span
        for span in [s for s in self.root.children if s.kind != "chain"]:
            node = by_space.get(str(span.metadata.get("langgraph_checkpoint_ns") or ""))
            if node is not None:
                self.root.children.remove(span)
                node.children.append(span)
                node.children.sort(key=lambda s: (s.start, s.place))
                span.parent = node
                self.lost["parent (found again by namespace)"] += 1

    def _guess_nodes(self, spans: list[Span]) -> None:
        """Nodes of a trace without namespaces: those that say node and step, else the steps around model and tool calls."""
        chosen = [s for s in spans if s is not self.root and s.kind == "chain" and _says_node(s)]
        told = bool(chosen)
        if not told:
            chosen = self._around_calls(spans)
        if not chosen:
            return
        self.lost["node namespace (told by node and step)" if told else "node metadata (steps guessed from times)"] += len(chosen)
        steps: dict[str, tuple[int, float]] = {}
        for span in chosen:
            above = span.parent
            while above is not None and above.id not in self.nodes:
                above = above.parent
            outer: Mapping[str, Any] = {} if above is None else self.nodes[above.id]
            key = "" if above is None else above.id
            step, until = steps.get(key, (0, -1.0))
            if span.start >= until:
                step, until = step + 1, span.start
            steps[key] = (step, max(until, span.end if span.end is not None else until))
            name = _BAD_IN_PATH.sub("_", span.name).strip("_") or "step"
            space = f"{outer['langgraph_checkpoint_ns']}|{name}:{span.id}" if outer else f"{name}:{span.id}"
            who = span.metadata.get("lc_agent_name") or outer.get("agent")
            known = _typed(span) if told else {**span.metadata, "langgraph_step": step, "langgraph_path": (), "langgraph_triggers": ()}
            self.nodes[span.id] = {
                **known, "langgraph_checkpoint_ns": space, "langgraph_node": name, **({"agent": who} if who else {})
            }  # fmt: skip

    def _around_calls(self, spans: list[Span]) -> list[Span]:
        around: set[str] = set()
        for span in spans:
            if span.kind != "chain":
                above = span.parent
                while above is not None and above.id not in around:
                    around.add(above.id)
                    above = above.parent
        return [s for s in spans if s.kind == "chain" and s is not self.root and s.id in around]

    # -- events

    def _put(self, at: float, span: Span, what: Any) -> None:
        parent = None if span.parent is None else span.parent.id
        # Ids are only ever compared and written out: those of other sources than LangChain are no UUIDs.
        self.recording.take(Event(self.seq, at, cast("Any", None), cast("Any", span.id), cast("Any", parent), what))
        self.seq += 1

    def _start(self, span: Span, at: float) -> None:
        if span.kind == "llm":
            self._put(at, span, self._llm_start(span))
        elif span.kind == "tool":
            answered = fields_of(span.outputs)
            id = span.tool_call_id or (None if answered is None else answered[0].get("tool_call_id"))
            if id is None:
                self.lost["tool call id"] += 1
            self._put(at, span, ToolStart(span.name, _tool_inputs(span.inputs), None if id is None else str(id), dict(span.metadata)))
        else:
            metadata = self.nodes.get(span.id)
            node = metadata is not None
            shown = node or span.parent is None
            tags = [str(t) for t in span.tags]
            value = self.reader.value(span.inputs) if shown else None
            sent = None
            if metadata is not None:
                path: tuple[Any, ...] = metadata.get("langgraph_path") or ()
                if len(path) > 1 and path[0] == "__pregel_push":
                    sent = self.reader.sent(str(metadata.get("langgraph_node") or span.name), span.inputs, path[1])
                if metadata.get("langgraph_node") == "__start__":
                    tags.append("langsmith:hidden")
            about = dict(metadata if metadata is not None else span.metadata)
            self._put(at, span, ChainStart(span.name, tags, about, value, sent, node))

    def _llm_start(self, span: Span) -> LlmStart:
        params, metadata = span.params, span.metadata
        model = params.get("model") or params.get("model_name") or metadata.get("ls_model_name") or ""
        n = params.get("n")
        prompt = self.reader.prompt(span.inputs)
        if not prompt:
            self.lost["prompt"] += 1
        if not model:
            self.lost["model"] += 1
        return LlmStart(dict(metadata), str(model), n if isinstance(n, int) and n > 0 else 1, prompt)

    def _end(self, span: Span, at: float) -> None:
        if span.error is not None:
            self._put(at, span, self._failed(span))
        elif span.kind == "llm":
            made = self._generations(span)
            self._put(at, span, LlmEnd(made))
        elif span.kind == "tool":
            self._put(at, span, ToolEnd(self.reader.value(span.outputs)))
        elif span.id in self.nodes:
            self._put(at, span, ChainEnd(self.reader.value(span.outputs)))
        elif span.parent is None:
            if self.interrupted:
                self._put(at, span, Interrupted())
            self._put(at, span, ChainEnd(None))
        else:
            routes = span.parent.id in self.nodes and span.outputs is not None
            self._put(at, span, ChainEnd(self.reader.route(span.outputs) if routes else None))

    def _generations(self, span: Span) -> list[Generation]:
        out = []
        for said in span.said:
            message = self.reader.message(said.fields, "assistant") if said.fields is not None else None
            if message is not None and message.id is None:
                self.lost["message id"] += 1
            if said.response_id is None and (message is None or message.id is None or message.id.startswith(("lc_run-", "run-"))):
                self.lost["response id (tokens can't be found by it)"] += 1
            if said.finish_reason is None:
                self.lost["finish reason"] += 1
            out.append(Generation(message, said.text, said.response_id, said.model or "", said.finish_reason))
        if not out:
            self.lost["output"] += 1
        return out or [Generation(None, "", None, "", None)]

    def _failed(self, span: Span) -> Failed:
        error = failures.exception_of(span.error or "")
        name = type(error).__name__
        if name in _INTERRUPTS:
            self.interrupted = True
        if name != "ParentCommand":
            return Failed(error)
        answers, goto = failures.handoff(span.error or "")
        self.lost["handoff update (only its tool messages are kept)"] += 1
        said: list[Message] = [
            self.reader.message({"content": text, "tool_call_id": id, "status": "success"}, "tool") for id, text in answers
        ]
        return Failed(error, CommandSnap({"messages": said} if said else None, list(goto), False))

    @staticmethod
    def _with_tracebacks(trace: EpisodeTrace, spans: list[Span]) -> EpisodeTrace:
        """A failed tool's traceback is in its error's text; the recorder could only write one of the exception made here."""
        failed = {s.id: s for s in spans if s.kind == "tool" and s.error is not None}
        if not failed:
            return trace

        def mended(execution: Execution) -> Execution:
            span = failed.get(execution.id)
            if span is None or execution.error is None:
                return execution
            return replace(execution, error=replace(execution.error, traceback=failures.split(span.error or "")[2]))

        actions = tuple(replace(a, executions=tuple(map(mended, a.executions))) if a.executions else a for a in trace.actions)
        return replace(trace, actions=actions)


def _says_node(span: Span) -> bool:
    """Whether a span's own metadata, and not one that it inherited, says that it is a node attempt."""
    own = span.metadata
    if own.get("langgraph_node") != span.name or own.get("langgraph_step") is None:
        return False
    outer: Mapping[str, Any] = {} if span.parent is None else span.parent.metadata
    return (outer.get("langgraph_node"), outer.get("langgraph_step")) != (own["langgraph_node"], own["langgraph_step"])


def _typed(span: Span) -> Mapping[str, Any]:
    """LangGraph's metadata with the types that it has in a live run."""
    metadata = dict(span.metadata)
    path = metadata.get("langgraph_path")
    metadata["langgraph_path"] = _tuples(path) if isinstance(path, list | tuple) else ()
    triggers = metadata.get("langgraph_triggers")
    metadata["langgraph_triggers"] = tuple(map(str, triggers)) if isinstance(triggers, list | tuple) else ()
    step = metadata.get("langgraph_step")
    try:
        metadata["langgraph_step"] = int(step) if step is not None else 0
    except (TypeError, ValueError, OverflowError):
        metadata["langgraph_step"] = 0
    return metadata


def _tuples(value: Any) -> Any:
    return tuple([_tuples(v) if v.__class__ is list else v for v in value])


def _tool_inputs(inputs: Any) -> Any:
    """A tool's arguments as a dict, also where the source wrote them as the text of one."""
    if isinstance(inputs, dict) and inputs.keys() == {"input"} and isinstance(inputs["input"], str) and inputs["input"][:1] == "{":
        import ast

        try:
            read = ast.literal_eval(inputs["input"][:100_000])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return inputs["input"]
        return read if isinstance(read, dict) else inputs["input"]
    return inputs
