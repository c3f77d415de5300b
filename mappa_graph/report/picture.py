"""The graph's picture: a small layered layout, and SVG in which a node's colour is its mean coach score.

Layout, in four steps: edges that close a cycle are set aside (depth first from the start); each node's layer is its longest path from
a source; nodes of a layer are ordered by the mean position of their neighbours, edges over several layers passing through unseen
way points; then layers become columns. Edges set aside run back below the nodes; an edge from a node to itself is a loop above it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..inspect import light, score_rgb
from .flow import END, START, Flow, GraphShape
from .svg import esc

NODE_WIDTH, NODE_HEIGHT = 142, 62
_GAP_X, _GAP_Y, _MARGIN = 48, 30, 14
_DOT = 30

Edge = tuple[str, str]


@dataclass(frozen=True)
class Layout:
    """Centres of nodes, and the way points of edges, in pixels."""

    at: Mapping[str, tuple[float, float]]
    via: Mapping[Edge, Sequence[tuple[float, float]]]
    back: frozenset[Edge]
    width: float
    height: float
    floor: float
    """Below all nodes: where edges that run back pass."""
    top: frozenset[str]
    """Nodes that are the highest of a column with more than one: edges that run back from them pass above."""


def layout(shape: GraphShape) -> Layout:
    """Places every node; any directed graph will do, with cycles, several sources, or parts that nothing connects."""
    edges = list(dict.fromkeys((a, b) for a, b, _ in shape.edges if a != b))
    back = _back_edges(shape.nodes, edges)
    forward = [e for e in edges if e not in back]
    layer = _layers(shape.nodes, forward)
    columns: list[list[str]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for node in shape.nodes:
        columns[layer[node]].append(node)
    chains: dict[Edge, list[str]] = {}
    links: list[Edge] = []
    for source, target in forward:
        way = [f"\0{source}\0{target}\0{k}" for k in range(layer[source] + 1, layer[target])]
        for k, point in enumerate(way, layer[source] + 1):
            columns[k].append(point)
        chains[source, target] = way
        steps = [source, *way, target]
        links += itertools.pairwise(steps)
    _order(columns, links)
    return _place(columns, chains, back)


def draw(shape: GraphShape, flow: Flow, scores: Mapping[str, float], css_of_agent: Mapping[str, str], *, label: str, key: str) -> str:
    """The picture as SVG. `scores`: mean score by node, a node without one is hatched; `flow` gives edges their weight.

    `key` must be unique in the page: it names this picture's arrow heads.
    """
    plan = layout(shape)
    loops = [a for a, b, _ in shape.edges if a == b]
    above = [e for e in plan.back if e[0] in plan.top]
    lift = max(34 if loops else 0, 30 if above else 0)
    height = plan.height + lift + (38 if len(above) < len(plan.back) else 0)
    out = [
        f'<svg class="graph" viewBox="0 0 {plan.width:.0f} {height:.0f}" width="{plan.width:.0f}" role="img" aria-label="{esc(label)}">',
        f'<defs><marker id="arrow-{key}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="11" markerHeight="11"'
        ' markerUnits="userSpaceOnUse" orient="auto"><path class="arrow" d="M0 1L9.5 5L0 9Z"/></marker></defs>',
        f'<g transform="translate(0 {lift})">',
    ]
    back_rank = {e: k for k, e in enumerate(sorted(plan.back))}
    for source, target, conditional in shape.edges:
        out.append(_edge(plan, source, target, conditional, flow, key, back_rank))
    for node in shape.nodes:
        out.append(_node(plan, node, shape, flow, scores, css_of_agent))
    return "".join([*out, "</g></svg>"])


def _back_edges(nodes: Sequence[str], edges: Sequence[Edge]) -> frozenset[Edge]:
    following: dict[str, list[str]] = {}
    for source, target in edges:
        following.setdefault(source, []).append(target)
    state: dict[str, int] = {}
    back: set[Edge] = set()
    for root in sorted(nodes, key=lambda n: n != START):
        if root in state:
            continue
        state[root] = 1
        stack = [(root, iter(following.get(root, ())))]
        while stack:
            node, rest = stack[-1]
            target = next(rest, "")
            if not target:
                state[node] = 2
                stack.pop()
            elif state.get(target) == 1:
                back.add((node, target))
            elif target not in state:
                state[target] = 1
                stack.append((target, iter(following.get(target, ()))))
    return frozenset(back)


def _layers(nodes: Sequence[str], forward: Sequence[Edge]) -> dict[str, int]:
    layer = dict.fromkeys(nodes, 0)
    for _ in nodes:
        moved = False
        for source, target in forward:
            if layer[target] < layer[source] + 1:
                layer[target] = layer[source] + 1
                moved = True
        if not moved:
            break
    if END in layer:
        layer[END] = max(max(layer.values()), 1)
    return layer


def _order(columns: list[list[str]], links: Sequence[Edge]) -> None:
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for source, target in links:
        before.setdefault(target, []).append(source)
        after.setdefault(source, []).append(target)
    for sweep in range(6):
        down = sweep % 2 == 0
        neighbours = before if down else after
        for column in columns if down else columns[::-1]:
            place = {node: k / max(len(c) - 1, 1) if len(c) > 1 else 0.5 for c in columns for k, node in enumerate(c)}
            middle = {
                node: sum(place[m] for m in neighbours[node]) / len(neighbours[node]) if neighbours.get(node) else place[node]
                for node in column
            }
            column.sort(key=middle.__getitem__)


def _place(columns: Sequence[Sequence[str]], chains: Mapping[Edge, Sequence[str]], back: frozenset[Edge]) -> Layout:
    tallest = max((sum(_tall(n) + _GAP_Y for n in c) - _GAP_Y for c in columns), default=0.0)
    at: dict[str, tuple[float, float]] = {}
    x = float(_MARGIN)
    for column in columns:
        wide = max((_wide(n) for n in column), default=0)
        y = _MARGIN + (tallest - sum(_tall(n) + _GAP_Y for n in column) + _GAP_Y) / 2
        for node in column:
            at[node] = (x + wide / 2, y + _tall(node) / 2)
            y += _tall(node) + _GAP_Y
        x += wide + _GAP_X
    via = {edge: [at[p] for p in way] for edge, way in chains.items()}
    nodes = {n: p for n, p in at.items() if not n.startswith("\0")}
    top = frozenset(c[0] for c in columns if len(c) > 1)
    return Layout(nodes, via, back, x - _GAP_X + _MARGIN, tallest + 2 * _MARGIN, tallest + _MARGIN, top)


def _wide(node: str) -> int:
    return 0 if node.startswith("\0") else _DOT if node in (START, END) else NODE_WIDTH


def _tall(node: str) -> int:
    return 16 if node.startswith("\0") else _DOT if node in (START, END) else NODE_HEIGHT


def _edge(plan: Layout, source: str, target: str, conditional: bool, flow: Flow, key: str, back_rank: Mapping[Edge, int]) -> str:
    if source not in plan.at or target not in plan.at:
        return ""
    count = flow.taken.get((source, target), 0)
    per = count / flow.episodes if flow.episodes else None
    (ax, ay), (bx, by) = plan.at[source], plan.at[target]
    a, b = _wide(source) / 2, _wide(target) / 2
    if source == target:
        top = ay - _tall(source) / 2
        path = f"M{ax - 22:.1f} {top:.1f}C{ax - 34:.1f} {top - 42:.1f} {ax + 34:.1f} {top - 42:.1f} {ax + 22:.1f} {top - 3:.1f}"
        label = (ax + 34, top - 22)
    elif (source, target) in plan.back:
        side = -1 if source in plan.top else 1
        level = (plan.floor + 34 if side > 0 else _MARGIN - 26) + side * 8 * back_rank[source, target]
        path = (
            f"M{ax:.1f} {ay + side * _tall(source) / 2:.1f}C{ax:.1f} {level:.1f} {ax:.1f} {level:.1f} {(ax + bx) / 2:.1f} {level:.1f}"
            f"S{bx:.1f} {level:.1f} {bx:.1f} {by + side * (_tall(target) / 2 + 3):.1f}"
        )
        label = ((ax + bx) / 2, level - 4)
    else:
        points = [(ax + a, ay), *plan.via.get((source, target), ()), (bx - b - 3, by)]
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for (px, py), (qx, qy) in itertools.pairwise(points):
            half = (px + qx) / 2
            path += f"C{half:.1f} {py:.1f} {half:.1f} {qy:.1f} {qx:.1f} {qy:.1f}"
        (px, py), (qx, qy) = points[len(points) // 2 - 1 : len(points) // 2 + 1]
        label = ((px + qx) / 2, (py + qy) / 2 - 6)
    thick = 1.4 if per is None else 1.0 + min(per, 2.0) * 1.6
    css = "edge" + (" maybe" if conditional else "") + (" unused" if per == 0 else "")
    hint = f"{_name(source)} to {_name(target)}" + (", conditional" if conditional else "")
    hint += "" if per is None else f"\ntaken {per:.2f} times an episode"
    text = "" if per is None or not conditional else f'<text class="count mid" x="{label[0]:.1f}" y="{label[1]:.1f}">{per:.2f}</text>'
    return (
        f'<g><title>{esc(hint)}</title><path class="{css}" d="{path}" stroke-width="{thick:.2f}" marker-end="url(#arrow-{key})"/>{text}</g>'
    )


def _node(plan: Layout, node: str, shape: GraphShape, flow: Flow, scores: Mapping[str, float], css_of_agent: Mapping[str, str]) -> str:
    x, y = plan.at[node]
    if node in (START, END):
        css = "terminal" if node == START else "terminal end"
        return f'<g><title>{_name(node)}</title><circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="9"/></g>'
    agent = shape.agent_of_node.get(node, "")
    score = scores.get(node)
    left, top = x - NODE_WIDTH / 2, y - NODE_HEIGHT / 2
    hint = [node] + ([f"agent {agent}"] if agent else ["no agent acts here"])
    hint += [f"mean score {score:.2f}" + (f" of {flow.scored[node]} actions" if node in flow.scored else "")] if score is not None else []
    hint += [f"visited {flow.visits.get(node, 0) / flow.episodes:.2f} times an episode"] if flow.episodes else []
    if score is None:
        box, ink = f'<rect class="node blank" x="{left:.1f}" y="{top:.1f}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="10"/>', "plain"
    else:
        red, green, blue = score_rgb(score)
        ink = "on-light" if light(red, green, blue) else "on-dark"
        box = (
            f'<rect class="node" x="{left:.1f}" y="{top:.1f}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="10" '
            f'fill="rgb({red},{green},{blue})"/>'
        )
    mark = f'<circle class="{css_of_agent[agent]} tag" cx="{left + 15:.1f}" cy="{top + 18:.1f}" r="5"/>' if agent in css_of_agent else ""
    under = "no agent" if not agent else "not scored" if score is None else f"{score:.1f}"
    size = "score" if score is not None else "quiet"
    return (
        f"<g><title>{esc(chr(10).join(hint))}</title>{box}{mark}"
        f'<text class="title {ink}" x="{left + (27 if mark else 14):.1f}" y="{top + 22:.1f}">{esc(_fit(node, 15))}</text>'
        f'<text class="{size} {ink}" x="{left + 14:.1f}" y="{top + 48:.1f}">{under}</text></g>'
    )


def _name(node: str) -> str:
    return {START: "start", END: "end"}.get(node, node)


def _fit(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
