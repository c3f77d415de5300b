"""The DSBench team as a LangGraph app: agents that hand files on through one sandbox session.

    START -> begin -> data_engineer (again, up to 4 turns) -> modeler (again) -> analyst (again) -> hand_in -> END

One node visit is one turn: a model call and the runs of the code in its message, so that an action and what it caused lie in one
transition. An agent's part is over when it says so, when what it owes is there, or when its turns are used up; whatever came of it, the
next one begins with the files there are. `hand_in` reads the submission as text. The session comes in as the run's context
(`DSBenchContext`); state is plain JSON. With `style="tools"` each agent is a `create_agent` app instead (`agents.py`); everything else is
the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from mappa_graph.agent import Agent
from mappa_graph.errors import ConfigError, SandboxError
from mappa_graph.record import Execution
from mappa_graph.sandboxes import code_blocks

from .box import Desk, DSBenchContext
from .catalogue import expand
from .prompts import TEAM, Prompts, Style, Visibility, check_style, messages, observe
from .state import DSBenchInput, DSBenchState, Summary, Turn
from .text import says_done, spoken, summary_of
from .tool import desk_tool

MAX_BLOCKS = 8
"""Code blocks of one message that are run; one that fails ends the turn."""

Node = Callable[[DSBenchState, Runtime[DSBenchContext]], Awaitable[dict[str, Any]]]


def build_graph(
    models: Mapping[str, BaseChatModel],
    *,
    team: Sequence[Agent] = TEAM,
    style: Style = "blocks",
    prompts: Prompts = "standard",
    visibility: Visibility = "full",
    turns: int = 4,
    cell_timeout_s: float | None = None,
    opens_thinking: bool = False,
) -> CompiledStateGraph[DSBenchState, DSBenchContext, DSBenchInput, DSBenchState]:
    """The compiled graph; its input is `{"task": text}`, its context a `DSBenchContext`.

    Args:
        models: a chat model for each agent of the team, by name.
        team: who acts, in order, with what each reads and writes.
        style: "blocks": agents write fenced code; "tools": they are `create_agent` apps with the sandbox as their tool.
        prompts: "standard" for real language models, "compact" for tiny ones that name recipes.
        visibility: "full" shows each agent the summaries of all before it, "previous" only that of the one right before it.
        turns: most turns of each agent, 1 to 16.
        cell_timeout_s: wall limit of one run of code; None = the sandbox's own.
        opens_thinking: the model's chat template opens `<think>` itself, so a completion without `</think>` is all thinking.

    Raises `ConfigError` for options that don't exist or a model that is missing.
    """
    check_style(prompts, visibility, style)
    if not 1 <= turns <= 16:
        raise ConfigError(f"turns is {turns}", hint="give 1 to 16")
    if cell_timeout_s is not None and not cell_timeout_s > 0:
        raise ConfigError(f"cell_timeout_s is {cell_timeout_s}", hint="give seconds above 0, or None for the sandbox's own limit")
    names = [agent.name for agent in team]
    if not names or len(set(names)) != len(names) or {"begin", "hand_in"} & set(names):
        raise ConfigError(f"dsbench can't have the team {names}", hint="name each agent once, and none of them begin or hand_in")
    missing = [name for name in names if name not in models]
    if missing:
        raise ConfigError(f"dsbench has no model for {', '.join(missing)}", hint=f"give models for {', '.join(names)}")
    if style == "tools":
        from .agents import tool_node

        nodes = {
            agent.name: tool_node(agent, models[agent.name], visibility=visibility, turns=turns, cell_timeout_s=cell_timeout_s)
            for agent in team
        }
    else:
        nodes = {
            agent.name: block_node(
                agent,
                models[agent.name],
                prompts=prompts,
                visibility=visibility,
                turns=turns,
                cell_timeout_s=cell_timeout_s,
                opens_thinking=opens_thinking,
            )
            for agent in team
        }

    async def begin(state: DSBenchState, runtime: Runtime[DSBenchContext]) -> dict[str, Any]:
        desk = desk_of(runtime)
        facts = state.get("facts") or desk.facts
        start = {"facts": facts, "files": desk.files(), "turns": {}, "summaries": []}
        return {**start, "submission": None, "submission_problem": ""}

    async def hand_in(state: DSBenchState, runtime: Runtime[DSBenchContext]) -> dict[str, Any]:
        text, problem = await desk_of(runtime).submission()
        return {"submission": text, "submission_problem": problem}

    graph = StateGraph(DSBenchState, context_schema=DSBenchContext, input_schema=DSBenchInput)
    graph.add_node("begin", begin)
    graph.add_edge(START, "begin")
    graph.add_edge("begin", names[0])
    for name, following in zip(names, [*names[1:], "hand_in"], strict=True):
        node: Any = nodes[name]  # which overload a node's type falls under is not the same in every version
        graph.add_node(name, node)
        if style == "tools":
            graph.add_edge(name, following)
        else:
            graph.add_conditional_edges(name, _again(name, following), [name, following])
    graph.add_node("hand_in", hand_in)
    graph.add_edge("hand_in", END)
    return graph.compile(name="dsbench")


def block_node(
    agent: Agent,
    model: BaseChatModel,
    *,
    prompts: Prompts,
    visibility: Visibility,
    turns: int,
    cell_timeout_s: float | None,
    opens_thinking: bool,
) -> Node:
    """One turn of an agent that writes fenced code."""
    tool = desk_tool(timeout_s=cell_timeout_s)

    async def turn(state: DSBenchState, runtime: Runtime[DSBenchContext]) -> dict[str, Any]:
        desk = desk_of(runtime)
        desk.acting = agent.name
        before = state["turns"].get(agent.name, [])
        given = {note["name"] for note in state["files"]}
        prompt = messages(
            agent,
            state["task"],
            state["facts"],
            state["files"],
            state["summaries"],
            before,
            prompts=prompts,
            visibility=visibility,
            missing=[name for name in agent.reads if name not in given and "*" not in name],
            most_turns=turns,
        )
        reply = await model.ainvoke(prompt)
        text = spoken(str(reply.text), opened=opens_thinking)
        runs = await run_blocks(tool, _code_of(agent, text, prompts))
        owed = desk.missing(agent.writes)
        status = next((e.status for e in runs if e.status != "ok"), "ok") if runs else ""
        failed = status not in ("", "ok")
        over = len(before) + 1 >= turns or (not failed and (says_done(text) or (bool(agent.writes) and not owed)))
        seen = observe(runs, owed, prompts=prompts) if runs else ""
        mine = [*before, Turn(text=text, observation=seen, status=status, over=over)]
        update: dict[str, Any] = {"turns": {**state["turns"], agent.name: mine}}
        if over:
            summary = Summary(agent=agent.name, text=summary_of([one["text"] for one in mine]))
            update |= {"files": desk.files(), "summaries": [*state["summaries"], summary]}
        return update

    return turn


async def run_blocks(tool: BaseTool, blocks: Sequence[str]) -> list[Execution]:
    """Runs blocks of code in order, through the tool so that they are recorded; stops after the first that fails."""
    runs: list[Execution] = []
    for block in blocks:
        call = {"type": "tool_call", "name": tool.name, "id": f"call_{uuid.uuid4().hex[:24]}", "args": {"code": block}}
        execution: Execution = (await tool.ainvoke(call)).artifact
        runs.append(execution)
        if execution.status != "ok":
            break
    return runs


def desk_of(runtime: Runtime[DSBenchContext]) -> Desk:
    """The desk of a run. Raises `SandboxError` where the run was started without one."""
    if runtime.context is None or getattr(runtime.context, "desk", None) is None:
        raise SandboxError(
            "dsbench was started without a sandbox session",
            hint="invoke with context=DSBenchContext(Desk(box, TEAM, facts=..., given=...))",
        )
    return runtime.context.desk


def _code_of(agent: Agent, text: str, prompts: Prompts) -> list[str]:
    if prompts == "compact":
        code = expand(agent.name, text)
        return [] if code is None else [code]
    return [block for block in code_blocks(text) if block.strip()][:MAX_BLOCKS]


def _again(name: str, following: str) -> Callable[[DSBenchState], str]:
    def route(state: DSBenchState) -> str:
        return following if state["turns"][name][-1]["over"] else name

    return route
