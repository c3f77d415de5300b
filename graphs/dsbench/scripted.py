"""Scripted teams: policies without a model, one that works on any task and one for each planted fault.

They speak through a real gateway: `ScriptedEngine` answers requests in place of a model, its tokens are the bytes of what it says, each
with probability 1. So graph, sandbox, recording, coach and grading can be watched, and checked, without weights: the good team must
succeed, and each fault must be blamed on the agent that made it.

    engine = ScriptedEngine(script("good"))
    async with Gateway(engine, store) as gateway: ...
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mappa_graph.errors import ConfigError, EngineError
from mappa_graph.gateway import Chunk, Completion, Request

from .catalogue import CATALOGUE, right
from .facts import Facts
from .prompts import AGENTS
from .text import DONE

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Line:
    """What an agent says in one turn: words, and the code it wants to be run ("" = none)."""

    words: str
    code: str = ""


Script = Callable[[str, Messages], Line]
"""`script(agent, messages) -> Line`."""


@dataclass(frozen=True)
class Fault:
    """A planted fault: who makes it, and what that agent says in each turn (the last line again from then on)."""

    agent: str
    lines: tuple[Line, ...]
    about: str


def _recipe(agent: str, name: str, words: str) -> Line:
    return Line(words, CATALOGUE[agent][name])


_DONE = f"\n{DONE}"
FAULTS: Mapping[str, Fault] = {
    "forgets X_test": Fault(
        "data_engineer", (_recipe("data_engineer", "no test", f"The training data are ready.{_DONE}"),), "writes X_train and y_train only"
    ),
    "another name": Fault(
        "data_engineer", (_recipe("data_engineer", "other names", f"All data are saved.{_DONE}"),), "saves under names nobody asked for"
    ),
    "trains on the id": Fault(
        "data_engineer", (_recipe("data_engineer", "with id", "All columns are used."),), "keeps the id as a feature"
    ),
    "leaks the target": Fault(
        "data_engineer", (_recipe("data_engineer", "with target", "Added one strong feature."),), "puts the target among the features"
    ),
    "wrong columns": Fault(
        "analyst", (_recipe("analyst", "other columns", "The predictions are saved."),), "names the submission's columns as it likes"
    ),
    "crashes": Fault(
        "modeler",
        tuple(
            Line(f"Try {n}.", f"# try {n}\n" + CATALOGUE["modeler"]["crash"].replace("not_there", f"not_there_{n}")) for n in range(1, 5)
        ),
        "uses a column that does not exist, turn after turn",
    ),
    "loops": Fault("modeler", (_recipe("modeler", "look", "Let me look at the data."),), "prints the same tables in every turn"),
    "writes prose": Fault(
        "analyst", (Line("The model should now predict all test rows, and I expect good results."),), "writes no code at all"
    ),
}
"""By name."""

_KIND = re.compile(r"\((classification|regression)[,)]")
_FORM = re.compile(r"^Each prediction is a (\w+)", re.MULTILINE)
_NOT_FOUND = re.compile(r"No such file or directory: '([^'\n]{1,100})'")


def script(name: str = "good") -> Script:
    """The script of a team: "good", or the name of one of `FAULTS`. Raises `ConfigError` for another."""
    if name != "good" and name not in FAULTS:
        raise ConfigError(f"there is no scripted team {name!r}", hint=f"there are: good, {', '.join(FAULTS)}")
    fault = FAULTS.get(name)

    def say(agent: str, messages: Messages) -> Line:
        turn = sum(message["role"] == "assistant" for message in messages)
        if fault is not None and agent == fault.agent:
            return fault.lines[min(turn, len(fault.lines) - 1)]
        return good(agent, turn, messages)

    return say


def good(agent: str, turn: int, messages: Messages) -> Line:
    """What a good agent says: its code, and after an error what stopped it."""
    told = "\n".join(_text(message) for message in messages if message["role"] == "user")
    if turn:
        missing = _NOT_FOUND.search(_text(messages[-1]))
        why = f"{missing[1]} is missing, so I can't go on." if missing else "I could not do my part."
        return Line(f"{why}{_DONE}")
    kind, form = _KIND.search(told), _FORM.search(told)
    facts = Facts(kind=kind[1] if kind else "classification", form=form[1] if form else "label")
    name = right(agent, facts)
    return _recipe(agent, name, f"Did my part of the {facts['kind']} task: {name}.")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


@dataclass
class ScriptedEngine:
    """An engine whose policies follow a script.

    Code goes out as a fenced block or, where the request offers tools, as a call of the first of them.
    """

    script: Script
    policies: Sequence[str] = AGENTS
    name: ClassVar[str] = "scripted"
    _loaded: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._loaded = {policy: [0] for policy in self.policies}

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to free."""

    def models(self) -> Mapping[str, Sequence[int]]:
        return self._loaded

    async def load(self, policy: str, version: int, weights: Path) -> None:
        raise EngineError("a scripted team has no weights to load")

    async def unload(self, policy: str, version: int) -> None:
        raise EngineError("a scripted team has no weights to unload")

    async def complete(self, request: Request) -> Sequence[Completion]:
        return [self._completion(request, index) for index in range(request.n)]

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        for index in range(request.n):
            made = self._completion(request, index)
            delta: dict[str, Any] = {"content": made.text}
            if made.tool_calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(made.tool_calls)]
            yield Chunk(index, delta, made.completion_ids, made.logprobs, made.prompt_ids, made.finish_reason)

    async def score(
        self, policy: str, version: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        return [0.0] * len(completion_ids)

    def _completion(self, request: Request, index: int) -> Completion:
        line = self.script(request.policy, request.messages)
        calls: tuple[Mapping[str, Any], ...] = ()
        text = line.words
        if line.code and request.tools:
            tool = request.tools[0]["function"]["name"]
            turn = sum(message["role"] == "assistant" for message in request.messages)
            arguments = json.dumps({"code": line.code})
            calls = ({"id": f"call_{turn}", "type": "function", "function": {"name": tool, "arguments": arguments}},)
        elif line.code:
            text = f"{line.words}\n```python\n{line.code.rstrip()}\n```"
        said = (text + line.code * bool(calls)).encode()
        return Completion(
            index,
            prompt_ids=tuple(json.dumps(list(request.messages), default=str).encode()),
            completion_ids=(*said, 0),
            logprobs=(0.0,) * (len(said) + 1),
            text=text,
            finish_reason="tool_calls" if calls else "stop",
            tool_calls=calls,
        )
