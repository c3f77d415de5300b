"""`Policy`: a `ChatOpenAI` that reaches a policy through the gateway and says which agent is calling."""

from __future__ import annotations

from typing import Any

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from .agent import Agent, marks
from .client import LoopClient


class Policy(ChatOpenAI):
    """A chat model for one agent; use it wherever a chat model goes.

    The mark is in the constructor's metadata, where `bind_tools`, `with_structured_output`, retries and `create_agent` keep it. Replies
    are not cached: a cached reply would be counted as an action that the policy did not take.

    Args:
        name: of the agent.
        base_url: the gateway's, `http://…/v1`.
        role: what a coach is told the agent is there for.
        policy: the weights it uses; default: its own, named as it is.
        trainable: whether its weights learn.
        chat_openai_kwargs: temperature, timeout, … as for `ChatOpenAI`.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        role: str = "",
        policy: str | None = None,
        api_key: str = "unused",
        trainable: bool = True,
        **chat_openai_kwargs: Any,
    ) -> None:
        agent = Agent(name, role=role, policy=policy, trainable=trainable)
        settings = {"model": agent.policy_name, "cache": False, **chat_openai_kwargs}
        settings.setdefault("http_async_client", LoopClient())
        settings["metadata"] = {**(settings.get("metadata") or {}), **marks(agent)}
        settings["default_headers"] = {"x-mappa-agent": name, **(settings.get("default_headers") or {})}
        super().__init__(base_url=base_url, api_key=SecretStr(api_key), **settings)
