"""A case as text for a language model, in which no agent can speak for anyone but itself.

The one thing to know is the line rule: **every line that holds text from a task, an agent, a tool or a file begins with `| `, and no
line of ours does**. So an agent can't end its own quotation, open a section, or speak as the system, whatever it writes: what it
writes stays inside its lines. Line separators of every kind are turned into line ends before lines are quoted; control tokens of
chat templates, which a local server would otherwise tokenise as such, are broken (`<|im_start|>` shows as `‹|im_start|>`); invisible
and direction-changing characters are shown as `⟦U+202E⟧`. Long parts are cut in the middle, and the cut is said on a line of ours, so
that both the beginning of an output and the end of a traceback survive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..record import Execution
from .base import Case, Step

QUOTE = "| "

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\ud800-\udfff\U000e0000-\U000e0fff]+"
)
_CONTROL = re.compile(
    r"<(?=[|｜])"
    r"|<(?=<?/?(?:s|bos|eos|pad|unk|sys|start_of_turn|end_of_turn|think|tool_call|tool_calls|tool_response|tools|function_calls"
    r"|system|user|assistant|im_start|im_end|image|video)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|THINK)\])",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^A-Za-z0-9_.\-]+")


@dataclass(frozen=True, slots=True)
class Limits:
    """Most characters of each part of a case; what is longer is cut in the middle."""

    task: int = 6000
    reference: int = 3000
    role: int = 1000
    message: int = 4000
    messages: int = 12000
    """All messages together; the first and the latest are kept."""
    thinking: int = 4000
    output: int = 10000
    tool_call: int = 3000
    code: int = 6000
    stream: int = 3000
    """Each of stdout, stderr, result and note."""
    traceback: int = 3000
    executions: int = 8
    """How many of an action's executions are shown whole; the last ones."""
    step: int = 2000
    steps: int = 16000
    """All other actions of the episode together."""
    files: int = 60
    """How many files are listed."""


DEFAULT_LIMITS = Limits()


def clean(text: str) -> str:
    """Text with every kind of line end as `\\n`, hidden characters shown, and control tokens of chat templates broken."""
    text = "\n".join(text.splitlines())
    text = _HIDDEN.sub(_shown, text)
    return _CONTROL.sub(lambda m: "⟦" if m.group() == "[" else "‹", text)


def _shown(match: re.Match[str]) -> str:
    run = match.group()
    more = f" ×{len(run)}" if len(run) > 1 else ""
    return f"⟦U+{ord(run[0]):04X}{more}⟧"


def quote(text: str, limit: int) -> list[str]:
    """Quoted lines of a text, cut in the middle to about `limit` characters; an empty text is one line that says so."""
    text = clean(text)
    if not text.strip():
        return ["(empty)"]
    if len(text) <= limit:
        return [QUOTE + line for line in text.split("\n")]
    head, tail = text[: limit * 2 // 5], text[-(limit - limit * 2 // 5) :]
    cut = len(text) - len(head) - len(tail)
    return [
        *(QUOTE + line for line in head.split("\n")),
        f"({cut} characters cut here)",
        *(QUOTE + line for line in tail.split("\n")),
    ]


def word(text: str) -> str:
    """A name as it may stand in a line of ours: letters, digits, `_.-`, at most 64."""
    return _WORD.sub("_", text)[:64] or "_"


def label(position: int) -> str:
    """What the action at a position of the episode (from 0) is called in a case."""
    return f"#{position + 1}"


def labels_of(case: Case) -> dict[str, str]:
    """Label -> action id, for every action that a case knows of."""
    ids = [*(s.action_id for s in case.before), case.action_id, *(s.action_id for s in case.after)]
    return {label(i): action_id for i, action_id in enumerate(ids)}


def labels_for(cases: Sequence[Case]) -> dict[str, str]:
    """Action id -> label, for cases of one episode: by the place in it, or by order where two cases name the same place."""
    places = [len(case.before) for case in cases]
    if len(set(places)) == len(places):
        return {case.action_id: label(place) for case, place in zip(cases, places, strict=True)}
    order = sorted(range(len(cases)), key=lambda i: (places[i], cases[i].action_id))
    return {cases[i].action_id: label(n) for n, i in enumerate(order)}


def render_case(case: Case, limits: Limits = DEFAULT_LIMITS) -> str:
    """The whole case of one action, as text."""
    here = len(case.before)
    lines = [
        *_opening(case, limits),
        *_section(f"Action {label(here)}, the one to score: agent {word(case.agent)}, turn {case.turn + 1} of this agent"),
        *_action(case, limits, messages=True),
    ]
    lines += _steps("Earlier actions of the episode", case.before, 0, limits)
    if case.after:
        lines += _steps("What happened after it", case.after, here + 1, limits)
    lines += _closing(case, limits)
    return "\n".join(lines) + "\n"


def render_episode(cases: Sequence[Case], limits: Limits = DEFAULT_LIMITS) -> str:
    """All actions of one episode, in the order of `cases`, as text for hindsight scoring. Labels follow the episode's own order."""
    first = cases[0]
    each = max(800, 60_000 // len(cases))
    small = Limits(
        message=min(limits.message, each // 4),
        messages=min(limits.messages, each // 3),
        thinking=min(limits.thinking, each // 4),
        output=min(limits.output, each),
        tool_call=min(limits.tool_call, each // 3),
        code=min(limits.code, each // 2),
        stream=min(limits.stream, each // 3),
        traceback=min(limits.traceback, each // 3),
        executions=4,
        files=limits.files,
    )
    lines = _opening(first, limits)
    labels = labels_for(cases)
    for case in cases:
        lines += _section(f"Action {labels[case.action_id]}: agent {word(case.agent)}, turn {case.turn + 1} of this agent")
        lines += _action(case, small, messages=True)
    lines += _closing(first, limits)
    return "\n".join(lines) + "\n"


def untrusted_texts(case: Case) -> Iterable[str]:
    """Every text of a case that an agent can have written."""
    for message in case.messages:
        yield content_text(message.get("content"))
    yield case.output
    yield case.thinking
    for call in case.tool_calls:
        yield _json(call)
    for executions in (case.executions, *(s.executions for s in case.before), *(s.executions for s in case.after)):
        for execution in executions:
            yield from (execution.code, execution.stdout, execution.stderr, execution.result or "")
            if execution.error is not None:
                yield from (execution.error.message, execution.error.traceback)
    for step in (*case.before, *case.after):
        yield step.output


def content_text(content: Any) -> str:
    """The text of a message's content; blocks that aren't text are named."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(_block(block) for block in content)
    return _json(content)


def _block(block: Any) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    return f"({kind} not shown)"


def _opening(case: Case, limits: Limits) -> list[str]:
    lines = [*_section("Task"), *quote(case.task, limits.task), *_section("Team, in the order of the pipeline")]
    for card in case.team:
        lines.append(f"- agent {word(card.name)}")
        if card.role:
            lines += quote(card.role, limits.role)
        for what, paths in (("must read", card.reads), ("must write", card.writes)):
            if paths:
                lines.append(f"  {what}:")
                lines += (QUOTE + _path(path) for path in paths)
    return lines


def _closing(case: Case, limits: Limits) -> list[str]:
    lines: list[str] = []
    if case.reference is not None:
        lines += [*_section("Reference answer (the agents never saw it)"), *quote(case.reference, limits.reference)]
    if case.outcome is not None:
        grade = "success" if case.outcome.success else "failure"
        lines += _section(f"Outcome of the episode, by a deterministic grader: {grade}, value {case.outcome.value:.3g} of 1")
        if case.outcome.reason:
            lines += quote(case.outcome.reason, limits.stream)
    return lines


def _action(case: Case, limits: Limits, *, messages: bool) -> list[str]:
    lines: list[str] = []
    if messages:
        lines += _messages(case.messages, limits)
    if case.thinking:
        lines += ["- its thinking, which the others don't see:", *quote(case.thinking, limits.thinking)]
    lines += ["- its output:", *quote(case.output, limits.output)]
    lines.append(f"- finish reason: {word(case.finish_reason or 'unknown')}")
    if case.error:
        lines += ["- the call ended with an error:", *quote(case.error, limits.stream)]
    for call in case.tool_calls:
        lines += ["- tool call:", *quote(_json(call), limits.tool_call)]
    if case.tool_calls and not case.executions:
        lines.append("- no result of a tool is known")
    hidden = len(case.executions) - limits.executions
    if hidden > 0:
        lines.append(f"- {hidden} earlier executions of this action left out")
    for execution in case.executions[-limits.executions :]:
        lines += _execution(execution, limits)
    if case.files_before:
        lines.append("- files before it (and who wrote them):")
        lines += _listed((f"{_path(p)} (by {word(by) if by else 'the task'})" for p, by in sorted(case.files_before.items())), limits.files)
    if case.files_after:
        lines.append("- files it changed:")
        lines += _listed((f"{_path(c.path)} ({c.change}, {c.size} bytes)" for c in case.files_after), limits.files)
    elif case.executions:
        lines.append("- it changed no file")
    return lines


def _messages(messages: Sequence[Mapping[str, Any]], limits: Limits) -> list[str]:
    if not messages:
        return []
    left = limits.messages
    shown: list[list[str]] = []
    first, *others = messages
    for message in [*reversed(others), first]:
        if left <= 0 and message is not first:
            continue
        room = min(limits.message, max(left, 400))
        text = content_text(message.get("content"))
        if message.get("tool_calls"):
            text += "\n" + _json(message["tool_calls"])
        quoted = quote(text, room)
        left -= sum(map(len, quoted))
        shown.append([f"- it saw a message of role {word(str(message.get('role') or message.get('type') or 'unknown'))}:", *quoted])
    hidden = len(messages) - len(shown)
    out = list(shown[-1])
    if hidden:
        out.append(f"- {hidden} messages left out")
    for part in reversed(shown[:-1]):
        out += part
    return out


def _execution(execution: Execution, limits: Limits) -> list[str]:
    lines = [f"- execution by tool {word(execution.name)}: status {word(execution.status)}, {execution.duration_s:.2f} s"]
    if execution.code:
        lines += ["  code or arguments:", *quote(execution.code, limits.code)]
    for what, text in (("stdout", execution.stdout), ("stderr", execution.stderr), ("result", execution.result or "")):
        if text.strip():
            lines += [f"  {what}:", *quote(text, limits.stream)]
    if execution.error is not None:
        lines += ["  error:", *quote(f"{execution.error.type}: {execution.error.message}", limits.stream)]
        if execution.error.traceback:
            lines += ["  traceback:", *quote(execution.error.traceback, limits.traceback)]
    if execution.note:
        lines += ["  note:", *quote(execution.note, limits.stream)]
    if execution.truncated:
        lines.append("  (its streams had been cut in the middle before)")
    return lines


def _steps(title: str, steps: Sequence[Step], start: int, limits: Limits) -> list[str]:
    if not steps:
        return []
    lines = _section(title)
    room = max(200, min(limits.step, limits.steps // len(steps)))
    most = max(2, limits.steps // room)
    skipped = len(steps) - most
    for i, step in enumerate(steps):
        if skipped > 0 and most // 2 <= i < most // 2 + skipped:
            if i == most // 2:
                lines.append(f"- {skipped} actions left out")
            continue
        lines += [f"- action {label(start + i)} by agent {word(step.agent)}:", *quote(step.output, room)]
        for execution in step.executions[-3:]:
            lines.append(f"  execution: status {word(execution.status)}")
            said = f"{execution.error.type}: {execution.error.message}" if execution.error else execution.stdout[-room:]
            if said.strip():
                lines += quote(said, max(200, room // 4))
            lines += _listed((f"{_path(c.path)} ({c.change})" for c in execution.files), 12)
    return lines


def _section(title: str) -> list[str]:
    return ["", f"== {title} =="]


def _listed(items: Iterable[str], most: int) -> list[str]:
    every = list(items)
    lines = [QUOTE + item for item in every[:most]]
    if len(every) > most:
        lines.append(f"({len(every) - most} more)")
    return lines


def _path(path: str) -> str:
    """A path on one line; what isn't plain is escaped as in JSON."""
    shown = clean(json.dumps(path, ensure_ascii=False)).replace("\n", "\\n")
    return shown if len(shown) <= 200 else f"{shown[:100]}…{shown[-60:]}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
