"""Settings of the loop around an update: evaluation and checkpoints."""

from __future__ import annotations

from pydantic import Field

from .base import Section


class EvaluateConfig(Section):
    """Held-out evaluation: `every` iterations, before, and after."""

    every: int = Field(default=10, ge=0)
    """0: only before and after."""
    tasks: int = Field(default=200, ge=1)
    between_tasks: int | None = Field(default=None, ge=1)
    """How many tasks the evaluations between the first and the last use; None = `tasks`."""
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.6, ge=0)
    split: str = "heldout"


class CheckpointConfig(Section):
    """Checkpoints: every so many iterations, the last few and the best kept."""

    every: int = Field(default=1, ge=1)
    keep_last: int = Field(default=2, ge=1)


class LoopConfig(Section):
    """How iterations follow each other."""
