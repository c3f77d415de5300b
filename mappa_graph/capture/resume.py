"""Goes on with an interrupted episode from its record, in a process that saw nothing of its first half."""

from __future__ import annotations

from ..record import Action, EpisodeTrace, Transition
from .actions import CallTaken
from .model import OPEN, Acted, Attempt, Graph, Llm
from .recording import Recording
from .structure import Structure
from .team import Team


def revived(trace: EpisodeTrace, team: Team, structure: Structure, taken: CallTaken) -> Recording:
    """A recording that continues `trace`: new attempts of its unfinished tasks, and tools that answer its calls, join on."""
    recording = Recording(trace.episode.id, team, structure, taken)
    recording.episode = trace.episode
    recording.begun = False
    recording.verdicts = dict(trace.verdicts)
    attempts = _attempts(recording, trace.transitions)
    for position, action in enumerate(trace.actions):
        _act(recording, attempts, action, position)
        if action.call_id is not None:
            taken(action.call_id, action.call_index)
    return recording


def _attempts(recording: Recording, transitions: tuple[Transition, ...]) -> dict[str, Attempt]:
    """Attempts in their graphs. Which graph follows from the path, and from what was running when a transition began."""
    attempts: dict[str, Attempt] = {}
    # Positions before those of live events, in the order of the recorded times.
    moments = sorted({t.started for t in transitions} | {t.ended for t in transitions})
    place = {moment: i - 2 * len(moments) for i, moment in enumerate(moments)}
    for t in sorted(transitions, key=lambda t: (t.started, t.path.count("/"))):
        outer = t.path.rsplit("/", 1)[0] if "/" in t.path else ""
        around = [a for a in attempts.values() if a.path == outer and a.started <= t.started]
        enclosing = around[-1] if outer and around else recording.top
        if enclosing.graphs:
            graph = enclosing.graphs[-1]
        else:
            graph = Graph(enclosing)
            enclosing.graphs.append(graph)
            enclosing.items.append(graph)
        attempt = Attempt(
            id=t.id, node=t.node, path=t.path, step=t.step, task_id=t.task_id, graph=graph, enclosing=enclosing, number=t.attempt,
            status=t.status, started=t.started, ended=t.ended, seq=place[t.started] - 0.25, end_seq=place[t.ended] if t.ended else OPEN,
            input=t.input, output=t.output, error=t.error, frozen=t, fixed_parents=tuple(t.parents),
        )  # fmt: skip
        if attempt.task_id in graph.by_task and graph.by_task[attempt.task_id][-1].status == "interrupted":
            attempt.graphs = list(graph.by_task[attempt.task_id][-1].graphs)
        graph.attempts.append(attempt)
        graph.by_task.setdefault(t.task_id, []).append(attempt)
        recording.attempts.append(attempt)
        attempts[t.id] = attempt
    return attempts


def _act(recording: Recording, attempts: dict[str, Attempt], action: Action, position: int) -> None:
    attempt = attempts.get(action.transition_id, recording.top)
    seq = attempt.seq + (position + 1) * 1e-6
    llm = Llm(action.id, attempt, {}, action.policy, 1, [], action.started, seq, seq + 5e-7)
    known = action.trainable or action.agent in recording.team.agents or action.id in recording.verdicts
    calls = {str(c.get("id") or f"#{i}"): _call(c) for i, c in enumerate(action.tool_calls)}
    acted = Acted(action, llm, known, None, calls)
    acted.executions = list(action.executions)
    acted.answered = {e.tool_call_id for e in action.executions if e.tool_call_id}
    acted.complete = action.id in recording.verdicts
    acted.kept_before = action.kept
    llm.actions.append(acted)
    attempt.llms.append(llm)
    attempt.items.append(llm)
    recording.llms.append(llm)
    if attempt.graph is not None:
        attempt.graph.llms.append(llm)
    for id in calls:
        recording.by_call.setdefault(id, []).append(acted)


def _call(call: object) -> dict[str, object]:
    import json

    function = call.get("function", {}) if isinstance(call, dict) else {}
    try:
        args = json.loads(function.get("arguments") or "{}")
    except ValueError:
        args = function.get("arguments")
    return {"id": call.get("id") if isinstance(call, dict) else None, "name": function.get("name"), "args": args}
