"""The engine that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mappa_graph.config import RunConfig

if TYPE_CHECKING:
    from mappa_graph.gateway.engine import Engine


def make_engine(config: RunConfig, models: Mapping[str, Path]) -> Engine:
    from mappa_graph.gateway.local import LocalEngine

    return LocalEngine(
        models,
        dtype=config.engine.dtype,
        device=config.engine.device,
        max_batch_tokens=config.engine.max_batch_tokens,
        threads=config.engine.threads,
    )
