"""What coaching costs, and where it stops: `Prices`, `Budget`, `Spend`.

A budget is checked before each request, with the requests in flight counted at an estimate, so a cap on calls is never passed and a cap
on tokens or money by no more than an estimate was wrong. Money is in US dollars. No price list is built in, since a list that
ages is worse than none: give `{"provider:model": Prices(input, output)}`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import CoachError, ConfigError


class BudgetError(CoachError):
    """A request would pass the coach's budget."""


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars for a million tokens."""

    input: float
    output: float

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (self.input * prompt_tokens + self.output * completion_tokens) / 1e6


@dataclass(frozen=True, slots=True)
class Budget:
    """The most a coach may use over its life; None is no limit."""

    calls: int | None = None
    """Requests sent, those that failed included."""
    tokens: int | None = None
    usd: float | None = None

    def __post_init__(self) -> None:
        for name in ("calls", "tokens", "usd"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"the coach's budget of {name} is {value!r}", hint="give a number from 0, or None for no limit")


@dataclass(frozen=True, slots=True)
class Spend:
    """What a coach has used so far."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    seconds: float = 0.0
    """Time of all requests added up; they overlap, so it is no wall time."""
    asked_again: int = 0
    """Replies that were no verdict."""
    retried: int = 0
    """Requests sent again after the provider failed."""
    cached: int = 0
    """Verdicts taken from the cache."""
    scored: int = 0
    unscored: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in flight, at its estimate."""

    tokens: int
    usd: float


class Ledger:
    """Counts spending against a budget. Safe for several threads."""

    def __init__(self, budget: Budget | None = None, prices: Prices | None = None, name: str = "coach") -> None:
        if budget is not None and budget.usd is not None and prices is None:
            raise ConfigError(
                f"the budget of {name!r} is {budget.usd} USD, but no price is known for it",
                hint='give prices={"provider:model": Prices(input, output)}, in USD for a million tokens',
            )
        self.budget = budget or Budget()
        self.prices = prices
        self.name = name
        self._lock = threading.Lock()
        self._spend = Spend()
        self._tickets: dict[int, Ticket] = {}
        self._next = 0

    @property
    def spend(self) -> Spend:
        return self._spend

    def open(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Books a request at an estimate. Raises `BudgetError` if it would pass the budget."""
        usd = self.prices.of(prompt_tokens, completion_tokens) if self.prices else 0.0
        ticket = Ticket(prompt_tokens + completion_tokens, usd)
        with self._lock:
            flying_tokens = sum(t.tokens for t in self._tickets.values())
            flying_usd = sum(t.usd for t in self._tickets.values())
            for what, used, more, most in (
                ("calls", self._spend.calls + len(self._tickets), 1, self.budget.calls),
                ("tokens", self._spend.tokens + flying_tokens, ticket.tokens, self.budget.tokens),
                ("USD", self._spend.usd + flying_usd, usd, self.budget.usd),
            ):
                if most is not None and used + more > most:
                    raise BudgetError(
                        f"the budget of {self.name!r} is used up: {used:g} of {most:g} {what}",
                        hint="raise the budget, or score the rest later: actions without a verdict stay pending",
                    )
            self._next += 1
            self._tickets[self._next] = ticket
            return self._next

    def close(self, number: int, prompt_tokens: int, completion_tokens: int, seconds: float) -> float:
        """Books what the request really used; returns its price in USD."""
        usd = self.prices.of(prompt_tokens, completion_tokens) if self.prices else 0.0
        with self._lock:
            del self._tickets[number]
            s = self._spend
            self._spend = replace(
                s,
                calls=s.calls + 1,
                prompt_tokens=s.prompt_tokens + prompt_tokens,
                completion_tokens=s.completion_tokens + completion_tokens,
                usd=s.usd + usd,
                seconds=s.seconds + seconds,
            )
        return usd

    def count(self, **more: int) -> None:
        """Adds to `asked_again`, `retried`, `cached`, `scored` or `unscored`."""
        with self._lock:
            self._spend = replace(self._spend, **{name: getattr(self._spend, name) + n for name, n in more.items()})


def price_of(model: str, prices: Mapping[str, Prices | tuple[float, float]] | Prices | None) -> Prices | None:
    """The prices of a model: by "provider:model", or by its name alone; None where the table has none."""
    if prices is None or isinstance(prices, Prices):
        return prices
    found = prices.get(model, prices.get(model.split(":", 1)[-1]))
    return found if found is None or isinstance(found, Prices) else Prices(*found)
