"""The state of the MathChat graph: plain JSON, each agent's words without its thinking."""

from __future__ import annotations

from typing import TypedDict

from .prompts import Turn


class MathChatInput(TypedDict):
    problem: str


class MathChatState(MathChatInput, total=False):
    """What the team has so far; texts are without thinking."""

    plan: str
    """What the solver said."""
    turns: list[Turn]
    """What the executor said in each turn, and what its code gave."""
    final: str
    """What the verifier said."""
    answer: str | None
    """What stands in the verifier's last box."""
    session: str
    """Names the run's own sandbox session where the graph opens it itself."""
