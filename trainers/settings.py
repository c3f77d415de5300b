"""How an update is made. Every field is checked when the settings are made; an unknown one is an error."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mappa_graph.sections.train import LoraConfig, default_lr


class TrainerSettings(BaseModel):
    """Settings of `ReinforceTrainer`; the defaults are those of the method."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lora: LoraConfig | None = None
    """Train adapters on a shared base instead of whole weights."""
    beta: float = Field(default=0.01, ge=0.0)
    """Coefficient of the KL to the first weights, in the reward. 0 needs no reference model and no extra forward."""
    lr: float = Field(default_factory=default_lr, gt=0.0)
    """1e-4 with adapters, 1e-6 without, where none is given."""
    epochs: int = Field(default=1, ge=1)
    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    importance_cap: float = Field(default=2.0, gt=0.0)
    """Largest weight `pi_old / pi_engine` of a token."""
    std_floor: float = Field(default=0.05, gt=0.0)
    normalise: Literal["batch", "agent", "stratum"] = "batch"
    grad_clip: float = Field(default=1.0, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0.0)
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens in one forward and backward; memory, not the result, depends on it."""
    optimizer_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch of an update: the samples of each policy are split into this many parts."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from lr / warmup_steps."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps per policy until a falling schedule reaches its end; a constant one needs none."""
    lr_floor: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of `lr` at which a falling schedule ends and stays."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic; weights and optimizer state stay float32."""
    gradient_checkpointing: bool = False
    offload: Literal["none", "optimizer"] = "none"
    """Where optimizer state lies between steps: on the model's device, or in the CPU's memory (each policy's comes for its step)."""
    kernels: Literal["auto", "none"] = "auto"
    """Fused kernels on a GPU, where they are installed."""
    tree: bool = True
    """Compute shared prefixes once. False, or a model that can't, takes padded rows."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f'schedule "{self.schedule}" needs total_steps, the number of optimizer steps at which it ends')
        if self.schedule != "constant" and self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps {self.total_steps} is not more than warmup_steps {self.warmup_steps}")
        if not all(0.0 <= b < 1.0 for b in self.betas):
            raise ValueError(f"betas {self.betas} are not both in [0, 1)")
        return self

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0 - progress
        return self.lr * (self.lr_floor + (1.0 - self.lr_floor) * falling)
