"""Errors as traces keep them: a text, read back into an exception of the same name and message, with its traceback.

LangSmith keeps `repr(error)` and the traceback, the others a message or an exception event. Interrupts and handoffs between graphs are
exceptions too, and only their class tells them from failures.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache

_TRACEBACK = "Traceback (most recent call last):"
_LAST_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?\Z", re.DOTALL)
_REPR = re.compile(r"([A-Za-z_][\w.]*)\((.*?)\)?\s*\Z", re.DOTALL)
_COLON = re.compile(r"([A-Za-z_][\w.]*): (.*)\Z", re.DOTALL)
_BUILT_IN = re.compile(r"[A-Z]\w*")
_NOTE = re.compile(r"\n+During task with name '.*", re.DOTALL)
_TOOL_MESSAGE = re.compile(r"ToolMessage\(content='((?:[^'\\]|\\.)*)'.{0,2000}?tool_call_id='([^']+)'", re.DOTALL)
_GOTO = re.compile(r"goto='([^']+)'")
_LONGEST = 200_000


class Told(Exception):
    """An exception that a trace tells of; its class bears the name that the trace gave."""

    traceback: str = ""


@lru_cache(256)
def _class(name: str) -> type[Told]:
    return type(name, (Told,), {})


def split(text: str) -> tuple[str, str, str]:
    """`(type name, message, traceback)` of an error's text; the type is "Error" where none is told."""
    text = text[:_LONGEST]
    head, found, _ = text.partition(_TRACEBACK)
    trace = ""
    if found:
        trace = text[len(head) :]
        last = trace.rsplit(_TRACEBACK, 1)[1]
        # Frames are indented; the first line that is not names the exception.
        position = next((m.start() + 1 for m in re.finditer(r"\n(?=[A-Za-z_])", last)), None)
        match = _LAST_LINE.match(last[position:].strip()) if position is not None else None
        if match is not None:
            message = (match.group(2) or "").split("\n\n\n")[0]
            return match.group(1).rsplit(".", 1)[-1], _NOTE.sub("", message).rstrip(), trace
    head = (head if found else text).strip()
    match = _COLON.match(head)
    if match is not None and _is_type(match.group(1)):
        return match.group(1).rsplit(".", 1)[-1], match.group(2), trace
    match = _REPR.match(head)
    if match is not None and _is_type(match.group(1)) and "(" in head:
        return match.group(1).rsplit(".", 1)[-1], _argument(match.group(2)), trace
    if _BUILT_IN.fullmatch(head) and _is_type(head):
        return head, "", trace
    return "Error", head, trace


def _is_type(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last[:1].isupper() and (last.endswith(("Error", "Exception", "Interrupt", "Command", "Exit", "Warning")) or last in _OTHERS)


_OTHERS = frozenset(("GraphBubbleUp", "StopIteration", "KeyboardInterrupt", "Timeout"))


def _argument(text: str) -> str:
    try:
        value = ast.literal_eval(f"({text},)") if text else ("",)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return str(value[0]) if len(value) == 1 else str(value)


def exception_of(text: str) -> BaseException:
    """An exception with the text's type name and message; LangGraph's own ways of steering are its own classes."""
    name, message, trace = split(text)
    if name in ("GraphInterrupt", "NodeInterrupt", "GraphBubbleUp", "ParentCommand"):
        from langgraph.errors import GraphInterrupt, ParentCommand
        from langgraph.types import Command

        return ParentCommand(Command()) if name == "ParentCommand" else GraphInterrupt()
    error = _class(name)(*([message] if message else []))
    error.traceback = trace
    return error


def handoff(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """What a `ParentCommand`'s text still tells: tool messages as (tool call id, content), and where the graph was sent."""
    text = text[:_LONGEST]
    answers = []
    for content, id in _TOOL_MESSAGE.findall(text):
        try:
            said = ast.literal_eval(f"'{content}'")
        except (ValueError, SyntaxError):
            said = content
        if (id, said) not in answers:
            answers.append((id, said))
    return answers, _GOTO.findall(text)[:1]
