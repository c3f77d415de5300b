"""Settings of an update: from scores to weights."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from .base import Section


class TrainConfig(Section):
    """From scores to weights; see `trainers/returns.py` and `trainers/loss.py` for the formulas."""

    iterations: int = Field(default=25, ge=0)
    lr: float = Field(default=1e-6, gt=0)
    beta: float = Field(default=0.01, ge=0)
    gamma: float = Field(default=0.5, ge=0, le=1)
    credit: Literal["discounted", "own"] = "discounted"
    outcome_weight: float = Field(default=0.0, ge=0)
    normalise: Literal["batch", "agent", "stratum"] = "batch"
    std_floor: float = Field(default=0.05, gt=0)
    clip: float = Field(default=0.2, gt=0)
    importance_cap: float = Field(default=2.0, ge=1)
    epochs: int = Field(default=1, ge=1)
    optimizer_batches: int = Field(default=1, ge=1)
    """Optimizer steps an epoch."""
    truncated: Literal["mask", "train"] = "mask"
    grad_clip: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    micro_batch_tokens: int = Field(default=16_384, ge=64)
    gradient_checkpointing: bool = False
    control: Literal["none", "shuffle_scores", "no_training"] = "none"
    """Experiments' controls: scores permuted among an agent's actions, or no update at all."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.credit == "own" and "gamma" in self.model_fields_set and self.gamma > 0:
            raise ValueError("train.gamma has no effect with train.credit 'own'; drop one of the two")
        return self
