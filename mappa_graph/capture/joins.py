"""Which action a tool run answers, and what the run was as an `Execution`.

A tool call's id is no key: models repeat ids, and two agents may use the same one at the same time. Of the actions that made a call
with that id, the nearest is meant: of the same transition, else of those the transition follows, else of the same graph invocation,
else any; and of the nearest, the one with the same tool and arguments, still unanswered, made last. A run whose id matches no call
(a node that runs fenced code through a tool) belongs to the latest action of its transition, else to the one it follows.

Where a tool gave no event (an unknown name, a hand-written executor), the `ToolMessage` in the node's return, or in a later prompt of
the same graph, is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..record import Execution, ExecutionErrorInfo, from_json
from .lineage import Lineage
from .model import Acted, Attempt, Llm, ToolUse
from .snapshot import CommandSnap, Message, dumps, found

if TYPE_CHECKING:
    from .recording import Recording


def cause_of(recording: Recording, use: ToolUse) -> Acted | None:
    """The action that a tool run follows from, or None where no model had been called."""
    attempt = use.attempt
    before = _Lazy(recording, attempt)
    if use.tool_call_id is not None:
        found_ = _nearest(recording.by_call.get(use.tool_call_id, ()), attempt, before, use.tool_call_id, use.name, use.inputs)
        if found_ is not None:
            return found_
    else:
        for scope in (_own(attempt), before(), [a for llm in _llms(attempt) for a in llm.actions]):
            for action in reversed(scope):
                match = next((id for id, c in action.calls.items() if id not in action.answered and _same(c, use.name, use.inputs)), None)
                if match is not None:
                    use.tool_call_id = match
                    return action
    own = _own(attempt)
    if own:
        return own[-1]
    entry = before()
    return max(entry, key=lambda a: a.llm.seq) if entry else None


class _Lazy:
    """The actions that an attempt follows, worked out once if at all."""

    def __init__(self, recording: Recording, attempt: Attempt) -> None:
        self._recording = recording
        self._attempt = attempt
        self._found: list[Acted] | None = None

    def __call__(self) -> list[Acted]:
        if self._found is None:
            self._found = Lineage(self._recording.structure).entry(self._attempt)
        return self._found


def _own(attempt: Attempt) -> list[Acted]:
    return [a for llm in attempt.llms for a in llm.actions]


def _llms(attempt: Attempt) -> Sequence[Llm]:
    return attempt.graph.llms if attempt.graph is not None else ()


def _nearest(
    candidates: Sequence[Acted], attempt: Attempt, before: _Lazy, id: str, name: str | None, args: Any, *, anywhere: bool = True
) -> Acted | None:
    if not candidates:
        return None
    if len(candidates) == 1 and anywhere:
        return candidates[0]
    scopes: list[Iterable[Acted]] = [
        [a for a in candidates if a.llm.attempt is attempt],
        [a for a in candidates if a in before()],
        [a for a in candidates if a.llm.attempt.graph is attempt.graph],
    ]
    if anywhere:
        scopes.append(candidates)
    for scope in scopes:
        near = list(scope)
        if not near:
            continue
        alike = [a for a in near if name is None or _same(a.calls[id], name, args)] or near
        waiting = [a for a in alike if id not in a.answered] or [a for a in near if id not in a.answered] or alike
        return max(waiting, key=lambda a: a.llm.seq)
    return None


def _same(call: dict[str, Any], name: str, args: Any) -> bool:
    if call.get("name") != name:
        return False
    wanted = call.get("args")
    # A tool may be handed more than the model wrote: injected state, defaults.
    return not isinstance(args, dict) or not isinstance(wanted, dict) or all(args.get(k) == v for k, v in wanted.items())


def answer_from_return(recording: Recording, attempt: Attempt) -> None:
    """Takes the tool messages of a node's return as answers to calls that no tool run answered."""
    ran = {use.tool_call_id for use in attempt.tools}
    before = _Lazy(recording, attempt)
    for message in attempt.returned:
        id = message.tool_call_id
        if message.role != "tool" or id is None or id in ran or message in attempt.tool_messages_in:
            continue
        open_ = [a for a in recording.by_call.get(id, ()) if id not in a.answered]
        action = _nearest(open_, attempt, before, id, message.name, None, anywhere=False)
        if action is not None:
            _answer(recording, action, id, message)


def answer_from_prompt(recording: Recording, llm: Llm) -> None:
    """Takes the tool messages that a model is shown as answers to calls of its graph that nothing else answered.

    And the next call of the same node shows that no answer will come to the calls of the last one.
    """
    attempt = llm.attempt
    assert attempt.graph is not None
    for earlier in reversed(attempt.graph.llms):
        for action in earlier.actions:
            if action.complete or not action.calls:
                continue
            asked = next((i for i, m in enumerate(llm.prompt) if m is action.message), -1)
            for message in llm.prompt[asked + 1 :] if asked >= 0 else reversed(llm.prompt):
                id = message.tool_call_id
                if id in action.calls and id not in action.answered and not action.running:
                    _answer(recording, action, str(id), message)
            if not action.running and earlier.attempt.node == attempt.node and earlier.attempt is not attempt and action.waiting:
                recording.complete(action)
        if earlier.attempt.node == attempt.node and earlier.attempt is not attempt and all(a.complete for a in earlier.actions):
            break


def _answer(recording: Recording, action: Acted, id: str, message: Message) -> None:
    call = action.calls[id]
    failed = message.status == "error"
    execution = _from_artifact(message.artifact, id) or Execution(
        id=f"{action.base.id}/{id}",
        status="error" if failed else "ok",
        name=str(call.get("name") or message.name or "tool"),
        code=_code(call.get("args")),
        result=None if failed else message.text,
        error=ExecutionErrorInfo("ToolError", message.text) if failed else None,
        tool_call_id=id,
    )
    action.executions.append(execution)
    action.answered.add(id)
    if not action.waiting and not action.running:
        recording.complete(action)


def execution_of(use: ToolUse, output: Any, at: float) -> Execution:
    """A tool run as an execution; a tool whose artifact is an `Execution`, or a dict with its fields, has made the record itself."""
    message = _message(use, output)
    tool_call_id = use.tool_call_id or (message.tool_call_id if message is not None else None)
    artifact = output if isinstance(output, Execution) else message.artifact if message is not None else None
    made = _from_artifact(artifact, tool_call_id)
    if made is not None:
        return made
    failed = message is not None and message.status == "error"
    text = message.text if message is not None else _text(output)
    extra = artifact if isinstance(artifact, dict) else {}
    call = None if use.action is None or tool_call_id is None else use.action.calls.get(tool_call_id)
    error = ExecutionErrorInfo("ToolError", text or "") if failed else None
    if extra.get("error"):
        error = _error(extra["error"])
    elif extra.get("exit_code"):
        error = ExecutionErrorInfo("ExitCode", str(extra["exit_code"]))
    return Execution(
        id=use.id,
        status="error" if error is not None else "ok",
        name=use.name,
        code=_code(call.get("args") if call is not None else use.inputs),
        stdout=str(extra.get("stdout") or use.stdout),
        stderr=str(extra.get("stderr") or use.stderr),
        result=_text(extra["result"]) if extra.get("result") is not None else None if failed else text,
        error=error,
        duration_s=max(0.0, at - use.started),
        tool_call_id=tool_call_id,
        note=str(extra.get("note") or ""),
    )


def _message(use: ToolUse, output: Any) -> Message | None:
    """The tool's own message in what it gave back: the message, or one in a command's update."""
    if isinstance(output, Message):
        return output
    if isinstance(output, CommandSnap | list):
        answers = [m for m in found(output) if m.role == "tool"]
        return next((m for m in answers if m.tool_call_id == use.tool_call_id), answers[0] if len(answers) == 1 else None)
    return None


def _from_artifact(artifact: Any, tool_call_id: str | None) -> Execution | None:
    from dataclasses import replace

    if isinstance(artifact, Execution):
        return replace(artifact, tool_call_id=tool_call_id)
    if isinstance(artifact, dict) and "id" in artifact and "status" in artifact:
        try:
            return replace(from_json(Execution, artifact), tool_call_id=tool_call_id)
        except (TypeError, ValueError, AttributeError):
            return None
    return None


def _error(value: Any) -> ExecutionErrorInfo:
    if isinstance(value, dict):
        return ExecutionErrorInfo(str(value.get("type") or "Error"), str(value.get("message") or ""), str(value.get("traceback") or ""))
    return ExecutionErrorInfo("Error", str(value))


def _code(args: Any) -> str:
    if isinstance(args, dict):
        if set(args) == {"code"} and isinstance(args["code"], str):
            return args["code"]
        return dumps(args)
    return "" if args is None else str(args)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Message):
        return value.text
    if isinstance(value, CommandSnap):
        return None
    return dumps(value)
