"""DSBench: a Data Engineer, a Modeler and an Analyst who hand files on, from `train.csv` to `submission.csv`.

`environment(...)` is what training takes; `build_graph` alone is the app. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .box import Desk, DSBenchContext
    from .factory import environment
    from .grading import grade_submission as grade
    from .graph import build_graph
    from .metrics import environment_metrics
    from .rules import RULES
    from .tasks import load_tasks

_HOME = {
    "environment": ("factory", "environment"),
    "build_graph": ("graph", "build_graph"),
    "DSBenchContext": ("box", "DSBenchContext"),
    "Desk": ("box", "Desk"),
    "grade": ("grading", "grade_submission"),
    "environment_metrics": ("metrics", "environment_metrics"),
    "load_tasks": ("tasks", "load_tasks"),
    "RULES": ("rules", "RULES"),
}

__all__ = ["RULES", "DSBenchContext", "Desk", "build_graph", "environment", "environment_metrics", "grade", "load_tasks"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, attribute = _HOME[name]
        return getattr(importlib.import_module(f".{module}", __name__), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
