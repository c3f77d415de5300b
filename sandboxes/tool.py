"""The sandbox as an agent sees it: a LangChain tool, and fenced code blocks for agents that write those.

Both give the model text and keep the whole `Execution` beside it: the tool as its message's artifact, which reaches callbacks and never
the prompt.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool

from mappa_graph.errors import SandboxError
from mappa_graph.record import Execution

DESCRIPTION = (
    "Run Python code in a Jupyter kernel. Variables, imports and files persist from call to call. "
    "The value of the last line is shown, and so is what is printed. There is no network; files live in the current folder."
)
_FENCE = re.compile(r"^(?P<indent>[ \t]{0,3})(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*$")


class Runs(Protocol):
    """A session, local or remote."""

    async def run(
        self, code: str, timeout_s: float | None = None, *, name: str = "python", tool_call_id: str | None = None
    ) -> Execution: ...


Boxes = Runs | Callable[[], Runs | Awaitable[Runs]]


def python_tool(box: Boxes | None = None, *, timeout_s: float | None = None, name: str = "python", limit: int = 8_000) -> BaseTool:
    """A tool with one argument, `code`, that runs in a session; usable in `create_agent` and `ToolNode`.

    Args:
        box: a session, or a function (async or not) that returns the session of the current run. None: the graph's run-time context, or its
            attribute or key `box` or `sandbox`.
        timeout_s: wall limit of a cell.
        name: the tool's name.
        limit: characters of the text that the model gets.

    The tool's message carries the `Execution` as its artifact. Synchronous calls work for sessions that have `run_sync`.
    """

    async def python(code: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> tuple[str, Execution]:
        session = await _find(box)
        execution = await session.run(code, timeout_s, name=name, tool_call_id=tool_call_id)
        return as_text(execution, limit), execution

    def python_sync(code: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> tuple[str, Execution]:
        session = _given(box)
        if inspect.isawaitable(session) or not hasattr(session, "run_sync"):
            raise SandboxError(f"tool {name!r} was called synchronously, but its session is asynchronous", hint="use ainvoke or astream")
        execution = session.run_sync(code, timeout_s, name=name, tool_call_id=tool_call_id)
        return as_text(execution, limit), execution

    return StructuredTool.from_function(
        func=python_sync, coroutine=python, name=name, description=DESCRIPTION, response_format="content_and_artifact", infer_schema=True
    )


def _given(box: Boxes | None) -> Any:
    if box is None:
        return _from_runtime()
    return box if hasattr(box, "run") else box()


async def _find(box: Boxes | None) -> Runs:
    session = _given(box)
    if inspect.isawaitable(session):
        session = await session
    if not hasattr(session, "run"):
        raise SandboxError(f"the python tool was given {type(session).__name__}, which is not a sandbox session")
    return session


def _from_runtime() -> Any:
    from langgraph.runtime import get_runtime

    context = get_runtime().context
    if hasattr(context, "run"):
        return context
    for key in ("box", "sandbox"):
        found = context.get(key) if isinstance(context, dict) else getattr(context, key, None)
        if found is not None:
            return found
    raise SandboxError(
        "the graph's run-time context holds no sandbox session",
        hint="pass the session as `context` (or under its key `box`), or give python_tool the session itself",
    )


def as_text(execution: Execution, limit: int = 8_000) -> str:
    """An execution as the model is told it: output, value, error and note; past `limit` characters head and tail of each part."""
    from .output import shorten

    parts = [("", execution.stdout.rstrip()), ("stderr:\n", execution.stderr.rstrip()), ("", (execution.result or "").rstrip())]
    if execution.error is not None:
        parts.append(("", execution.error.traceback.rstrip() or f"{execution.error.type}: {execution.error.message}"))
    parts.append(("[note] ", execution.note))
    shown = [(label, text) for label, text in parts if text]
    if not shown:
        return "(no output)"
    room = max(200, limit // len(shown))
    return "\n".join(label + shorten(text, room) for label, text in shown)


def code_blocks(text: str, languages: tuple[str, ...] = ("python", "py", "python3", "ipython")) -> list[str]:
    """The contents of the closed fenced blocks of `text` in one of `languages`, in order.

    A block that is never closed was cut off, and is left out.
    """
    blocks: list[str] = []
    lines: list[str] = []
    fence, indent, wanted = "", 0, False
    for line in text.splitlines():
        if fence:
            stripped = line.strip()
            if stripped.startswith(fence) and set(stripped) == {fence[0]}:
                if wanted:
                    blocks.append("\n".join(lines))
                fence, lines = "", []
            else:
                lines.append(line[indent:] if line[:indent].isspace() else line)
            continue
        opened = _FENCE.match(line)
        if opened:
            fence, indent = opened["fence"], len(opened["indent"])
            wanted = opened["language"].lower() in languages
    return blocks


async def run_code_blocks(
    box: Runs, text: str, *, timeout_s: float | None = None, stop_on_error: bool = True, limit: int = 20
) -> list[Execution]:
    """Run the python blocks of an agent's message in order, at most `limit`; stops after the first that fails unless told otherwise."""
    executions: list[Execution] = []
    for code in code_blocks(text)[:limit]:
        execution = await box.run(code, timeout_s)
        executions.append(execution)
        if execution.status != "ok" and stop_on_error:
            break
    return executions
