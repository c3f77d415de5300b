"""A small trainable team for tests of the loop: two agents, no sandbox, a grade that random text gets partly right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from langgraph.graph import START, StateGraph

from mappa_graph import Agent, Environment, Task


class State(TypedDict, total=False):
    topic: str
    draft: str
    note: str


def build_graph(models: Mapping[str, Any]) -> Any:
    async def draft(state: State) -> dict[str, str]:
        return {"draft": (await models["drafter"].ainvoke([("user", state["topic"])])).text}

    async def edit(state: State) -> dict[str, str]:
        return {"note": (await models["editor"].ainvoke([("user", state["topic"] + state["draft"])])).text}

    return StateGraph(State).add_node(draft).add_node(edit).add_edge(START, "draft").add_edge("draft", "edit").compile()


def grade(task: Task, state: State) -> float:
    """The share of printable ASCII in both texts."""
    text = state["draft"] + state["note"]
    return sum(" " <= c <= "~" for c in text) / max(1, len(text))


def team(**changes: Any) -> Environment:
    parts: dict[str, Any] = {
        "name": "notes",
        "agents": [Agent("drafter", role="drafts"), Agent("editor", role="edits")],
        "build_graph": build_graph,
        "tasks": [Task(f"t{i}", f"{i}: ", stratum="even" if i % 2 == 0 else "odd") for i in range(40)],
        "to_input": lambda task: {"topic": task.prompt},
        "grade": grade,
    }
    return Environment(**{**parts, **changes})


def settings(run: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of seconds; `changes` are sections, merged one level deep."""
    base: dict[str, Any] = {
        "run": str(run),
        "model": str(model),
        "coach": {"kind": "outcome", "when": "episode"},
        "rollout": {"tasks": 3, "samples": 2, "max_tokens": 6, "concurrency": 6},
        "train": {"iterations": 2, "lr": 1e-2, "beta": 0.01, "gamma": 0.5, "truncated": "train"},
        "evaluate": {"tasks": 3, "every": 0},
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and key in base else value
    return base


def train_in_a_process(run: Path, model: Path, changes: str) -> None:
    """`python -m tests.fakes.team RUN MODEL CHANGES`: what a test kills."""
    from mappa_graph.trainers import train

    train(team(), settings(run, model, **json.loads(changes)))


if __name__ == "__main__":
    import sys

    train_in_a_process(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
