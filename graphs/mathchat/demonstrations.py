"""What an imperfect team would have said: texts for the supervised warm start of a tiny model.

Each demonstration is one action in an episode of a made-up team that gets every action wrong with probability `imperfection`, in ways that
a coach can tell apart from good work. Prompts come from the same functions as the graph's, contexts hold the mistakes made upstream, and
tasks come from the training split only. Each agent's most frequent mistake is made more often than the right thing is done, so that
neither sampling nor greedy decoding solves much before training; a team of nothing but right actions solves everything.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from mappa_graph.environment import Task
from mappa_graph.errors import ConfigError
from mappa_graph.record import Execution, ExecutionErrorInfo
from mappa_graph.sandboxes import code_blocks

from .arithmetic import evaluate, plain
from .prompts import Message, Style, Turn, Visibility, check_style, executor_messages, observe, solver_messages, verifier_messages
from .tasks import LEVELS, word_problems

MISTAKES: Mapping[str, Mapping[str, float]] = {
    "solver": {"operation": 0.80, "operand": 0.10, "number": 0.06, "no plan": 0.04},
    "executor": {"no print": 0.80, "parenthesis": 0.08, "open fence": 0.05, "number": 0.07},
    "executor after output": {"no result": 0.80, "number": 0.10, "code again": 0.10},
    "executor after failure": {"same code": 0.80, "gives up": 0.20},
    "verifier": {"no box": 0.80, "number": 0.14, "empty box": 0.06},
}
"""The mistakes of each agent and their shares of all its mistakes."""


class Demonstration(TypedDict):
    agent: str
    """solver, executor or verifier."""
    messages: list[Message]
    completion: str
    mode: str
    """"good", or the name of the mistake."""
    task_id: str


def demonstrations(
    n: int,
    seed: int = 0,
    imperfection: float = 0.6,
    *,
    levels: Sequence[int] = LEVELS,
    visibility: Visibility = "full",
    style: Style = "compact",
) -> list[Demonstration]:
    """`n` demonstrations, all agents mixed, a fixed function of the arguments.

    `imperfection` is the share (0..1) of actions that are wrong or malformed. Raises `ConfigError` for values out of range.
    """
    check_style(style, visibility)
    if not 0.0 <= imperfection <= 1.0:
        raise ConfigError(f"imperfection is {imperfection}", hint="give a share from 0 to 1")
    rng = random.Random(f"demonstrations/{seed}")
    made: list[Demonstration] = []
    for task in word_problems("train", -(-n // 3), seed, levels):
        made += episode(task, rng, imperfection, visibility=visibility, style=style)
    return made[:n]


def episode(
    task: Task,
    rng: random.Random,
    imperfection: float | Mapping[str, float],
    *,
    visibility: Visibility = "full",
    style: Style = "compact",
) -> Iterator[Demonstration]:
    """The actions of one episode of the imperfect team, in order. A mapping gives the imperfection by kind of action, as in `MISTAKES`."""

    def mode(kind: str) -> str:
        share = imperfection if isinstance(imperfection, int | float) else imperfection.get(kind, 0.0)
        if rng.random() >= share:
            return "good"
        return rng.choices(list(MISTAKES[kind]), list(MISTAKES[kind].values()))[0]

    def demonstration(agent: str, messages: list[Message], said: tuple[str, str]) -> Demonstration:
        return Demonstration(agent=agent, messages=messages, completion=said[1], mode=said[0], task_id=task.id)

    said = _plan(mode("solver"), task.data["expression"], rng)
    plan = said[1]
    yield demonstration("solver", solver_messages(task.prompt, style=style), said)

    said = _code(mode("executor"), plan, rng)
    yield demonstration("executor", executor_messages(task.prompt, plan, style=style), said)
    turns = [run(said[1], style)]
    if turns[0]["observation"]:
        printed = _printed(turns)
        said = _result(mode("executor after output"), turns, rng) if printed else _repair(mode("executor after failure"), plan, turns, rng)
        yield demonstration("executor", executor_messages(task.prompt, plan, turns, style=style), said)
        turns.append(run(said[1], style))

    said = _final(mode("verifier"), turns, rng)
    yield demonstration("verifier", verifier_messages(task.prompt, plan, turns, style=style, visibility=visibility), said)


def run(completion: str, style: Style = "compact") -> Turn:
    """The executor's turn with this completion."""
    made = executions(completion)
    status = next((e.status for e in made if e.status != "ok"), "ok") if made else ""
    return Turn(text=completion, observation=observe(made, style=style), status=status)


def executions(completion: str) -> list[Execution]:
    """What the sandbox would answer to the kinds of program that the demonstrations hold; nothing is executed."""
    return [_execute(block) for block in code_blocks(completion)]


def _execute(code: str) -> Execution:
    try:
        statement = ast.parse(code).body[0]
    except SyntaxError as error:
        return Execution("", "error", code=code, error=ExecutionErrorInfo("SyntaxError", error.msg))
    if isinstance(statement, ast.Assign):
        return Execution("", "ok", code=code)
    match = re.fullmatch(r"print\((.*)\)", code)
    value = evaluate(match.group(1)) if match else None
    if value is None:
        return Execution("", "error", code=code, error=ExecutionErrorInfo("NameError", "not arithmetic"))
    return Execution("", "ok", code=code, stdout=f"{plain(value)}\n")


def _plan(mode: str, expression: str, rng: random.Random) -> tuple[str, str]:
    tokens = expression.split()
    if mode == "operand" and len(tokens) < 5:
        mode = "operation"
    if mode == "operation":
        last = max(i for i, token in enumerate(tokens) if token in "+-*")
        tokens[last] = "-" if tokens[last] == "+" else "+"
    elif mode == "operand":
        tokens = " ".join(tokens[:-2]).replace("(", "").replace(")", "").split()
    elif mode == "number":
        return mode, f"plan: {_misread(expression, rng)}"
    elif mode == "no plan":
        return mode, "plan: add them"
    return mode, f"plan: {' '.join(tokens)}"


def _code(mode: str, plan: str, rng: random.Random) -> tuple[str, str]:
    expression = plan.removeprefix("plan: ")
    if mode == "number":
        expression = _misread(expression, rng)
    line = {"no print": f"x = {expression}", "parenthesis": f"print({expression}"}.get(mode, f"print({expression})")
    return mode, f"```python\n{line}" + ("" if mode == "open fence" else "\n```")


def _result(mode: str, turns: Sequence[Turn], rng: random.Random) -> tuple[str, str]:
    printed = _printed(turns)
    if mode == "no result":
        return mode, "done"
    if mode == "code again":
        return mode, turns[-1]["text"]
    return mode, f"result: {_misread(printed, rng) if mode == 'number' else printed}"


def _repair(mode: str, plan: str, turns: Sequence[Turn], rng: random.Random) -> tuple[str, str]:
    if evaluate(plan.removeprefix("plan: ")) is None:
        return mode, "result: none"
    if mode == "gives up":
        return mode, "result: none"
    if mode == "same code":
        return mode, turns[-1]["text"]
    return mode, _code("good", plan, rng)[1]


def _final(mode: str, turns: Sequence[Turn], rng: random.Random) -> tuple[str, str]:
    answer = _printed(turns) or "none"
    if mode == "no box":
        return mode, f"answer: {answer}"
    if mode == "number":
        answer = _misread(answer, rng)
    return mode, f"\\boxed{{{'' if mode == 'empty box' else answer}}}"


def _printed(turns: Sequence[Turn]) -> str:
    """The last number that a program printed, "" where none did."""
    outputs = [t["observation"].removeprefix("output: ") for t in turns if t["observation"].startswith("output: ")]
    return outputs[-1] if outputs else ""


def _misread(text: str, rng: random.Random) -> str:
    """`text` with one digit changed; without a digit, "0"."""
    places = [i for i, c in enumerate(text) if c.isdigit()]
    if not places:
        return "0"
    place = rng.choice(places)
    digit = rng.choice([d for d in "123456789" if d != text[place]])
    return text[:place] + digit + text[place + 1 :]


def team_accuracy(n: int, seed: int = 0, imperfection: float | Mapping[str, float] = 0.6, *, levels: Sequence[int] = LEVELS) -> float:
    """The share of `n` episodes of the imperfect team that end in the right answer: what a perfect imitator would reach."""
    rng = random.Random(f"team/{seed}")
    right = 0
    for task in word_problems("train", n, seed, levels):
        last = list(episode(task, rng, imperfection))[-1]
        right += last["completion"] == f"\\boxed{{{task.reference}}}"
    return right / n


def statistics(made: Sequence[Demonstration]) -> Mapping[str, Any]:
    """How often each agent did what, for a log: `{agent: {mode: share}}`."""
    counts: dict[str, dict[str, float]] = {}
    for one in made:
        modes = counts.setdefault(one["agent"], {})
        modes[one["mode"]] = modes.get(one["mode"], 0) + 1
    return {agent: {mode: count / sum(modes.values()) for mode, count in modes.items()} for agent, modes in counts.items()}


def demo_demonstrations(n: int, seed: int = 0) -> list[Demonstration]:
    """The demonstrations that the demo's model is made of: what model "tiny" means where an environment brings none of its own."""
    return demonstrations(n, seed, levels=(1, 2), visibility="previous")
