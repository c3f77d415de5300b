"""What the callback's tests share: models that reach a fake server, a coach that keeps its cases, and one recorded run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypedDict
from uuid import UUID, uuid4

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from mappa_graph import CoachCallback, Execution, Verdict
from mappa_graph.client import LoopClient
from mappa_graph.coach.base import Case
from mappa_graph.record import Episode, EpisodeTrace

from .openai_server import OpenAIServer, Reply


class Words(TypedDict):
    words: Annotated[list[str], operator.add]


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@tool(response_format="content_and_artifact")
def run_code(code: str) -> tuple[str, Execution]:
    """Runs code."""
    return "out", Execution("exec-1", "ok", "python", code, stdout="out\n")


class Tens:
    """Gives ten to all it is asked about, and keeps the cases."""

    name = "tens@1"

    def __init__(self) -> None:
        self.cases: list[Case] = []

    async def score(self, case: Case) -> Verdict:
        self.cases.append(case)
        return Verdict(10.0)


class Numbered:
    """Says `<model> <how manieth call of this model>`, so that every reply is another."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def __call__(self, body: dict[str, Any]) -> str:
        n = self.count[body["model"]] = self.count.get(body["model"], 0) + 1
        return f"{body['model']} {n}"


def scripted(**lines: Sequence[Reply]) -> Callable[[dict[str, Any]], Reply]:
    """Replies in order, by model."""
    left = {model: iter(replies) for model, replies in lines.items()}
    return lambda body: next(left[body["model"]])


def asks(*calls: Mapping[str, Any], text: str = "") -> dict[str, Any]:
    """A reply with tool calls."""
    return {"content": text, "tool_calls": list(calls)}


def chat(server: OpenAIServer, model: str, **kwargs: Any) -> ChatOpenAI:
    """A stock client, as an app has it."""
    kwargs.setdefault("http_async_client", LoopClient())  # a later server may get this one's port, and langchain would reuse its client
    return ChatOpenAI(model=model, base_url=server.url, api_key="x", max_retries=0, **kwargs)


async def record(app: Any, state: Any, callback: CoachCallback, **config: Any) -> EpisodeTrace:
    """One begun and finished episode."""
    id = str(uuid4())
    callback.begin(Episode(id, task="the task"))
    await app.ainvoke(state, {"callbacks": [callback], "run_id": UUID(id), **config})
    return await callback.finish(id)
