"""The sandbox as this team's tool: what the agent is shown as text, and beside it the `Execution` as the coach is to find it."""

from __future__ import annotations

from typing import Annotated

from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool

from mappa_graph.errors import SandboxError
from mappa_graph.record import Execution
from mappa_graph.sandboxes import as_text
from mappa_graph.sandboxes.tool import DESCRIPTION

from .box import Desk


def desk_tool(desk: Desk | None = None, *, timeout_s: float | None = None, name: str = "python", limit: int = 8_000) -> BaseTool:
    """A tool with one argument, `code`, that runs at a desk; usable in `create_agent` and in a node of one's own.

    Args:
        desk: None takes that of the graph's run-time context (`DSBenchContext`).
        timeout_s: wall limit of a cell.
        limit: characters of the text that the model gets.

    The grade of a submission, where the desk may grade, is in the artifact alone: the agent's text is made without it.
    """

    async def python(code: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> tuple[str, Execution]:
        here = desk or _from_runtime()
        execution = await here.run(code, timeout_s, name=name, tool_call_id=tool_call_id)
        return as_text(execution, limit), await here.graded(execution)

    return StructuredTool.from_function(
        coroutine=python, name=name, description=DESCRIPTION, response_format="content_and_artifact", infer_schema=True
    )


def _from_runtime() -> Desk:
    from langgraph.runtime import get_runtime

    found = getattr(get_runtime().context, "desk", None)
    if not isinstance(found, Desk):
        raise SandboxError("the graph's run-time context holds no desk", hint="invoke with context=DSBenchContext(desk)")
    return found
