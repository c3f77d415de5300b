"""Settings of a training from recorded traces.

Which settings have an effect depends on the method; one that has none is an error, as everywhere.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from .base import Section
from .train import LoraConfig

Method = Literal["sft", "dpo", "kto", "reinforce"]

_LR = {"sft": (2e-5, 2e-4), "dpo": (1e-6, 1e-5), "kto": (1e-6, 1e-5), "reinforce": (1e-6, 1e-4)}
_TEXT = ("sft", "dpo", "kto")
_ONLY: dict[str, tuple[str, ...]] = {
    "beta": ("dpo", "kto"),
    "batch": _TEXT, "thinking": _TEXT, "min_score": ("sft", "reinforce"),
    "min_margin": ("dpo", "kto"), "pairs_per_state": ("dpo", "kto"),
    "good": ("kto",), "bad": ("kto",),
    **dict.fromkeys(
        ("gamma", "credit", "outcome_weight", "truncated", "normalise", "std_floor", "clip", "importance_cap", "grad_clip",
         "optimizer_batches", "micro_batch_tokens", "retokenise"),
        ("reinforce",),
    ),
}  # fmt: skip


class OfflineConfig(Section):
    """From recorded actions to weights."""

    method: Method = "reinforce"
    """reinforce: REINFORCE++ on fixed data, on actions with tokens. sft: the best scored actions. dpo, kto: preferences. The last three
    take actions without tokens too."""
    seed: int = 0
    epochs: int = Field(default=1, ge=1)
    lr: float | None = Field(default=None, gt=0)
    """None: the method's own; see `rate`."""
    batch: int = Field(default=8, ge=1)
    """Rows an optimizer step."""
    optimizer_batches: int = Field(default=1, ge=1)
    """Optimizer steps an epoch."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the first weights hold (dpo, kto). In reinforce it is the clip alone that does: the first weights are also the old ones
    of its only update, and their KL is 0."""
    lora: LoraConfig | None = None
    """Train adapters instead of whole weights."""

    min_score: float | None = Field(default=None, ge=0, le=10)
    """Only actions with this score or more. None: 7 for sft, else all."""
    split: str = "train"
    """Which episodes: train, an evaluation's name, or all."""
    since: str | None = None
    until: str | None = None
    """Only episodes from then on, up to then: ISO 8601, UTC."""
    heldout: float = Field(default=0.1, ge=0, lt=1)
    """Share of tasks, chosen by a hash, that is not trained on: the loss on them is measured before and after."""
    salt: str = ""
    """Another text, another choice of held-out tasks."""
    measure: int = Field(default=256, ge=1)
    """Most actions of either side that the loss before and after is measured on."""

    thinking: Literal["keep", "strip"] = "keep"
    min_margin: float = Field(default=1.0, gt=0, le=10)
    """Points between the two of a pair."""
    pairs_per_state: int = Field(default=1, ge=1)
    good: float = Field(default=7.0, ge=0, le=10)
    bad: float = Field(default=3.0, ge=0, le=10)

    gamma: float = Field(default=0.5, ge=0, le=1)
    credit: Literal["discounted", "own"] = "discounted"
    outcome_weight: float = Field(default=0.0, ge=0)
    truncated: Literal["mask", "train"] = "mask"
    normalise: Literal["batch", "agent", "stratum"] = "batch"
    std_floor: float = Field(default=0.05, gt=0)
    clip: float = Field(default=0.2, gt=0, lt=1)
    importance_cap: float = Field(default=2.0, gt=0)
    """Largest weight of a token, its probability under the first weights over that under the weights that wrote it."""
    grad_clip: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=16_384, ge=64)
    retokenise: bool = False
    """Whether actions without tokens are tokenised anew and trained on as if the first weights had written them."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def rate(self) -> float:
        """The learning rate: for whole weights, or for adapters, 2e-5 or 2e-4 (sft), 1e-6 or 1e-5 (dpo, kto), 1e-6 or 1e-4 (reinforce)."""
        return self.lr if self.lr is not None else _LR[self.method][self.lora is not None]

    @property
    def least_score(self) -> float | None:
        return 7.0 if self.min_score is None and self.method == "sft" else self.min_score

    @model_validator(mode="after")
    def _effective(self) -> Self:
        idle = [name for name, methods in _ONLY.items() if name in self.model_fields_set and self.method not in methods]
        if idle:
            raise ValueError(f"{', '.join(idle)}: no effect with method {self.method!r}; of use with {', '.join(_ONLY[idle[0]])}")
        if self.credit == "own" and "gamma" in self.model_fields_set and self.gamma > 0:
            raise ValueError("gamma has no effect with credit 'own'; drop one of the two")
        if self.salt and not self.heldout:
            raise ValueError("salt has no effect with heldout 0")
        if not self.bad < self.good:
            raise ValueError(f"bad {self.bad:g} is not below good {self.good:g}")
        if self.method == "kto" and self.batch < 2:
            raise ValueError("batch 1 is too small for method 'kto', which compares the rows of a batch")
        return self
