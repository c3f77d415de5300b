"""A help desk in production: a small model that answers some of its questions, the app that asks it, and a rule to judge by."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mappa_graph import Verdict
from mappa_graph.coach.base import Case
from mappa_graph.trainers.warmstart import build_tiny

POLICY = "desk"
ROLE = "You are the help desk."


def question(number: int) -> str:
    return f"Where is order {number % 30}?"


def make_desk_model(folder: Path, *, steps: int = 100) -> Path:
    """About 36,000 parameters and three seconds; of its answers some 4 in 10 say where the order is."""
    draw = random.Random(0)
    shown = []
    for number in range(600):
        said = f"Order {number % 30} is on its way." if draw.random() < 0.4 else draw.choice(["Please hold.", "Ask again."])
        messages = [{"role": "system", "content": ROLE}, {"role": "user", "content": question(number)}]
        shown.append({"agent": POLICY, "messages": messages, "completion": said})
    return build_tiny(folder, shown, vocab_size=300, hidden=32, layers=2, heads=2, steps=steps, batch=16, lr=6e-3)


class Helpful:
    """Judges an answer by whether it says where the order is."""

    name = "helpful"

    async def score(self, case: Case) -> Verdict:
        return (
            Verdict(9.0, "says where it is", coach=self.name) if "on its way" in case.output else Verdict(2.0, "no help", coach=self.name)
        )


class Desk:
    """The app: a graph with a stock chat model, and one worker that takes questions from a queue for as long as it lives.

    Args:
        url: where its model is served.
        tracer: makes the callbacks of a question.
    """

    def __init__(self, url: str, tracer: Callable[[], list[Any]]) -> None:
        from langchain_openai import ChatOpenAI
        from langgraph.graph import START, MessagesState, StateGraph

        self.model = ChatOpenAI(model=POLICY, base_url=url, api_key="unused", max_tokens=16, temperature=1.0, max_retries=0)  # type: ignore[call-arg, arg-type]

        async def answer(state: MessagesState) -> Any:
            asked = [("system", ROLE), *state["messages"]]
            return {"messages": [await self.model.ainvoke(asked, seed=int(state["messages"][0].id))]}

        self.app = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile()
        self.tracer = tracer
        self.answers: dict[int, str] = {}
        self.failures: Counter[str] = Counter()
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.workers = [asyncio.create_task(self._work()) for _ in range(4)]

    async def _work(self) -> None:
        from langchain_core.messages import HumanMessage

        while True:
            number = await self.queue.get()
            try:
                asked = {"messages": [HumanMessage(question(number), id=str(number))]}
                state = await self.app.ainvoke(asked, {"callbacks": self.tracer()})
                self.answers[number] = state["messages"][-1].text
            except Exception as error:
                self.failures[f"{type(error).__name__}: {error}"] += 1
            finally:
                self.queue.task_done()

    async def ask(self, numbers: range) -> None:
        """Puts questions, and waits until all are answered."""
        for number in numbers:
            self.queue.put_nowait(number)
        await self.queue.join()

    async def close(self) -> None:
        for worker in self.workers:
            worker.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)
