"""The edges of a compiled graph, where the callback was given it: no event tells of a static edge, or what a router's label means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """One graph: static sources by node, and node by router label."""

    sources: Mapping[str, frozenset[str]] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def leads(self, node: str, goto: Iterable[str], target: str) -> bool:
        """Whether `node`, whose command or router named `goto`, leads to `target`."""
        labels = self.labels.get(node, {})
        return node in self.sources.get(target, ()) or any(labels.get(g, g) == target for g in goto)


class Structure:
    """Shapes by the path of the node that the graph runs in, "" for the root graph."""

    def __init__(self, graph: Any | None) -> None:
        self.shapes: dict[str, Shape] = {}
        if graph is None:
            return
        if getattr(graph, "builder", None) is None:
            raise ConfigError(
                f"graph={type(graph).__name__} has no edges to read",
                hint="give the compiled StateGraph; leave graph= out for the functional API and remote graphs",
            )
        self.shapes[""] = _shape(graph.builder)
        for name, nested in graph.get_subgraphs(recurse=True):
            builder = getattr(nested, "builder", None)
            if builder is not None:
                self.shapes[name.replace("|", "/")] = _shape(builder)

    def shape(self, path: str) -> Shape | None:
        return self.shapes.get(path)


def _shape(builder: Any) -> Shape:
    sources: dict[str, set[str]] = {}
    for source, target in builder.edges:
        sources.setdefault(target, set()).add(source)
    labels: dict[str, dict[str, str]] = {}
    for source, branches in builder.branches.items():
        for branch in branches.values():
            if isinstance(branch.ends, Mapping):
                labels.setdefault(source, {}).update({str(k): v for k, v in branch.ends.items()})
    return Shape({k: frozenset(v) for k, v in sources.items()}, labels)
