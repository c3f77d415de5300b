"""MathChat: a Problem Solver, a Code Executor with a sandbox, and a Verifier, on word problems or problem files.

`environment(...)` is what training takes; `build_graph` alone is the app. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .box import MathChatContext
    from .factory import environment
    from .grading import grade
    from .graph import build_graph, make_graph
    from .rules import RULES
    from .tasks import LoadedTasks, load_tasks, word_problems

_HOME = {
    "environment": "factory",
    "build_graph": "graph",
    "make_graph": "graph",
    "MathChatContext": "box",
    "grade": "grading",
    "load_tasks": "tasks",
    "LoadedTasks": "tasks",
    "word_problems": "tasks",
    "RULES": "rules",
}

__all__ = [
    "RULES",
    "LoadedTasks",
    "MathChatContext",
    "build_graph",
    "environment",
    "grade",
    "load_tasks",
    "make_graph",
    "word_problems",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
