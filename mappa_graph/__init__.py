"""MAPPA-Graph: train the agents of any LangGraph app.

What an app imports. Names are loaded on first use, so that importing the package costs nothing and never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import Agent, Policy, mark
    from .callback import CoachCallback
    from .environment import Environment, Task
    from .record import Execution, Outcome, Verdict
    from .store import TraceStore

_HOME = {
    "Agent": "agent",
    "Policy": "agent",
    "mark": "agent",
    "CoachCallback": "callback",
    "Environment": "environment",
    "Task": "environment",
    "Outcome": "record",
    "Verdict": "record",
    "Execution": "record",
    "TraceStore": "store",
}

__all__ = ["Agent", "CoachCallback", "Environment", "Execution", "Outcome", "Policy", "Task", "TraceStore", "Verdict", "mark"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
