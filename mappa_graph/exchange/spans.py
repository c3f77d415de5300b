"""`Span`: one step of a trace, whoever recorded it; and the mending of traces that arrive broken.

A source's adapter yields plain dicts with the keys of `Span` (`id`, `trace_id`, `parent_id`, `name`, `kind`, `start`, `end`, `inputs`,
`outputs`, `error`, `metadata`, `tags`, `params`, `usage`, `tool_call_id`, `feedback`). `tree` makes a whole of them: one root, no
cycle, no span twice, no end before its start. What had to be mended is counted by name; nothing here raises on bad data unless
the caller asked for it.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..agent import _NAME
from ..errors import MappaError

KINDS = {
    "chain": "chain", "agent": "chain", "graph": "chain", "workflow": "chain", "task": "chain", "parser": "chain", "prompt": "chain",
    "llm": "llm", "chat_model": "llm", "chat": "llm", "completion": "llm", "text_completion": "llm", "generation": "llm",
    "tool": "tool", "function": "tool", "execute_tool": "tool", "retriever": "chain", "embedding": "chain", "reranker": "chain",
    "guardrail": "chain", "evaluator": "chain", "unknown": "chain", "span": "chain", "invoke_agent": "chain", "create_agent": "chain",
    "memory": "chain", "": "chain",
}  # fmt: skip
"""What each kind of span is to us. Whatever is neither a model nor a tool is a step that encloses them."""

_NAMED = ("mappa_agent", "mappa_policy", "lc_agent_name", "agent")
"""Metadata that names an agent or a policy."""
_BAD_IN_NAME = re.compile(r"[^A-Za-z0-9_.-]|\.(?=\.)|(?<=\.)\.")
_LONGEST_NAME = 100
_DIGITS = re.compile(r"-?\d+(\.\d+)?\Z")


class ImportProblem(MappaError):
    """A trace can't be read as it is; only raised where the import was asked to be strict."""

    kind = "import"


@dataclass(slots=True, eq=False)
class Span:
    """One step of a trace. Times are unix seconds."""

    id: str
    trace_id: str
    parent_id: str | None = None
    name: str = ""
    kind: str = "chain"
    """chain, llm or tool."""
    start: float = 0.0
    end: float | None = None
    """None: it has not ended, as far as the source knows."""
    inputs: Any = None
    outputs: Any = None
    error: str | None = None
    """As `Type: message` or `Type('message')`, with the traceback after it where there is one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    """What a model was asked with: model, n, temperature, tools."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    tool_call_id: str | None = None
    feedback: Sequence[Mapping[str, Any]] = ()
    """`{key, score, value, comment, source, id}`; `source` is human, model or code."""
    parent: Span | None = None
    children: list[Span] = field(default_factory=list)
    said: Any = None
    """What a model's outputs were read as, once they were."""
    place: int = 0
    """Its place among the spans as they came, which breaks ties of time."""


class Notes:
    """What was mended or left out, by name; with `strict`, the first of these ends the import."""

    def __init__(self, strict: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.strict = strict

    def add(self, what: str, where: str = "", hint: str | None = None) -> None:
        self.counts[what] += 1
        self.examples.setdefault(what, where)
        if self.strict:
            raise ImportProblem(f"{what}: {where}" if where else what, hint=hint or "import without --strict to count and go on")

    def mended(self, what: str, where: str) -> None:
        """Counts what no import stops for, strict or not, since nothing of the trace was lost."""
        self.counts[what] += 1
        self.examples.setdefault(what, where)


def seconds(value: Any) -> float | None:
    """A time as unix seconds: a number (seconds, or milli-, micro-, nanoseconds by its size), an ISO text, a datetime; else None."""
    if value.__class__ is str:
        if value[4:5] != "-" and _DIGITS.match(value):
            value = float(value)
        else:
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                return None
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    if not math.isfinite(value) or value < 0:
        return None
    for limit, unit in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if value > limit:
            return float(value / unit)
    return float(value)


def name_of(value: Any) -> str:
    """An id or name as text that can be written anywhere: lone surrogates, which UTF-8 can't hold, are spelled out."""
    text = value if value.__class__ is str else str(value)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and ".." not in name and len(name) <= _LONGEST_NAME


def safe_name(value: Any, notes: Notes) -> str:
    """The name of an agent or policy from data, by the rule of `Agent`: it may become a folder's. What was mended is counted."""
    name = name_of(value)
    if _is_name(name):
        return name
    made = _BAD_IN_NAME.sub("_", name)[:_LONGEST_NAME]
    if not made[:1].isalnum():
        made = f"x{made}"[:_LONGEST_NAME] if made.strip("._-") else "unnamed"
    notes.mended("name of an agent or policy that can't be one (mended)", f"{name[:80]!r} is now {made!r}")
    return made


def _metadata(value: Any, notes: Notes) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        return {}
    bad = {k: safe_name(value[k], notes) for k in _NAMED if isinstance(value.get(k), str) and value[k] and not _is_name(value[k])}
    return {**value, **bad} if bad else value


def span_of(data: Mapping[str, Any], notes: Notes, place: int = 0) -> Span | None:
    """A span from an adapter's dict; None, and counted, for what can't be one."""
    id, trace = data.get("id"), data.get("trace_id")
    if not id or not trace:
        notes.add("span without an id", str(data.get("name"))[:80])
        return None
    kind = str(data.get("kind") or "").lower()
    known = KINDS.get(kind)
    if known is None:
        notes.add("unknown kind", f"{kind[:40]!r} of span {id}, taken as a chain")
        known = "chain"
    start, end = seconds(data.get("start")), seconds(data.get("end"))
    if start is None:
        notes.add("span without a start", str(id))
        start = end or 0.0
    if end is not None and end < start:
        notes.add("span that ends before it starts", str(id))
        end = start
    metadata, params, usage = data.get("metadata"), data.get("params"), data.get("usage")
    tags, error = data.get("tags"), data.get("error")
    return Span(
        id=name_of(id), trace_id=name_of(trace), parent_id=None if data.get("parent_id") is None else name_of(data["parent_id"]),
        name=name_of(data.get("name") or known), kind=known, start=start, end=end, inputs=data.get("inputs"), outputs=data.get("outputs"),
        error=None if error is None or error == "" else str(error), metadata=_metadata(metadata, notes),
        tags=tags if isinstance(tags, list | tuple) else (), params=params if isinstance(params, dict) else {},
        usage=usage if isinstance(usage, dict) else {},
        tool_call_id=None if data.get("tool_call_id") is None else name_of(data["tool_call_id"]),
        feedback=data.get("feedback") or (), place=place,
    )  # fmt: skip


def tree(spans: Iterable[Mapping[str, Any]], notes: Notes) -> Span | None:
    """The root of a trace's spans, its descendants linked and in order of start; None where no span is left.

    Where the source has no root, or several, an enclosing one is made up: its id is the trace's.
    """
    by_id: dict[str, Span] = {}
    for place, data in enumerate(spans):
        made = span_of(data, notes, place)
        if made is None:
            continue
        other = by_id.get(made.id)
        if other is not None:
            notes.add("span that came twice", made.id)
            if other.end is not None or made.end is None:
                continue
        by_id[made.id] = made
    if not by_id:
        return None
    roots: list[Span] = []
    for span in by_id.values():
        parent = by_id.get(span.parent_id) if span.parent_id is not None else None
        if span.parent_id is not None and parent is None:
            notes.add("span whose parent is missing", f"{span.name} ({span.id})")
        span.parent = parent if parent is not span else None
    for span in by_id.values():
        if span.parent is None:
            roots.append(span)
        else:
            span.parent.children.append(span)
    reached = _reached(roots)
    while len(reached) < len(by_id):
        # What no root reaches hangs on a cycle; it is cut before the span that started first.
        cut = min((s for s in by_id.values() if s.id not in reached), key=lambda s: (s.start, s.place))
        notes.add("cycle of parents", f"cut at {cut.name} ({cut.id})")
        assert cut.parent is not None
        cut.parent.children.remove(cut)
        cut.parent = None
        roots.append(cut)
        reached |= _reached([cut])
    root = roots[0]
    if len(roots) > 1 or root.kind != "chain":
        root = _enclosing(roots, notes)
    for span in by_id.values():
        if len(span.children) > 1:
            span.children.sort(key=lambda s: (s.start, s.place))
        if span.parent is not None and span.start < span.parent.start - 1e-3:
            notes.add("clock skew: a span starts before its parent", span.id)
    return root


def _reached(roots: Sequence[Span]) -> set[str]:
    out: set[str] = set()
    stack = list(roots)
    while stack:
        span = stack.pop()
        if span.id not in out:
            out.add(span.id)
            stack.extend(span.children)
    return out


def _enclosing(roots: list[Span], notes: Notes) -> Span:
    """A root over several: the one true root where there is one and the others only lost their parents, else a made-up one."""
    true = [r for r in roots if r.parent_id is None and r.kind == "chain"]
    first = min(roots, key=lambda s: (s.start, s.place))
    if len(true) == 1:
        root = true[0]
    else:
        if len(roots) > 1:
            notes.add("trace without one root", first.trace_id)
        ends = [r.end for r in roots]
        error = first.error if len(roots) == 1 else None
        end = None if any(e is None for e in ends) else max(e for e in ends if e is not None)
        root = Span(first.trace_id, first.trace_id, None, first.name, "chain", first.start, end, first.inputs, roots[-1].outputs, error)
        root.metadata = {k: v for k, v in first.metadata.items() if k in ("thread_id", "session_id")}
    for span in roots:
        if span is not root:
            span.parent = root
            root.children.append(span)
    root.children.sort(key=lambda s: (s.start, s.place))
    return root


def walk(root: Span) -> Iterator[Span]:
    """A span and all below it, parents first."""
    stack = [root]
    while stack:
        span = stack.pop()
        yield span
        stack.extend(reversed(span.children))


def moments(root: Span) -> Iterator[tuple[float, bool, Span]]:
    """`(time, is an end, span)` of all starts and ends, in an order in which a live run could have told of them.

    By time; where times are equal or clocks disagree, a start follows its parent's, and an end follows those of the children that
    ended no later. A span that never ended has no end.
    """
    waiting: dict[str, int] = {}
    heap: list[tuple[float, int, int, Span]] = [(root.start, 1, 0, root)]
    count = 0
    started: set[str] = set()
    while heap:
        at, starts, _, span = heapq.heappop(heap)
        if starts:
            yield at, False, span
            started.add(span.id)
            waiting[span.id] = 0
            for child in span.children:
                count += 1
                heapq.heappush(heap, (max(child.start, at), 1, count, child))
                if child.end is not None and span.end is not None and child.end <= span.end:
                    waiting[span.id] += 1
        else:
            yield at, True, span
        ended = None if starts else span
        parent = span.parent
        if ended is not None and parent is not None and parent.end is not None and ended.end is not None and ended.end <= parent.end:
            waiting[parent.id] -= 1
            if not waiting[parent.id]:
                count += 1
                heapq.heappush(heap, (max(parent.end, at), 0, count, parent))
        if starts and span.end is not None and not waiting[span.id]:
            count += 1
            heapq.heappush(heap, (max(span.end, at), 0, count, span))
