"""Builds a coach's `Case` from the record, and from nothing else.

Every coach gets its case here, so two coaches can be compared on the same cases and a score can be repeated from the store
at any later time. A running episode has a partial trace: what hasn't happened yet is left out, never guessed. The one thing
to know is *hindsight*: without it a case holds only what had happened when the action's tools had answered (no later action,
no outcome), even if the trace holds more; with it, what became of the action is in the case too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import cached_property

from ..errors import CoachError
from ..record import Action, EpisodeTrace, FileChange, Transition
from .base import AgentCard, Case, Step

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)


def split_thinking(text: str) -> tuple[str, str]:
    """`(thinking, output)` of a completion, in one pass.

    Knows three shapes: `<think>..</think>` blocks; a first `</think>` that nothing opened (the chat template did, so all before it
    is thinking); a last `<think>` that nothing closes (cut off while thinking, so nothing after it is output).
    """
    tags = list(_TAG.finditer(text)) if "<" in text else []  # most texts have none, and this is the fastest way to know
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
    """The case of one action; of several actions of an episode, take them from one `Cases`.

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
    cases = Cases(trace, team, environment=environment, reveal_reference=reveal_reference, files_given=files_given)
    return cases.action(action_id, hindsight=hindsight)


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
    cases = Cases(trace, team, environment=environment, reveal_reference=reveal_reference, files_given=files_given)
    return cases.all(hindsight=hindsight)


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
    """The case of a whole node attempt, for `unit: transition`; see `Cases.transition`. Other arguments as `case_for`."""
    cases = Cases(trace, team, environment=environment, reveal_reference=reveal_reference, files_given=files_given)
    return cases.transition(transition_id, hindsight=hindsight)


class Cases:
    """The cases of one episode, as they are asked for. What they share (steps, turns, files) is made once.

    So all cases of an episode cost what they hold, and no more. Asked for in the order of the actions, or nearly so, it is fastest.
    Arguments as `case_for`. Not for several threads.
    """

    def __init__(
        self,
        trace: EpisodeTrace,
        team: Sequence[AgentCard],
        *,
        environment: str = "",
        reveal_reference: bool = True,
        files_given: Sequence[str] = (),
    ) -> None:
        self.trace = trace
        self.ordered = sorted(trace.actions, key=lambda action: action.order)
        self._team = tuple(team)
        self._environment = environment or trace.episode.environment
        self._reference = trace.episode.reference if reveal_reference else None
        self._files_given = files_given
        self._at = {action.id: position for position, action in reversed(list(enumerate(self.ordered)))}
        self._steps: list[Step] = []
        self._thoughts: list[str] = []
        self._written = 0
        """How many actions `_files` has seen."""
        self._files = _files((), files_given)

    @cached_property
    def _transitions(self) -> dict[str, Transition]:
        return {t.id: t for t in reversed(self.trace.transitions)}

    @cached_property
    def _of_transition(self) -> dict[str, list[int]]:
        """Positions of the actions of each node attempt."""
        found: dict[str, list[int]] = {}
        for position, action in enumerate(self.ordered):
            found.setdefault(action.transition_id, []).append(position)
        return found

    @cached_property
    def _turns(self) -> list[int]:
        """How many actions each action's agent took before it."""
        taken: Counter[str] = Counter()
        turns = []
        for action in self.ordered:
            turns.append(taken[action.agent])
            taken[action.agent] += 1
        return turns

    def action(self, action_id: str, *, hindsight: bool = False) -> Case:
        """The case of one action. Raises `CoachError` if the trace has no such action."""
        position = self._at.get(action_id)
        if position is None:
            raise CoachError(
                f"episode {self.trace.episode.id!r} has no action {action_id!r}",
                hint=f"it has {len(self.ordered)} actions so far; give the id of one of them, and the trace that holds it",
            )
        return self._case((position,), action_id, hindsight)

    def all(self, *, hindsight: bool = False) -> list[Case]:
        """The cases of all actions, in order."""
        return [self._case((position,), action.id, hindsight) for position, action in enumerate(self.ordered)]

    def attempt(self, action_ids: Sequence[str], *, hindsight: bool = False) -> Case:
        """The case of one agent's actions in a node attempt, which share a score; it goes by the first one's id.

        What other agents did in that attempt is not in it. Raises `CoachError` if the trace has no such action.
        """
        for action_id in action_ids:
            if action_id not in self._at:
                return self.action(action_id)  # which says that there is none
        own = sorted(self._at[action_id] for action_id in action_ids)
        others = frozenset(self._of_transition[self.ordered[own[0]].transition_id]) - frozenset(own)
        return self._case(tuple(own), action_ids[0], hindsight, left_out=others)

    def transition(self, transition_id: str, *, hindsight: bool = False) -> Case:
        """The case of a whole node attempt; its `action_id` is the transition's id.

        Outputs, tool calls and executions of its actions follow one another; the messages are those of the first action, and the
        finish reason and error those of the last. A node without a marked call gives a case of agent "" (or of the team's member
        with the node's name) whose messages and output are the node's input and output as text: it can be scored for the record.
        Raises `CoachError` if the trace has no such transition.
        """
        episode = self.trace.episode
        transition = self._transitions.get(transition_id)
        if transition is None:
            raise CoachError(
                f"episode {episode.id!r} has no transition {transition_id!r}", hint="give the id of a node attempt in the trace"
            )
        if positions := self._of_transition.get(transition_id):
            return self._case(tuple(positions), transition_id, hindsight)
        self._read(len(self.ordered))
        earlier = [i for i, action in enumerate(self.ordered) if action.ended and action.ended <= transition.started]
        return Case(
            action_id=transition_id,
            episode_id=episode.id,
            environment=self._environment,
            task=episode.task,
            team=self._team,
            agent=transition.node if any(card.name == transition.node for card in self._team) else "",
            turn=0,
            messages=({"role": "user", "content": _text(transition.input)},),
            output=_text(transition.output),
            error=transition.error,
            files_before=_files((self.ordered[i] for i in earlier), self._files_given),
            before=tuple(self._steps[i] for i in earlier),
            reference=self._reference,
            outcome=episode.outcome if hindsight else None,
            stratum=episode.stratum,
        )

    def _case(self, positions: tuple[int, ...], action_id: str, hindsight: bool, *, left_out: Set[int] = frozenset()) -> Case:
        """The case of actions by their positions; `left_out` are positions that it must not know of."""
        first, last = positions[0], positions[-1]
        acts = [self.ordered[i] for i in positions]
        episode = self.trace.episode
        self._read(len(self.ordered) if hindsight else last + 1)
        if any(i < first for i in left_out):
            earlier = [i for i in range(first) if i not in left_out]
            before = tuple(self._steps[i] for i in earlier)
            files = _files((self.ordered[i] for i in earlier), self._files_given)
        else:
            before, files = tuple(self._steps[:first]), self._files_at(first)
        after: tuple[Step, ...] = ()
        if hindsight:
            skipped = left_out | frozenset(positions)
            end = max(skipped) + 1
            after = (*(self._steps[i] for i in range(first, end) if i not in skipped), *self._steps[end:])
        return Case(
            action_id=action_id,
            episode_id=episode.id,
            environment=self._environment,
            task=episode.task,
            team=self._team,
            agent=acts[0].agent,
            turn=self._turns[first] - sum(i < first and self.ordered[i].agent == acts[0].agent for i in left_out),
            messages=tuple(acts[0].messages),
            output="\n\n".join(output for i in positions if (output := self._steps[i].output)),
            thinking="\n\n".join(thoughts for i in positions if (thoughts := self._thoughts[i])),
            tool_calls=tuple(call for action in acts for call in action.tool_calls),
            executions=tuple(execution for action in acts for execution in action.executions),
            error=acts[-1].error,
            finish_reason=acts[-1].finish_reason,
            files_before=files,
            files_after=net_changes(acts),
            before=before,
            after=after,
            reference=self._reference,
            outcome=episode.outcome if hindsight else None,
            stratum=episode.stratum,
        )

    def _read(self, end: int) -> None:
        """Makes the steps of the actions before `end`."""
        for action in self.ordered[len(self._steps) : end]:
            thoughts, output = split_thinking(action.output)
            self._steps.append(Step(action.id, action.agent, output, action.executions))
            self._thoughts.append(thoughts)

    def _files_at(self, position: int) -> dict[str, str]:
        """As `_files` of the actions before a position."""
        if position < self._written:
            self._written, self._files = 0, _files((), self._files_given)
        for action in self.ordered[self._written : position]:
            _write(action, self._files)
        self._written = max(self._written, position)
        return dict(self._files)


def _files(actions: Iterable[Action], given: Sequence[str]) -> dict[str, str]:
    """Path -> agent that last wrote it ("" = given with the task)."""
    writers = {normal_path(path): "" for path in given}
    for action in actions:
        _write(action, writers)
    return writers


def _write(action: Action, writers: dict[str, str]) -> None:
    for execution in action.executions:
        for change in execution.files:
            if change.change == "deleted":
                writers.pop(normal_path(change.path), None)
            else:
                writers[normal_path(change.path)] = action.agent


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else repr(value)
