"""Settings of an update: from scores to weights."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from .base import Section


def default_lr(before: dict[str, Any]) -> float:
    """The learning rate where none is given, by the settings before it: adapters take a larger one than whole weights."""
    return 1e-6 if before.get("lora") is None else 1e-4


class LoraPolicy(Section):
    """What a policy's adapter has that differs from the others'; None = as the others."""

    rank: int | None = Field(default=None, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] | None = None


class LoraConfig(Section):
    """Low-rank adapters, one a policy, on one base model in memory. Scaling is alpha / rank."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Module names, as PEFT takes them."""
    policies: dict[str, LoraPolicy] = Field(default_factory=dict)
    """By policy name."""

    def of(self, policy: str) -> LoraConfig:
        """The settings of one policy, its own put over the common ones."""
        own = self.policies.get(policy)
        changed = {} if own is None else {k: v for k, v in own.model_dump().items() if v is not None}
        return self.model_copy(update={**changed, "policies": {}})


class TrainConfig(Section):
    """From scores to weights; see `trainers/returns.py` and `trainers/loss.py` for the formulas."""

    iterations: int = Field(default=25, ge=0)
    lora: LoraConfig | None = None
    """Train adapters instead of whole weights."""
    lr: float = Field(default_factory=default_lr, gt=0)
    """1e-4 with adapters, 1e-6 without, where none is given."""
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
    offload: Literal["none", "optimizer"] = "none"
    """Keep optimizer state in the CPU's memory between steps; for a GPU."""
    kernels: Literal["auto", "none"] = "auto"
    """Fused kernels: on a GPU Liger and flash attention, where they are installed; on a CPU RMSNorm."""
    control: Literal["none", "shuffle_scores", "no_training"] = "none"
    """Experiments' controls: scores permuted among an agent's actions, or no update at all."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.credit == "own" and "gamma" in self.model_fields_set and self.gamma > 0:
            raise ValueError("train.gamma has no effect with train.credit 'own'; drop one of the two")
        return self
