"""Settings of the environment, and of how episodes are sampled."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from .base import Section


class EnvironmentConfig(Section):
    """Which environment, and the keyword arguments of its factory."""

    name: str = "mathchat"
    """A built-in environment, or `package.module:object` naming an `Environment` or a function that makes one."""
    options: dict[str, Any] = Field(default_factory=dict)


class RolloutConfig(Section):
    """How episodes are sampled."""

    tasks: int = Field(default=32, ge=1)
    """Tasks an iteration."""
    samples: int = Field(default=2, ge=1)
    """Episodes a task."""
    concurrency: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion; None leaves it to the engine's context."""
    episode_timeout_s: float = Field(default=120.0, gt=0)
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """A run stops when a larger share of an iteration's episodes failed."""

    @field_validator("top_p")
    @classmethod
    def _on_policy(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("rollout.top_p must be 1 while training: the trainer's log-probs know nothing of a truncated distribution")
        return value
