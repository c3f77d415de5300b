"""A recorded episode in few words, and the check that every action found its own call."""

from __future__ import annotations

from typing import Any

from mappa_graph.record import EpisodeTrace

from .openai_server import OpenAIServer


def nodes(trace: EpisodeTrace) -> list[tuple[Any, ...]]:
    """`(path, step, attempt, status, parents)` of each transition, parents by position."""
    place = {t.id: i for i, t in enumerate(trace.transitions)}
    return [(t.path, t.step, t.attempt, t.status, [place[p] for p in t.parents]) for t in trace.transitions]


def actions(trace: EpisodeTrace) -> list[tuple[Any, ...]]:
    """`(agent, path, output, executions)` of each action, executions as `(tool, status, result or error type)`."""
    path = {t.id: t.path for t in trace.transitions}
    return [(a.agent, path[a.transition_id], a.output, executions(trace, i)) for i, a in enumerate(trace.actions)]


def executions(trace: EpisodeTrace, position: int) -> list[tuple[str, str, str | None]]:
    return [(e.name, e.status, e.result if e.error is None else e.error.type) for e in trace.actions[position].executions]


def check_joins(trace: EpisodeTrace, server: OpenAIServer) -> int:
    """Asserts that each action names the very call that made its text from its prompt; returns how many did."""
    for action in trace.actions:
        assert action.call_id is not None, f"action {action.output!r} of {action.agent} has no call"
        call = server.calls[action.call_id]
        said = call["said"][action.call_index]
        assert (said["content"] or "") == action.output
        assert [c["function"]["name"] for c in said.get("tool_calls") or []] == [c["function"]["name"] for c in action.tool_calls]
        seen = [(m["role"], _text(m.get("content"))) for m in call["body"]["messages"]]
        assert [(m["role"], m["content"] or "") for m in action.messages] == seen
    assert len({(a.call_id, a.call_index) for a in trace.actions}) == len(trace.actions)
    return len(trace.actions)


def _text(content: Any) -> Any:
    return "".join(block["text"] for block in content) if isinstance(content, list) else content or ""
