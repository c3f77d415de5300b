"""Who acts: `Agent`; and how a chat model says so: `mark`, `Policy`.

A mark lies in the metadata that a chat model was constructed with. There it survives `bind_tools`, structured output, retries and
the agents that LangChain builds; metadata given with `with_config` is dropped by some of these without a word. `Policy` is loaded
on first use, so that an `Agent` costs no import of an OpenAI client.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigError

if TYPE_CHECKING:
    from .policy import Policy

M = TypeVar("M")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_name(what: str, value: str) -> str:
    """The name, which can be a model's and a folder's. Raises `ConfigError`."""
    if not _NAME.fullmatch(value) or ".." in value or len(value) > 100:
        raise ConfigError(
            f"{what} name {value!r} is not a valid name", hint="letters, digits, '_', '.', '-', no '@' or spaces, at most 100"
        )
    return value


@dataclass(frozen=True)
class Agent:
    """A member of the team.

    `name` is also the model name its calls carry. `role` is what the coach is told. `reads` and `writes` are the artifacts (file
    names) it owes to the team. Agents that name the same `policy` share one set of weights; an agent with `trainable=False` acts
    and is scored, and its weights stay.
    """

    name: str
    role: str = ""
    policy: str | None = None
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    trainable: bool = True

    def __post_init__(self) -> None:
        for what, value in (("agent", self.name), ("policy", self.policy)):
            if value is not None:
                check_name(what, value)

    @property
    def policy_name(self) -> str:
        return self.policy or self.name


def marks(agent: Agent) -> dict[str, Any]:
    """The metadata that names an agent on a model's runs."""
    out: dict[str, Any] = {"mappa_agent": agent.name, "mappa_policy": agent.policy_name}
    if agent.role:
        out["mappa_role"] = agent.role
    if not agent.trainable:
        out["mappa_trainable"] = False
    return out


def mark(model: M, agent: Agent | str, *, role: str = "", policy: str | None = None, trainable: bool = True) -> M:
    """A copy of a chat model whose calls are `agent`'s.

    Takes any LangChain chat model, also one with tools bound to it. Raises `ConfigError` for what holds no chat model that could
    carry the mark (a prompt chain, the result of `with_structured_output`): mark the model first, then build on it.
    """
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.runnables import RunnableBinding

    if isinstance(agent, Agent):
        if role or policy is not None or not trainable:
            raise ConfigError(f"agent {agent.name!r} was given with role, policy or trainable beside it", hint="put them in the Agent")
    else:
        agent = Agent(agent, role=role, policy=policy, trainable=trainable)
    if isinstance(model, RunnableBinding):
        return model.model_copy(update={"bound": mark(model.bound, agent)})
    if not isinstance(model, BaseLanguageModel):
        raise ConfigError(
            f"a {type(model).__name__} can't carry the mark of agent {agent.name!r}",
            hint="mark the chat model itself, before bind_tools, with_structured_output or a chain",
        )
    return model.model_copy(update={"metadata": {**(model.metadata or {}), **marks(agent)}})


def __getattr__(name: str) -> Any:
    if name == "Policy":
        from .policy import Policy

        return Policy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Agent", "Policy", "mark", "marks"]
