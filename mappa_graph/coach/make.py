"""The coach that a config asks for.

`make_coach` is where `coach:` of a run's settings becomes an object: for training, for a later pass over a store, and for validation
alike, so that all three score with the same coach.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from ..config import CoachConfig
from ..errors import ConfigError
from .base import Coach
from .budget import Budget, Prices
from .combine import Bounded, Cascade
from .evidence import EvidenceCoach, OutcomeCoach


def make_coach(config: CoachConfig, rules: Sequence[Callable[..., Any]] = ()) -> Coach:
    """The coach of some settings.

    Args:
        rules: an environment's own rules, for the evidence coach.

    Raises `ConfigError` for a coach that can't be made: an unknown name, a missing package or key, a prompt that can't be read.
    """
    evidence = EvidenceCoach(extra=rules)
    coach = _opinion(config, evidence)
    if config.evidence == "bound":
        return Bounded(coach, evidence)
    return Cascade(evidence, coach) if config.evidence == "first" else coach


def _opinion(config: CoachConfig, evidence: EvidenceCoach) -> Coach:
    if config.kind == "evidence":
        return evidence
    if config.kind == "outcome":
        return OutcomeCoach()
    if config.kind == "llm":
        return _llm(config)
    made = import_object(config.kind, "coach.kind")
    if isinstance(made, type) or not hasattr(made, "score"):
        made = made()
    if not hasattr(made, "score"):
        raise ConfigError(
            f"coach.kind {config.kind!r} is a {type(made).__name__} without `score`", hint="a coach has `async def score(case) -> Verdict`"
        )
    coach: Coach = made
    return coach


def _llm(config: CoachConfig) -> Coach:
    from .llm import LLMCoach

    budget = Budget(config.budget.calls, config.budget.tokens, config.budget.usd)
    return LLMCoach(
        config.model or "",
        prompt=config.prompt,
        name=config.model,
        reasks=config.reasks,
        retries=config.retries,
        timeout_s=config.request_timeout_s,
        max_wait_s=config.max_wait_s,
        concurrency=config.concurrency,
        budget=budget,
        prices={name: Prices(p.input, p.output) for name, p in config.prices.items()}.get(config.model or ""),
        cache=config.cache,
        output=config.output,
        actions_per_call=config.actions_per_call,
        model_kwargs=config.model_options,
    )


def import_object(name: str, setting: str) -> Any:
    """What `package.module:object` names; `ConfigError` says which part of it is wrong."""
    module, sep, attribute = name.partition(":")
    if not sep:
        raise ConfigError(f"{setting} {name!r} is not known", hint="use a built-in name, or package.module:object")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting} {name!r}: no module {error.name!r}", hint="is its folder on PYTHONPATH?") from error
    except AttributeError as error:
        raise ConfigError(f"{setting} {name!r}: module {module!r} has no {attribute!r}") from error
