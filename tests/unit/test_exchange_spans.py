"""Broken traces are mended and counted, errors and sends are read back from their texts, and times come in all units."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from mappa_graph.capture.structure import Structure
from mappa_graph.capture.team import Team
from mappa_graph.exchange import failures
from mappa_graph.exchange.generations import generations
from mappa_graph.exchange.messages import Reader
from mappa_graph.exchange.replay import replay
from mappa_graph.exchange.spans import ImportProblem, Notes, moments, seconds, tree, walk
from mappa_graph.record import EpisodeTrace

TRACE = "Traceback (most recent call last):"


def span(id: str, parent: str | None = None, start: Any = 1.0, end: Any = 2.0, kind: str = "chain", **more: Any) -> dict[str, Any]:
    return {"id": id, "trace_id": "t", "parent_id": parent, "name": id, "kind": kind, "start": start, "end": end, **more}


def rooted(spans: list[dict[str, Any]], strict: bool = False) -> tuple[Any, Counter[str]]:
    notes = Notes(strict)
    root = tree(spans, notes)
    return root, notes.counts


def record(spans: list[dict[str, Any]]) -> EpisodeTrace:
    root, _ = rooted(spans)
    return replay(root, Team(None, ()), Structure(None), lambda id, index: False, Counter())


def shape(root: Any) -> dict[str, Any]:
    return {s.id: None if s.parent is None else s.parent.id for s in walk(root)}


def test_a_trace_in_any_order_is_the_same_tree() -> None:
    spans = [span("r", None, 1, 9), span("a", "r", 2, 4), span("b", "r", 5, 8), span("c", "b", 6, 7, "llm", outputs="hi")]
    for order in itertools.permutations(spans):
        root, problems = rooted(list(order))
        assert [s.id for s in walk(root)] == ["r", "a", "b", "c"] and not problems
        assert [(round(at), end, s.id) for at, end, s in moments(root)] == [
            (1, False, "r"), (2, False, "a"), (4, True, "a"), (5, False, "b"),
            (6, False, "c"), (7, True, "c"), (8, True, "b"), (9, True, "r"),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "want", "problems"),
    [
        ([span("r"), span("a", "gone")], {"r": None, "a": "r"}, {"span whose parent is missing": 1}),
        (
            [span("a", "gone"), span("b", "gone", 2, 3)],
            {"t": None, "a": "t", "b": "t"},
            {"span whose parent is missing": 2, "trace without one root": 1},
        ),
        ([span("a", "b"), span("b", "a", 2, 3)], {"a": None, "b": "a"}, {"cycle of parents": 1}),
        (
            [span("r"), span("a", "c"), span("b", "a", 2, 3), span("c", "b", 3, 4)],
            {"r": None, "a": "r", "b": "a", "c": "b"},
            {"cycle of parents": 1},
        ),
        ([span("a", "a")], {"a": None}, {}),
        ([span("r"), span("r"), span("a", "r")], {"r": None, "a": "r"}, {"span that came twice": 1}),
        ([span("r", end=0.5)], {"r": None}, {"span that ends before it starts": 1}),
        ([span("r", start=None)], {"r": None}, {"span without a start": 1}),
        (
            [span("r", None, 5, 9), span("a", "r", 1, 2)],
            {"r": None, "a": "r"},
            {"clock skew: a span starts before its parent": 1},
        ),
        ([span("r", kind="llm")], {"t": None, "r": "t"}, {}),
        ([span("r", kind="quantum")], {"r": None}, {"unknown kind": 1}),
        ([span("r"), {"name": "nobody"}], {"r": None}, {"span without an id": 1}),
    ],
)  # fmt: skip
def test_what_is_broken_is_mended_and_counted(spans: list[dict[str, Any]], want: dict[str, Any], problems: dict[str, int]) -> None:
    root, counts = rooted(spans)
    assert shape(root) == want and dict(counts) == problems
    assert {s.id for _, _, s in moments(root)} == set(want)
    if problems:
        with pytest.raises(ImportProblem):
            rooted(spans, strict=True)


def test_a_span_that_came_twice_is_taken_as_it_ended() -> None:
    root, _ = rooted([span("r", end=None), span("r", end=3.0)])
    assert root.end == 3.0
    assert rooted([])[0] is None


def test_random_trees_tell_of_each_start_and_end_once_parents_first() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 25)
        spans = [span("s0", None, rng.random(), rng.random() + 0.5)]
        for i in range(1, count):
            start = rng.choice((0.1, 0.2, rng.random()))
            end = rng.choice((start, start + rng.random(), None, start - 0.5))
            spans.append(span(f"s{i}", f"s{rng.randint(-1, count)}", start, end, rng.choice(("chain", "llm", "tool"))))
        rng.shuffle(spans)
        root, _ = rooted(spans)
        told = list(moments(root))
        starts = [s.id for _, end, s in told if not end]
        ends = [s.id for _, end, s in told if end]
        assert sorted(starts) == sorted(s.id for s in walk(root)) and len(set(ends)) == len(ends)
        assert set(ends) == {s.id for s in walk(root) if s.end is not None}
        place = {id: i for i, id in enumerate(starts)}
        assert all(s.parent is None or place[s.parent.id] < place[s.id] for s in walk(root))
        trace = record(spans)
        assert len(trace.actions) == sum(s.kind == "llm" for s in walk(root))
        assert all(a < b for a, b in trace.edges)


def test_a_very_deep_trace_is_read() -> None:
    spans = [span("s0", None, 1.0, 2.0), *(span(f"s{i}", f"s{i - 1}", 1.0, 2.0) for i in range(1, 5000))]
    spans.append(span("m", "s4999", 1.5, 1.6, "llm", outputs="hi"))
    root, problems = rooted(spans)
    assert len(list(moments(root))) == 2 * 5001 and not problems


def test_times_come_in_all_units() -> None:
    when = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
    want = when.timestamp()
    for value in (
        want,
        want * 1e3,
        want * 1e6,
        want * 1e9,
        str(int(want)),
        when,
        when.isoformat(),
        "2026-05-06T07:08:09Z",
        when.replace(tzinfo=None),
    ):
        assert seconds(value) == pytest.approx(want), value
    for value in (None, "", "soon", True, -1, float("nan"), float("inf"), [], {}):
        assert seconds(value) is None


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("ValueError('no luck')", "ValueError", "no luck"),
        (f"ValueError('no luck'){TRACE}\n\n\n  File 'x'\n    f()\n\n\nValueError: no luck\nat all", "ValueError", "no luck\nat all"),
        (
            f"1 error for add\na\n  bad {TRACE}\n  File 'x'\npydantic_core._pydantic_core.ValidationError: 1 error for add\na\n  bad",
            "ValidationError",
            "1 error for add\na\n  bad",
        ),
        (f"RuntimeError('x'){TRACE}\n  File 'x'\n\n\nRuntimeError: x\n\n\nDuring task with name 'solve' and id 'y'", "RuntimeError", "x"),
        ("KeyError: 'a'", "KeyError", "'a'"),
        ("openai.BadRequestError: too long: 12", "BadRequestError", "too long: 12"),
        ("TimeoutError()", "TimeoutError", ""),
        ("CancelledError", "CancelledError", ""),
        ("it broke: badly", "Error", "it broke: badly"),
        ("", "Error", ""),
    ],
)  # fmt: skip
def test_an_errors_text_is_its_type_and_message_again(text: str, name: str, message: str) -> None:
    error = failures.exception_of(text)
    assert (type(error).__name__, str(error)) == (name, message)
    assert failures.split(text)[2].startswith("Traceback") is ("Traceback" in text)


def test_interrupts_and_handoffs_are_langgraphs_own() -> None:
    from langgraph.errors import GraphInterrupt, ParentCommand

    assert isinstance(
        failures.exception_of("GraphInterrupt((Interrupt(value='?', id='1'),))Traceback (most recent call last):\n x"), GraphInterrupt
    )
    text = "ParentCommand(Command(graph='__parent__', update={'messages': [ToolMessage(content=\"it's\\'s\", tool_call_id='no'), "
    text += "ToolMessage(content='Done \\'now\\'', name='t', id='1', tool_call_id='c1')]}, goto='math'))"
    assert isinstance(failures.exception_of(text), ParentCommand)
    assert failures.handoff(text) == ([("c1", "Done 'now'")], ["math"])


def test_a_send_is_told_by_its_argument_and_else_by_its_place() -> None:
    reader = Reader()
    routed = reader.route(
        ["Send(node='w', arg={'words': ['0'], 'n': (1, 2)})", "Send(node='w', arg={'m': [HumanMessage(content='x')]})", "end"]
    )
    assert [getattr(r, "node", r) for r in routed] == ["w", "w", "end"]
    first, second = routed[0].arg, routed[1].arg
    assert reader.sent("w", {"words": ["other"]}, 0) is second  # the only one that can't be read
    assert reader.sent("w", {"words": ["0"], "n": [1, 2]}, 1) is first
    assert reader.sent("w", {"words": ["0"], "n": [1, 2]}, 1) is None
    assert reader.route({"a": 1}) is None and reader.route([1, 2]) is None
    hostile = "Send(node='w', arg=__import__('os').system('true'))"
    reader.route(hostile)
    assert not reader.sends[-1].read


def test_a_message_is_one_object_in_all_its_spellings() -> None:
    reader = Reader()
    whole = {"type": "ai", "content": "hi", "id": "m1", "tool_calls": [{"name": "f", "args": {"a": 1}, "id": "c"}], "response_metadata": {}}
    built = {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "AIMessage"], "kwargs": whole}
    openai = {
        "role": "assistant",
        "content": "hi",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    found = [reader.value(whole), reader.value({"x": {"type": "ai", "data": whole}})["x"], *reader.prompt({"messages": [[built, openai]]})]
    assert all(m is found[0] for m in found)
    assert found[0].openai() == {**openai, "role": "assistant"}
    assert reader.prompt({"messages": [["user", "go"]]})[0].openai() == {"role": "user", "content": "go"}
    assert [m.openai()["content"] for m in reader.prompt(["one", "two"])] == ["one", "two"]
    assert reader.value({"type": "tool", "content": "mine"}) == {"type": "tool", "content": "mine"}  # a state's own dict is no message


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ("text", ["text"]),
        ({"role": "assistant", "content": "a"}, ["a"]),
        ({"messages": [{"role": "assistant", "content": "a"}]}, ["a"]),
        ({"output": {"type": "ai", "content": "a", "id": "1"}}, ["a"]),
        ({"choices": [{"message": {"role": "assistant", "content": "a"}}, {"message": {"role": "assistant", "content": "b"}}]}, ["a", "b"]),
        ({"generations": [[{"text": "a"}, {"text": "b"}]]}, ["a", "b"]),
        ({"generations": [{"text": "a"}]}, ["a"]),
        (None, []),
        ({"odd": 1}, []),
        (17, []),
    ],
)
def test_what_a_model_said_in_all_its_spellings(outputs: Any, said: list[str]) -> None:
    assert [g.text for g in generations(outputs)] == said


def test_nodes_are_told_by_name_and_step_where_namespaces_are_missing_and_else_by_time() -> None:
    def node(name: str, step: int, start: float, end: float, parent: str = "r") -> dict[str, Any]:
        return span(name, parent, start, end, metadata={"langgraph_node": name, "langgraph_step": step})

    def call(id: str, parent: str, start: float, **metadata: Any) -> dict[str, Any]:
        return span(id, parent, start, start + 0.1, "llm", outputs=id, metadata=metadata)

    spans = [
        span("r", None, 0, 9), node("plan", 1, 1, 2), call("m1", "plan", 1.5), node("left", 2, 3, 5), node("right", 2, 3.5, 4),
        {**span("left", "left", 3.1, 4.9, metadata={"langgraph_node": "left", "langgraph_step": 2}), "id": "chain in left"},
        call("m2", "chain in left", 3.2), call("m3", "right", 3.6),
    ]  # fmt: skip
    bare = [{**s, "metadata": {}} for s in spans]
    for given, paths in ((spans, ["plan", "left", "right"]), (bare, ["plan", "left", "left/left", "right"])):
        trace = record(given)
        assert [t.path for t in trace.transitions] == paths
        assert [t.step for t in trace.transitions if "/" not in t.path] == [1, 2, 2]
        assert trace.edges == ((0, 1), (0, 2))
