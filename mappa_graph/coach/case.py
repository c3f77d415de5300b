"""Builds a coach's `Case` from the record, and from nothing else.

Every coach gets its case here, so two coaches can be compared on the same cases and a score can be repeated from the store
at any later time. A running episode has a partial trace: what hasn't happened yet is left out, never guessed. The one thing
to know is *hindsight*: without it a case holds only what had happened when the action's tools had answered (no later action,
no outcome), even if the trace holds more; with it, what became of the action is in the case too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import CoachError
from ..record import Action, EpisodeTrace, FileChange
from .base import AgentCard, Case, Step

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)


def split_thinking(text: str) -> tuple[str, str]:
    """`(thinking, output)` of a completion, in one pass.

    Knows three shapes: `<think>..</think>` blocks; a first `</think>` that nothing opened (the chat template did, so all before it
    is thinking); a last `<think>` that nothing closes (cut off while thinking, so nothing after it is output).
    """
    tags = list(_TAG.finditer(text))
    if not tags:
        return "", text.strip()
    thoughts: list[str] = []
    said: list[str] = []
    inside = bool(tags[0].group(1))
    start = 0
    for tag in tags:
        closing = bool(tag.group(1))
        if closing != inside:
            continue
        (thoughts if inside else said).append(text[start : tag.start()])
        inside, start = not inside, tag.end()
    (thoughts if inside else said).append(text[start:])
    return "\n".join(t.strip() for t in thoughts if t.strip()), "".join(said).strip()


def normal_path(path: str) -> str:
    """A workspace path as it is compared: forward slashes, no leading `./`."""
    path = path.replace("\\", "/")
    while path.startswith("./"):
        path = path[2:]
    return path


def net_changes(actions: Iterable[Action]) -> tuple[FileChange, ...]:
    """What a run of actions did to the files, one entry a path: made and then deleted is nothing, made and then changed is made."""
    changes: dict[str, FileChange] = {}
    for action in actions:
        for execution in action.executions:
            for change in execution.files:
                path = normal_path(change.path)
                earlier = changes.get(path)
                if change.change == "deleted" and earlier is not None and earlier.change == "created":
                    del changes[path]
                    continue
                kind = change.change
                if earlier is not None and kind != "deleted" and earlier.change == "created":
                    kind = "created"
                changes[path] = FileChange(path, kind, change.size, change.sha256)
    return tuple(changes.values())


def case_for(
    trace: EpisodeTrace,
    action_id: str,
    team: Sequence[AgentCard],
    *,
    environment: str = "",
    reveal_reference: bool = True,
    hindsight: bool = False,
    files_given: Sequence[str] = (),
) -> Case:
    """The case of one action.

    Args:
        trace: the episode so far; may be partial.
        action_id: `Action.id` in the trace.
        team: the environment's agents in the order of the pipeline; may be empty.
        environment: name to show; default is the one stored with the episode.
        reveal_reference: whether the coach may see the task's reference.
        hindsight: whether later actions and the outcome are in the case.
        files_given: paths that lay in the workspace before the first action.

    Raises `CoachError` if the trace has no such action.
    """
    ordered = _ordered(trace.actions)
    position = next((i for i, action in enumerate(ordered) if action.id == action_id), None)
    if position is None:
        raise CoachError(
            f"episode {trace.episode.id!r} has no action {action_id!r}",
            hint=f"it has {len(ordered)} actions so far; give the id of one of them, and the trace that holds it",
        )
    return _build(trace, ordered, (position,), team, environment, reveal_reference, hindsight, files_given)


def cases_for(
    trace: EpisodeTrace,
    team: Sequence[AgentCard],
    *,
    environment: str = "",
    reveal_reference: bool = True,
    hindsight: bool = True,
    files_given: Sequence[str] = (),
) -> list[Case]:
    """The cases of all actions of an episode, in order; in hindsight unless said otherwise. Arguments as `case_for`."""
    ordered = _ordered(trace.actions)
    return [_build(trace, ordered, (i,), team, environment, reveal_reference, hindsight, files_given) for i in range(len(ordered))]


def transition_case(
    trace: EpisodeTrace,
    transition_id: str,
    team: Sequence[AgentCard],
    *,
    environment: str = "",
    reveal_reference: bool = True,
    hindsight: bool = False,
    files_given: Sequence[str] = (),
) -> Case:
    """The case of a whole node attempt, for `unit: transition`; its `action_id` is the transition's id.

    Outputs, tool calls and executions of its actions follow one another; the messages are those of the first action, and the
    finish reason and error those of the last. A node without a marked call gives a case of agent "" (or of the team's member
    with the node's name) whose messages and output are the node's input and output as text: it can be scored for the record.
    Raises `CoachError` if the trace has no such transition.
    """
    transition = next((t for t in trace.transitions if t.id == transition_id), None)
    if transition is None:
        raise CoachError(
            f"episode {trace.episode.id!r} has no transition {transition_id!r}", hint="give the id of a node attempt in the trace"
        )
    ordered = _ordered(trace.actions)
    positions = tuple(i for i, action in enumerate(ordered) if action.transition_id == transition_id)
    if positions:
        return _build(trace, ordered, positions, team, environment, reveal_reference, hindsight, files_given, action_id=transition_id)
    node = transition.node
    episode = trace.episode
    earlier = [a for a in ordered if a.ended and a.ended <= transition.started]
    return Case(
        action_id=transition_id,
        episode_id=episode.id,
        environment=environment or episode.environment,
        task=episode.task,
        team=tuple(team),
        agent=node if any(card.name == node for card in team) else "",
        turn=0,
        messages=({"role": "user", "content": _text(transition.input)},),
        output=_text(transition.output),
        error=transition.error,
        files_before=_files(earlier, files_given),
        before=tuple(_step(a) for a in earlier),
        reference=episode.reference if reveal_reference else None,
        outcome=episode.outcome if hindsight else None,
        stratum=episode.stratum,
    )


def _build(
    trace: EpisodeTrace,
    ordered: Sequence[Action],
    positions: tuple[int, ...],
    team: Sequence[AgentCard],
    environment: str,
    reveal_reference: bool,
    hindsight: bool,
    files_given: Sequence[str],
    action_id: str | None = None,
) -> Case:
    first, last = positions[0], positions[-1]
    acts = [ordered[i] for i in positions]
    inside = frozenset(positions)
    earlier = list(ordered[:first])
    later = [action for i, action in enumerate(ordered) if i > first and i not in inside]
    parts = [split_thinking(action.output) for action in acts]
    episode = trace.episode
    return Case(
        action_id=action_id or acts[0].id,
        episode_id=episode.id,
        environment=environment or episode.environment,
        task=episode.task,
        team=tuple(team),
        agent=acts[0].agent,
        turn=sum(action.agent == acts[0].agent for action in earlier),
        messages=tuple(acts[0].messages),
        output="\n\n".join(output for _, output in parts if output),
        thinking="\n\n".join(thinking for thinking, _ in parts if thinking),
        tool_calls=tuple(call for action in acts for call in action.tool_calls),
        executions=tuple(execution for action in acts for execution in action.executions),
        error=acts[-1].error,
        finish_reason=ordered[last].finish_reason,
        files_before=_files(earlier, files_given),
        files_after=net_changes(acts),
        before=tuple(_step(action) for action in earlier),
        after=tuple(_step(action) for action in later) if hindsight else (),
        reference=episode.reference if reveal_reference else None,
        outcome=episode.outcome if hindsight else None,
        stratum=episode.stratum,
    )


def _ordered(actions: Iterable[Action]) -> list[Action]:
    return sorted(actions, key=lambda action: action.order)


def _files(actions: Iterable[Action], given: Sequence[str]) -> dict[str, str]:
    """Path -> agent that last wrote it ("" = given with the task)."""
    writers = {normal_path(path): "" for path in given}
    for action in actions:
        for execution in action.executions:
            for change in execution.files:
                if change.change == "deleted":
                    writers.pop(normal_path(change.path), None)
                else:
                    writers[normal_path(change.path)] = action.agent
    return writers


def _step(action: Action) -> Step:
    return Step(action.id, action.agent, split_thinking(action.output)[1], action.executions)


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else repr(value)
