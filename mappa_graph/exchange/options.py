"""How an export makes and keeps rows, beside its filters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError
from .formats import PAIRED, Format, Thinking
from .pairs import Pairs

TRAIN, HELDOUT = "train", "heldout"


@dataclass(frozen=True)
class Options:
    """How rows are chosen and made, beside the filters. Raises `ConfigError` for what is out of range."""

    dedupe: bool | None = None
    """Whether rows of the same prompt and completion are kept once; None: yes, except in the format `rl`, where how often counts."""
    balance: Literal["stratum", "agent", "task_id"] | None = None
    """As many rows of each as the rarest has."""
    heldout: float = 0.0
    """Share of tasks, 0 <= share < 1, whose rows go to a second file."""
    salt: str = ""
    """Another text, another split."""
    thinking: Thinking = "keep"
    """Whether `<think>` blocks stay in completions."""
    pairs: Pairs = field(default_factory=Pairs)
    normalise: Literal["batch", "agent", "stratum"] = "batch"
    std_floor: float = 0.05
    """Of the column `advantage` of the format `rl`; see `trainers.returns.token_advantages`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.heldout < 1.0:
            raise ConfigError(f"the held-out share is {self.heldout!r}", hint="give a number from 0 up to, not including, 1")
        if not self.std_floor > 0.0:
            raise ConfigError(f"std_floor is {self.std_floor!r}", hint="give a number > 0; 0.05 is the default")

    def check(self, format: Format) -> None:
        """Raises `ConfigError` for an option that has no effect on a format."""
        plain = Options()
        pairs = self.pairs
        for name, wanted, has_effect in (
            ("pairs", pairs != plain.pairs, format in PAIRED),
            ("pairs from scores", "scores" in pairs.sources, format == "kto"),
            ("good and bad", (pairs.good, pairs.bad) != (plain.pairs.good, plain.pairs.bad), "scores" in pairs.sources),
            ("normalise", self.normalise != plain.normalise, format == "rl"),
            ("std_floor", self.std_floor != plain.std_floor, format == "rl"),
            ("thinking", self.thinking != plain.thinking, format != "rl"),
            ("salt", self.salt != plain.salt, self.heldout > 0.0),
        ):
            if wanted and not has_effect:
                raise ConfigError(f"{name} has no effect on this export in the format {format!r}", hint="leave it out")
