"""Training from recorded traces: `train_offline(store, run, settings, models=...)`.

A store of coached episodes, recorded live or imported, becomes new weights of each agent's policy, in a run's folder of the same
layout as the loop's, so that `publish`, `serve` and `weights` take it. Rows are those that `mappa_graph.exchange.export` writes, kept
in the run's `data/` with their cards. The one thing to know: nothing here samples. What the traces don't hold can't be learned from
them, and what was written by other weights than those in training is weighed where log-probs tell by how much, and said where not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {"train_offline": ".run", "make_offline_config": ".run", "OfflineConfig": "mappa_graph.sections.offline"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
