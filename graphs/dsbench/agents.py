"""The same team as `create_agent` apps: each agent calls the sandbox as a tool, and ends its part by answering without a call.

A node is one agent's whole part. Its turns are the model calls inside it, at most as many as in the other style; a middleware ends the part
as soon as what the agent owes is there. Recording, coaching and training see no difference: actions, their tool runs, their tokens.
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langgraph.runtime import Runtime

from mappa_graph.agent import Agent
from mappa_graph.errors import ConfigError

from .box import DSBenchContext
from .graph import Node, desk_of
from .prompts import Visibility, briefing, system_message
from .state import DSBenchState, Summary, Turn
from .text import spoken, summary_of
from .tool import desk_tool


def tool_node(agent: Agent, model: BaseChatModel, *, visibility: Visibility, turns: int, cell_timeout_s: float | None) -> Node:
    """The node of an agent that was built by `create_agent`. Raises `ConfigError` where LangChain is not installed."""
    try:
        from langchain.agents import create_agent
        from langchain.agents.middleware import AgentMiddleware, ModelCallLimitMiddleware, hook_config
    except ImportError as error:
        raise ConfigError("style='tools' needs LangChain's agents", hint="pip install langchain") from error

    class EndsWhenDone(AgentMiddleware[Any, Any]):
        """Ends the part once what the agent owes is there and its last run did not fail."""

        @hook_config(can_jump_to=["end"])
        async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
            last = state["messages"][-1]
            execution = getattr(last, "artifact", None)
            ran = execution is not None and execution.status == "ok"
            return {"jump_to": "end"} if ran and agent.writes and not desk_of(runtime).missing(agent.writes) else None

    app: Any = create_agent(
        model,
        [desk_tool(timeout_s=cell_timeout_s)],
        system_prompt=system_message(agent, "tools", turns=turns)["content"],
        middleware=[EndsWhenDone(), ModelCallLimitMiddleware(run_limit=turns, exit_behavior="end")],
        context_schema=DSBenchContext,
        name=agent.name,
    )

    async def part(state: DSBenchState, runtime: Runtime[DSBenchContext]) -> dict[str, Any]:
        desk = desk_of(runtime)
        desk.acting = agent.name
        told = briefing(
            agent,
            state["task"],
            state["facts"],
            state["files"],
            state["summaries"],
            visibility=visibility,
            missing=desk.missing([name for name in agent.reads if "*" not in name]),
        )
        done = await app.ainvoke({"messages": [{"role": "user", "content": told}]}, context=runtime.context)
        said = [m for m in done["messages"] if isinstance(m, AIMessage) and not _made_by_middleware(m)]
        texts = [spoken(str(message.text)) for message in said]
        mine = [Turn(text=text, observation="", status="", over=i == len(texts)) for i, text in enumerate(texts, start=1)]
        summary = Summary(agent=agent.name, text=summary_of(texts))
        return {
            "turns": {**state["turns"], agent.name: mine},
            "files": desk.files(),
            "summaries": [*state["summaries"], summary],
        }

    return part


def _made_by_middleware(message: AIMessage) -> bool:
    """The limit's own notice is no word of the agent's."""
    return not message.response_metadata and not message.tool_calls and message.text.startswith("Model call limits exceeded")
