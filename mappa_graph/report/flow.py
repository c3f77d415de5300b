"""The graph's shape, and what passed through it: mean coach score of each node, and how often each edge was taken.

The shape comes from the run's summary; for a run still in progress, or traces that came from elsewhere, it is read off the
transitions themselves (each names the transitions that led to it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..record import EpisodeTrace, Transition

START, END = "__start__", "__end__"


@dataclass(frozen=True)
class GraphShape:
    """Nodes in order, edges as `(from, to, conditional)`, and which agent acts in a node."""

    nodes: tuple[str, ...] = ()
    edges: tuple[tuple[str, str, bool], ...] = ()
    agent_of_node: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes)


@dataclass(frozen=True)
class Flow:
    """What a set of episodes did in the graph. Scores are 0..10; keys of `scores` and `visits` are node names and paths."""

    episodes: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)
    """Mean score of the scored actions of a node; a node without any is absent."""
    scored: Mapping[str, int] = field(default_factory=dict)
    visits: Mapping[str, int] = field(default_factory=dict)
    taken: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How often an edge was followed."""


def shape_from_summary(summary: Mapping[str, Any]) -> GraphShape:
    """The shape that a run wrote down; an empty one where it did not, or where what it wrote is no graph."""
    graph = summary.get("graph")
    if not isinstance(graph, Mapping) or not isinstance(graph.get("nodes"), list):
        return GraphShape()
    nodes = dict.fromkeys(str(n) for n in graph["nodes"])
    edges: dict[tuple[str, str], bool] = {}
    for edge in graph.get("edges") or ():
        if isinstance(edge, list | tuple) and len(edge) >= 2:
            source, target = str(edge[0]), str(edge[1])
            nodes.setdefault(source)
            nodes.setdefault(target)
            edges[source, target] = bool(edge[2]) if len(edge) > 2 else False
    owners = graph.get("agent_of_node")
    named = {str(k): str(v) for k, v in owners.items() if v} if isinstance(owners, Mapping) else {}
    return GraphShape(tuple(nodes), tuple((a, b, c) for (a, b), c in edges.items()), named)


def shape_from_traces(traces: Sequence[EpisodeTrace]) -> GraphShape:
    """The shape that the transitions of some episodes show; an edge that only part of the visits took is conditional."""
    flow = flow_of(traces)
    nodes: dict[str, None] = {}
    owners: dict[str, str] = {}
    for trace in traces:
        for transition in sorted(trace.transitions, key=lambda t: (t.step, t.started)):
            nodes.setdefault(_top(transition))
        at = {t.id: _top(t) for t in trace.transitions}
        for action in trace.actions:
            if action.transition_id in at:
                owners.setdefault(at[action.transition_id], action.agent)
    if not nodes:
        return GraphShape()
    leaving: Counter[str] = Counter()
    for (source, _), count in flow.taken.items():
        leaving[source] += count
    edges = tuple((a, b, count < leaving[a]) for (a, b), count in flow.taken.items())
    return GraphShape((START, *nodes, END), edges, owners)


def flow_of(traces: Sequence[EpisodeTrace]) -> Flow:
    """Scores, visits and edge counts of `traces`."""
    scores: dict[str, list[float]] = {}
    visits: Counter[str] = Counter()
    taken: Counter[tuple[str, str]] = Counter()
    for trace in traces:
        by_id = {t.id: t for t in trace.transitions}
        followed: set[str] = set()
        for transition in trace.transitions:
            for name in _names(transition):
                visits[name] += 1
            sources = {_top(by_id[p]) for p in transition.parents if p in by_id}
            followed.update(p for p in transition.parents if p in by_id)
            for source in sources or {START}:
                taken[source, _top(transition)] += 1
        for transition in trace.transitions:
            if transition.id not in followed:
                taken[_top(transition), END] += 1
        for action in trace.actions:
            verdict = trace.verdicts.get(action.id)
            if verdict is not None and verdict.score is not None and action.transition_id in by_id:
                for name in _names(by_id[action.transition_id]):
                    scores.setdefault(name, []).append(verdict.score)
    return Flow(
        episodes=len(traces),
        scores={name: sum(values) / len(values) for name, values in scores.items()},
        scored={name: len(values) for name, values in scores.items()},
        visits=visits,
        taken=taken,
    )


def _top(transition: Transition) -> str:
    """The node of the root graph that a transition lies in."""
    return (transition.path or transition.node).split("/")[0]


def _names(transition: Transition) -> set[str]:
    """Every name that a drawn graph may use for the node: its own, its path ("planner/model", "planner:model"), its root node's."""
    path = transition.path or transition.node
    return {transition.node, path, path.replace("/", ":"), path.split("/")[0]}
