"""Training: from scored episodes to new weights. Names are imported when first used, so that the plain functions need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "discounted_returns": "returns",
    "token_advantages": "returns",
    "Sample": "batch",
    "samples_from_trace": "batch",
    "policy_loss": "loss",
    "TrainerSettings": "settings",
    "ReinforceTrainer": "trainer",
    "Update": "trainer",
    "Ranks": "ranks",
    "save_checkpoint": "checkpoint",
    "load_latest": "checkpoint",
    "trained_weights": "checkpoint",
    "prune": "checkpoint",
    "train": "run",
    "make_trainer": "launch",
    "merge": "lora",
    "coach_case": "method",
    "action_rewards": "method",
    "reinforce_update": "method",
    "train_on_stream": "method",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
