"""An engine without a model: answers at once with fixed tokens, or holds its calls until they are let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mappa_graph.errors import EngineError
from mappa_graph.gateway import Chunk, Completion, Request


class ScriptedEngine:
    """`answer(request)` makes the completions' fields; `gate`, where set, is awaited by every call before it ends."""

    name: ClassVar[str] = "scripted"

    def __init__(self, *policies: str, answer: Callable[[Request], Mapping[str, Any]] | None = None) -> None:
        self.answer = answer or (lambda _: {})
        self.loaded: dict[str, list[int]] = {policy: [0] for policy in policies or ("solver",)}
        self.requests: list[Request] = []
        self.events: list[str] = []
        self.cancelled = 0
        self.hold = False
        self.score_offset = 0.0
        self._gates: list[asyncio.Event] = []

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self) -> None:
        self.events.append("stop")

    def models(self) -> Mapping[str, Sequence[int]]:
        return self.loaded

    async def load(self, policy: str, version: int, weights: Path) -> None:
        await asyncio.sleep(0)
        if weights.name == "broken":
            raise EngineError(f"the weights in {weights} can't be loaded")
        self.loaded[policy].append(version)
        self.events.append(f"load {policy}@v{version}")

    async def unload(self, policy: str, version: int) -> None:
        self.loaded[policy].remove(version)
        self.events.append(f"unload {policy}@v{version}")

    def release(self) -> None:
        """Lets the held calls end; call it on any thread."""
        self.hold = False
        for gate in self._gates:
            gate._loop.call_soon_threadsafe(gate.set)  # type: ignore[attr-defined]

    async def _pass(self) -> None:
        if self.hold:
            gate = asyncio.Event()
            gate._loop = asyncio.get_running_loop()  # type: ignore[attr-defined]
            self._gates.append(gate)
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    def _completion(self, request: Request, index: int) -> Completion:
        fields: dict[str, Any] = {
            "prompt_ids": (1, 2, 3), "completion_ids": (4, 5), "logprobs": (-0.5, -0.25), "text": "hello there", "finish_reason": "stop",
        }  # fmt: skip
        return Completion(index=index, **{**fields, **self.answer(request)})

    async def complete(self, request: Request) -> Sequence[Completion]:
        self.requests.append(request)
        await self._pass()
        return [self._completion(request, i) for i in range(request.n)]

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        for index in range(request.n):
            made = self._completion(request, index)
            half = len(made.text) // 2
            yield Chunk(index, {"content": made.text[:half]}, made.completion_ids[:1], made.logprobs[:1], made.prompt_ids)
            await self._pass()
            yield Chunk(index, {"content": made.text[half:]}, made.completion_ids[1:], made.logprobs[1:], finish_reason=made.finish_reason)

    async def score(
        self, policy: str, version: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        return [-1.0 + self.score_offset] * len(completion_ids)
