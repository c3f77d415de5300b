"""What each agent is told and shown, as plain chat messages: the one place where prompts are made.

The graph and the warm-start demonstrations both call these functions, so that a model trained on the one meets exactly the same text
in the other. Two styles: "standard" for real language models, and "compact", a handful of tokens, for a model of about a million
parameters. Two visibilities: "full" shows an agent all that came before, "previous" only what the agent before it said and saw
(the problem itself is shown to everyone in both).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, get_args

from mappa_graph.errors import ConfigError
from mappa_graph.record import Execution

from .text import cap, neutral, quoted

Style = Literal["standard", "compact"]
Visibility = Literal["full", "previous"]
Message = dict[str, str]
AGENTS = ("solver", "executor", "verifier")

TEXT_LIMIT = 6000
"""Characters of one agent's text in another's prompt."""
OBSERVATION_LIMIT = 2000
"""Characters of stdout, and of stderr with the error, in a prompt."""

ROLES: Mapping[str, str] = {
    "solver": "Problem Solver: reads the problem and writes a short plan that ends in one arithmetic expression or clear steps. "
    "Runs no code.",
    "executor": "Code Executor: turns the plan into one ```python block that prints the result, sees what it printed or the error, "
    "and then repairs the code or reports the result. Up to two turns.",
    "verifier": "Verifier: checks what the others found against the problem and gives the final answer in \\boxed{}.",
}

_SYSTEM: Mapping[Style, Mapping[str, str]] = {
    "standard": {
        "solver": "You are the Problem Solver of a team of three. Read the problem, work out how to solve it, and write a short plan for a "
        "colleague who will compute it in Python. Name every number and formula that is needed. Do not run code.",
        "executor": "You are the Code Executor of a team of three. Write one Python program that carries out the plan, in a single block "
        "that starts with ```python and ends with ```. Print the result with print(). You then see what it printed. If it failed, "
        "send a corrected block; if it worked, state the result in one sentence, without code.",
        "verifier": "You are the Verifier of a team of three. Check the team's work against the problem. If something is wrong, "
        "correct it. End with the final answer, and nothing else, in \\boxed{}.",
    },
    "compact": {"solver": "solve", "executor": "code", "verifier": "check"},
}


class Turn(TypedDict):
    """One turn of the executor: its completion without thinking, and what its code gave ("" = no code was run)."""

    text: str
    observation: str
    status: str
    """ok, error, timeout, killed or lost; "" = no code was run."""


def check_style(style: str, visibility: str) -> None:
    """Raises `ConfigError` for a style or visibility that does not exist."""
    for what, value, known in (("prompts", style, get_args(Style)), ("visibility", visibility, get_args(Visibility))):
        if value not in known:
            raise ConfigError(f"{what} is {value!r}", hint=f"choose from: {', '.join(known)}")


def solver_messages(problem: str, *, style: Style = "standard") -> list[Message]:
    return _chat("solver", style, neutral(problem))


def executor_messages(problem: str, plan: str, turns: Sequence[Turn] = (), *, style: Style = "standard") -> list[Message]:
    """The executor's prompt for the turn after `turns`: its own earlier turns follow as a conversation."""
    messages = _chat(
        "executor", style, _join(style, ("Problem", neutral(problem)), ("Plan of the Problem Solver", quoted(plan, TEXT_LIMIT)))
    )
    for turn in turns:
        messages += [
            {"role": "assistant", "content": quoted(turn["text"], TEXT_LIMIT)},
            {"role": "user", "content": _said(style, turn["observation"])},
        ]
    return messages


def verifier_messages(
    problem: str, plan: str, turns: Sequence[Turn], *, style: Style = "standard", visibility: Visibility = "full"
) -> list[Message]:
    parts = [("Problem", neutral(problem))]
    if visibility == "full":
        parts.append(("Plan of the Problem Solver", quoted(plan, TEXT_LIMIT)))
    for i, turn in enumerate(turns, start=1):
        parts.append((f"Code Executor, turn {i}", quoted(turn["text"], TEXT_LIMIT)))
        if turn["observation"]:
            parts.append((f"Output of turn {i}", turn["observation"]))
    return _chat("verifier", style, _join(style, *parts))


def observe(executions: Sequence[Execution], *, style: Style = "standard") -> str:
    """What the executor is shown of its runs: stdout (or, where nothing was printed, the last value), stderr, error; capped, neutral."""
    observe_one = _brief if style == "compact" else _long
    return "\n".join(observe_one(execution) for execution in executions)


def error_name(execution: Execution) -> str:
    """The error's type in one word: `SyntaxError`, `Timeout`, `Killed`, `Lost`; "" where there was none."""
    if execution.error is not None:
        name = execution.error.type or "Error"
        return "SyntaxError" if "Incomplete" in name else name
    return "" if execution.status == "ok" else execution.status.capitalize()


def _brief(execution: Execution) -> str:
    problem = error_name(execution)
    if problem:
        return f"error: {cap(neutral(problem), 40)}"
    shown = (execution.stdout.strip() or (execution.result or "").strip()).replace("\n", " ")
    return f"output: {cap(neutral(shown), 60)}" if shown else "no output"


def _long(execution: Execution) -> str:
    parts: list[str] = []
    stdout, value = execution.stdout.rstrip(), (execution.result or "").rstrip()
    if stdout or value:
        parts.append(cap(neutral(stdout or value), OBSERVATION_LIMIT))
    error = execution.error
    failed = "" if error is None else (error.traceback or f"{error.type}: {error.message}").rstrip()
    stderr = "\n".join(text for text in (execution.stderr.rstrip(), failed) if text)
    if stderr:
        parts.append("[stderr]\n" + cap(neutral(stderr), OBSERVATION_LIMIT))
    if execution.status not in ("ok", "error"):
        parts.append(f"[{execution.status}] the code was stopped")
    if execution.note:
        parts.append(f"[note] {cap(neutral(execution.note), 300)}")
    return "\n".join(parts) or "[no output: print() what you want to see]"


def _said(style: Style, observation: str) -> str:
    return observation if style == "compact" else f"Output of your code:\n{observation}"


def _chat(agent: str, style: Style, content: str) -> list[Message]:
    return [{"role": "system", "content": _SYSTEM[style][agent]}, {"role": "user", "content": content}]


def _join(style: Style, *parts: tuple[str, str]) -> str:
    if style == "compact":
        return "\n".join(text for _, text in parts if text)
    return "\n\n".join(f"{title}:\n{text or '(nothing)'}" for title, text in parts)
