"""Ready environments, each a package with `environment`, `build_graph`, `load_tasks` and `grade`. Loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import dsbench, mathchat

__all__ = ["dsbench", "mathchat"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
