"""The MathChat team as a plain LangGraph app: Problem Solver, Code Executor, Verifier.

    START -> solver -> executor (again, once its code was run) -> verifier -> END

One node visit is one turn: a model call, and in the executor's the run of the code it wrote, through the sandbox's LangChain tool,
so that an action and what it caused lie in one transition. Nothing in here knows of training. The sandbox session comes in as the
run's `context`; state is plain JSON and holds each agent's words without its thinking. Imports are absolute, because `langgraph.json`
loads this file by its path.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from pydantic import SecretStr

from mappa_graph.errors import ConfigError, SandboxError
from mappa_graph.graphs.mathchat.box import Leases, MathChatContext, OnDemandPool, Pool
from mappa_graph.graphs.mathchat.grading import boxed
from mappa_graph.graphs.mathchat.prompts import (
    AGENTS,
    Style,
    Turn,
    Visibility,
    check_style,
    executor_messages,
    observe,
    solver_messages,
    verifier_messages,
)
from mappa_graph.graphs.mathchat.state import MathChatInput, MathChatState
from mappa_graph.graphs.mathchat.text import spoken
from mappa_graph.record import Execution
from mappa_graph.sandboxes import SandboxPool, code_blocks, python_tool

BASE_URL = "http://127.0.0.1:8000/v1"
MAX_BLOCKS = 8
"""Code blocks of one completion that are run; one that fails ends the turn."""


def build_graph(
    models: Mapping[str, BaseChatModel] | None = None,
    *,
    visibility: Visibility = "full",
    prompts: Style = "standard",
    executor_turns: int = 2,
    cell_timeout_s: float | None = None,
    opens_thinking: bool = False,
    sandbox: Pool | None = None,
) -> CompiledStateGraph[MathChatState, MathChatContext, MathChatInput, MathChatState]:
    """The compiled graph; its input is `{"problem": text}`.

    Args:
        models: a chat model for each of "solver", "executor", "verifier"; None = from the environment, see `models_from_environment`.
        visibility: "full" shows each agent all that came before it, "previous" only the problem and the agent before it.
        prompts: "standard" for real language models, "compact" for tiny ones.
        executor_turns: most turns of the executor; a further turn needs code that was run.
        cell_timeout_s: wall limit of one run of code; None = the sandbox's own.
        opens_thinking: the model's chat template opens `<think>` itself, so a completion without `</think>` is all thinking.
        sandbox: an open pool, used where the run's context holds no session.

    Raises `ConfigError` for options that don't exist or a model that is missing.
    """
    check_style(prompts, visibility)
    if not 1 <= executor_turns <= 8:
        raise ConfigError(f"executor_turns is {executor_turns}", hint="give 1 to 8")
    if cell_timeout_s is not None and not cell_timeout_s > 0:
        raise ConfigError(f"cell_timeout_s is {cell_timeout_s}", hint="give seconds above 0, or None for the sandbox's own limit")
    team = models_from_environment() if models is None else models
    missing = [agent for agent in AGENTS if agent not in team]
    if missing:
        raise ConfigError(f"mathchat has no model for {', '.join(missing)}", hint=f"give models for {', '.join(AGENTS)}")
    own = None if sandbox is None else Leases(sandbox)

    async def say(agent: str, messages: list[dict[str, str]]) -> str:
        reply = await team[agent].ainvoke(messages)
        return spoken(str(reply.text), opened=opens_thinking)

    async def solver(state: MathChatState) -> dict[str, Any]:
        plan = await say("solver", solver_messages(state["problem"], style=prompts))
        return {"plan": plan, "turns": [], "final": "", "answer": None, "session": uuid.uuid4().hex}

    async def executor(state: MathChatState, runtime: Runtime[MathChatContext]) -> dict[str, Any]:
        turns = state["turns"]
        done = False
        try:
            text = await say("executor", executor_messages(state["problem"], state["plan"], turns, style=prompts))
            blocks = [block for block in code_blocks(text) if block.strip()][:MAX_BLOCKS]
            runs = await run(blocks, await session(state, runtime)) if blocks else []
            status = next((e.status for e in runs if e.status != "ok"), "ok") if runs else ""
            turns = [*turns, Turn(text=text, observation=observe(runs, style=prompts) if runs else "", status=status)]
            done = after_turn(turns) == "verifier"
        except BaseException:
            done = True
            raise
        finally:
            if done and own is not None:
                await own.release(state["session"])
        return {"turns": turns}

    async def verifier(state: MathChatState) -> dict[str, Any]:
        messages = verifier_messages(state["problem"], state["plan"], state["turns"], style=prompts, visibility=visibility)
        final = await say("verifier", messages)
        return {"final": final, "answer": boxed(final)}

    async def session(state: MathChatState, runtime: Runtime[MathChatContext]) -> Any:
        box = runtime.context.box if runtime.context is not None else None
        if box is not None:
            return box
        if own is None:
            raise SandboxError(
                "the executor wrote code, and mathchat has no sandbox to run it in",
                hint="invoke with context=MathChatContext(box), or build_graph(..., sandbox=an open SandboxPool)",
            )
        return await own.box(state["session"])

    async def run(blocks: list[str], box: Any) -> list[Execution]:
        tool = python_tool(box, timeout_s=cell_timeout_s)
        runs: list[Execution] = []
        for block in blocks:
            call = {"type": "tool_call", "name": tool.name, "id": f"call_{uuid.uuid4().hex[:24]}", "args": {"code": block}}
            execution = (await tool.ainvoke(call)).artifact
            runs.append(execution)
            if execution.status != "ok":
                break
        return runs

    def after_turn(turns: list[Turn]) -> Literal["executor", "verifier"]:
        return "executor" if turns[-1]["status"] and len(turns) < executor_turns else "verifier"

    def again(state: MathChatState) -> Literal["executor", "verifier"]:
        return after_turn(state["turns"])

    graph = StateGraph(MathChatState, context_schema=MathChatContext, input_schema=MathChatInput)
    graph.add_node("solver", solver)
    graph.add_node("executor", executor)
    graph.add_node("verifier", verifier)
    graph.add_edge(START, "solver")
    graph.add_edge("solver", "executor")
    graph.add_conditional_edges("executor", again)
    graph.add_edge("verifier", END)
    return graph.compile(name="mathchat")


def models_from_environment(environ: Mapping[str, str] | None = None) -> dict[str, BaseChatModel]:
    """A `ChatOpenAI` for each agent.

    `MAPPA_BASE_URL` is the server (default: port 8000 of this host), `MAPPA_API_KEY` its key, and `MAPPA_MODEL_SOLVER`, `…_EXECUTOR`,
    `…_VERIFIER` or, for all, `MAPPA_MODEL` the models' names; without them each agent calls the model of its own name.
    """
    environ = os.environ if environ is None else environ
    return {
        agent: ChatOpenAI(
            model=environ.get(f"MAPPA_MODEL_{agent.upper()}") or environ.get("MAPPA_MODEL") or agent,
            base_url=environ.get("MAPPA_BASE_URL") or BASE_URL,
            api_key=SecretStr(environ.get("MAPPA_API_KEY") or "unused"),
            metadata={"mappa_agent": agent},
        )
        for agent in AGENTS
    }


def make_graph() -> CompiledStateGraph[MathChatState, MathChatContext, MathChatInput, MathChatState]:
    """The graph as `langgraph.json` loads it: models from environment variables, a sandbox pool that starts with the first code.

    `MAPPA_VISIBILITY` and `MAPPA_PROMPTS` set those two options.
    """

    visibility: Any = os.environ.get("MAPPA_VISIBILITY") or "full"
    prompts: Any = os.environ.get("MAPPA_PROMPTS") or "standard"
    return build_graph(visibility=visibility, prompts=prompts, sandbox=OnDemandPool(SandboxPool))
