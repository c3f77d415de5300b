"""Cases for coaches, and chat models that say what a script tells them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import PrivateAttr

from mappa_graph.coach.base import AgentCard, Case, Step
from mappa_graph.record import Action, Episode, EpisodeTrace, Execution, ExecutionErrorInfo, FileChange, Outcome, Transition

DS_TEAM = (
    AgentCard("engineer", "prepares the data", (), ("X_train.pkl", "y_train.pkl", "X_test.pkl")),
    AgentCard("modeler", "trains a model", ("X_train.pkl", "y_train.pkl"), ("model.pkl",)),
    AgentCard("analyst", "predicts and submits", ("X_test.pkl", "model.pkl"), ("submission.csv",)),
)
MATH_TEAM = (AgentCard("solver", "plans"), AgentCard("executor", "runs code"), AgentCard("verifier", "gives the answer"))


def ran(
    status: str = "ok",
    *,
    stdout: str = "",
    error: tuple[str, str] | None = None,
    writes: Sequence[str] = (),
    deletes: Sequence[str] = (),
    **more: Any,
) -> Execution:
    """An execution; `error` is (type, message), and makes the status "error" unless one is given."""
    info = ExecutionErrorInfo(*error, traceback=f"Traceback\n{error[0]}: {error[1]}") if error else None
    files = (*(FileChange(p, "created", 10, "aa") for p in writes), *(FileChange(p, "deleted") for p in deletes))
    if error and status == "ok":
        status = "error"
    return Execution("x", status, stdout=stdout, error=info, files=files, **more)  # type: ignore[arg-type]


def act(id: str, agent: str, order: int, output: str = "", *executions: Execution, **more: Any) -> Action:
    more.setdefault("transition_id", f"t-{id}")
    return Action(id=id, agent=agent, policy=agent, order=order, output=output, executions=executions, **more)


def trace(*actions: Action, **episode: Any) -> EpisodeTrace:
    episode = {"id": "e1", "task": "Sum the price column.", **episode}
    transitions = [Transition(a.transition_id, a.agent, a.agent, a.order) for a in actions]
    return EpisodeTrace(Episode(**episode), tuple(transitions), actions)


def make_case(action_id: str = "act-b", **more: Any) -> Case:
    """A case of the middle one of three actions."""
    return Case(
        **{
            "action_id": action_id,
            "episode_id": "e1",
            "environment": "test",
            "task": "Sum the price column.",
            "team": MATH_TEAM,
            "agent": "executor",
            "turn": 0,
            "messages": ({"role": "system", "content": "You run code."}, {"role": "user", "content": "plan: add all prices"}),
            "output": "I ran the code and got 42.",
            "executions": (ran(stdout="42\n", code="print(df.price.sum())"),),
            "before": (Step("act-a", "solver", "plan: add all prices"),),
            **more,
        }
    )


def episode_cases(n: int = 3, **more: Any) -> list[Case]:
    """Cases in hindsight of an episode of `n` actions by the math team's members in turn, ids act-0, act-1, …"""
    agents = [MATH_TEAM[i % 3].name for i in range(n)]
    steps = [Step(f"act-{i}", agent, f"what action {i} of the {agent} says") for i, agent in enumerate(agents)]
    return [
        make_case(
            f"act-{i}",
            agent=agents[i],
            output=steps[i].output,
            before=tuple(steps[:i]),
            after=tuple(steps[i + 1 :]),
            outcome=Outcome(True, "right"),
            **more,
        )
        for i in range(n)
    ]


def verdict_json(score: Any = 7, reason: str = "the printed total is what the task asks for", **more: Any) -> str:
    return json.dumps({"reason": reason, "score": score, "blame": [], "better_action": None, **more})


def verdicts_json(*scores: tuple[str, Any]) -> str:
    entries = [
        {"action": name, "reason": f"what {name} did is fine by the evidence", "score": s, "blame": [], "better_action": None}
        for name, s in scores
    ]
    return json.dumps({"verdicts": entries})


Line = str | AIMessage | Exception | Callable[[Sequence[BaseMessage]], Any]


class ScriptedModel(BaseChatModel):
    """Says its lines in order, the last one for ever; no structured output. An exception as a line is raised."""

    lines: list[Any]
    _heard: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def heard(self) -> list[list[BaseMessage]]:
        return self._heard

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        line = self.lines[min(len(self._heard), len(self.lines) - 1)]
        self._heard.append(messages)
        if callable(line):
            line = line(messages)
        if isinstance(line, Exception):
            raise line
        message = line if isinstance(line, AIMessage) else AIMessage(line)
        return ChatResult(generations=[ChatGeneration(message=message)])


class ToolModel(ScriptedModel):
    """The same with structured output: its lines are the arguments of a tool call (or whole messages)."""

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        return self


def call(args: Any, name: str = "verdict", id: str = "c1") -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": id}])
