"""Coaches: who scores each action, from 0 to 10, or says that there is no verdict.

`EvidenceCoach` needs no model; `LLMCoach` asks one; `OutcomeCoach` is the outcome-only control; `Panel`, `Cascade` and `Bounded` make
one coach of several. All of them are `await coach.score(case) -> Verdict`, on cases that `case_for` builds from the record. Names
are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base import AgentCard, Case, Coach, Step, score_episode

if TYPE_CHECKING:
    from .alarms import HackingWatch, signs
    from .budget import Budget, Prices, Spend
    from .cache import VerdictCache
    from .calibration import Calibrator, by_stratum
    from .case import case_for, cases_for, transition_case
    from .combine import Bounded, Cascade, Panel
    from .evidence import DEFAULT_RULES, EvidenceCoach, Finding, OutcomeCoach, Rule
    from .llm import LLMCoach
    from .pending import UnscoredWatch, better_actions, score_pending
    from .validation import Label, position_effects, self_agreement, validate

_HOME = {
    "alarms": ("HackingWatch", "signs"),
    "budget": ("Budget", "Prices", "Spend"),
    "cache": ("VerdictCache",),
    "calibration": ("Calibrator", "by_stratum"),
    "case": ("case_for", "cases_for", "transition_case"),
    "combine": ("Bounded", "Cascade", "Panel"),
    "evidence": ("DEFAULT_RULES", "EvidenceCoach", "Finding", "OutcomeCoach", "Rule"),
    "llm": ("LLMCoach",),
    "pending": ("UnscoredWatch", "better_actions", "score_pending"),
    "validation": ("Label", "position_effects", "self_agreement", "validate"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "DEFAULT_RULES",
    "AgentCard",
    "Bounded",
    "Budget",
    "Calibrator",
    "Cascade",
    "Case",
    "Coach",
    "EvidenceCoach",
    "Finding",
    "HackingWatch",
    "LLMCoach",
    "Label",
    "OutcomeCoach",
    "Panel",
    "Prices",
    "Rule",
    "Spend",
    "Step",
    "UnscoredWatch",
    "VerdictCache",
    "better_actions",
    "by_stratum",
    "case_for",
    "cases_for",
    "position_effects",
    "score_episode",
    "score_pending",
    "self_agreement",
    "signs",
    "transition_case",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        return getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
