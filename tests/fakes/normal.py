"""An episode without what differs from source to source: ids, times, and the texts of states."""

from __future__ import annotations

import json
from typing import Any

from mappa_graph.record import EpisodeTrace


def normal(trace: EpisodeTrace) -> dict[str, Any]:
    """Nodes, actions, executions and edges by name, kind, owner and order.

    Nodes that ran side by side start in no certain order, so all lists are by content, and positions are those of the sorted list.
    """
    path = {t.id: t.path for t in trace.transitions}
    nodes = {t.id: (t.step, t.path, t.attempt, t.status) for t in trace.transitions}
    acts = {i: _action(trace, i, path) for i in range(len(trace.actions))}
    return {
        "nodes": sorted((node, sorted(nodes[p] for p in t.parents)) for t, node in ((t, nodes[t.id]) for t in trace.transitions)),
        "actions": sorted(acts.values(), key=repr),
        "edges": sorted((acts[a][:4], acts[b][:4]) for a, b in trace.edges),
        "status": trace.episode.status,
    }


def _action(trace: EpisodeTrace, position: int, path: dict[str, str]) -> tuple[Any, ...]:
    action = trace.actions[position]
    said = [(m["role"], json.dumps(m.get("content"), sort_keys=True)) for m in action.messages]
    ran = sorted(
        (e.name, e.status, e.code, e.stdout, e.stderr, e.result, e.tool_call_id, e.error and (e.error.type, e.error.message))
        for e in action.executions
    )
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in action.tool_calls]
    return (
        action.agent, path[action.transition_id], action.output, said, calls, ran, action.policy, action.call_id, action.call_index,
        action.finish_reason, action.kept, action.trainable, action.error,
    )  # fmt: skip
