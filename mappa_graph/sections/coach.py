"""Settings of the coach."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from .base import Section


class BudgetConfig(Section):
    """The most that an LLM coach may use in one command; None is no limit."""

    calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    usd: float | None = Field(default=None, ge=0)


class PricesConfig(Section):
    """US dollars for a million tokens."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)


class CoachConfig(Section):
    """Who scores, when, and what is done with the scores. Settings from `model` on are those of an LLM coach alone."""

    kind: str = "evidence"
    """evidence (deterministic and free), llm (asks `model`), outcome (every action gets its episode's grade), or `package.module:object`
    naming a coach or a function that makes one."""
    when: Literal["completed", "episode", "generated"] = "completed"
    unit: Literal["action", "transition"] = "action"
    """What gets a score of its own: each action, or all that an agent did in one attempt of a node."""
    calibrate: Literal["none", "stratum", "running"] = "none"
    """Takes the strata's offsets out of the scores before returns are computed: those of each batch, or of means over batches."""
    evidence: Literal["none", "bound", "first"] = "none"
    """With another coach, the evidence coach bounds its score, or is asked first, and the other only where evidence is unsure."""
    concurrency: int = Field(default=16, ge=1)
    timeout_s: float | None = Field(default=None, gt=0)
    """For one verdict. None: 120, or, with an LLM, what all its tries may need."""
    max_unscored_share: float = Field(default=0.5, ge=0, le=1)
    """A run stops when a larger share of an iteration's actions got no verdict."""
    model: str | None = None
    """`provider:model`, as LangChain names them. The key comes from the provider's environment variable."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the chat model: base_url, temperature, …"""
    prompt: str = "default"
    """The rubric: `default`, or the path of a text file."""
    reasks: int = Field(default=2, ge=0)
    """How often a reply that is no verdict is asked for again."""
    retries: int = Field(default=4, ge=0)
    """How often a request is sent again after the provider failed."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    max_wait_s: float = Field(default=60.0, gt=0)
    """The longest pause that a provider's rate limit may ask for."""
    budget: BudgetConfig = BudgetConfig()
    prices: dict[str, PricesConfig] = Field(default_factory=dict)
    """By `provider:model`."""
    cache: str | None = None
    """A file in which verdicts are kept, so that the same case is never paid for twice."""
    output: Literal["auto", "structured", "json"] = "auto"
    actions_per_call: int = Field(default=24, ge=1)
    """In hindsight, the most actions that one request scores."""

    @property
    def tries_s(self) -> float:
        """The longest that all tries of an LLM for one verdict can take: each request, and the wait before it, at its limit."""
        return (self.reasks + 1) * (self.retries + 1) * (self.request_timeout_s + max(30.0, self.max_wait_s))

    @property
    def verdict_s(self) -> float:
        """The time that a verdict gets."""
        return self.timeout_s or (self.tries_s if self.kind == "llm" else 120.0)

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.kind == "outcome" and self.when != "episode":
            raise ValueError("coach.kind 'outcome' needs coach.when 'episode': the outcome is not known before the episode ends")
        if self.unit == "transition" and self.when == "generated":
            raise ValueError("coach.unit 'transition' can't take effect with coach.when 'generated'; use 'completed' or 'episode'")
        if self.evidence != "none" and self.kind in ("evidence", "outcome"):
            raise ValueError(f"coach.evidence {self.evidence!r} has no effect with coach.kind {self.kind!r}; it needs an opinion to bound")
        if self.kind == "llm":
            self._check_llm()
            return self
        defaults = {name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()}
        idle = [name for name in _LLM_SETTINGS if getattr(self, name) != defaults[name]]
        if idle:
            raise ValueError(f"coach.{', coach.'.join(idle)}: no effect with coach.kind {self.kind!r}; set coach.kind to 'llm'")
        return self

    def _check_llm(self) -> None:
        if not self.model or not all(self.model.partition(":")):
            raise ValueError(f"coach.kind 'llm' needs coach.model as 'provider:model', such as openai:gpt-5-mini (got {self.model!r})")
        secret = [name for name in self.model_options if "key" in name.lower() or "secret" in name.lower()]
        if secret:
            raise ValueError(
                f"coach.model_options.{secret[0]}: a config is written into the run's folder; "
                "set the provider's environment variable instead"
            )
        if self.prices and self.model not in self.prices:
            raise ValueError(f"coach.prices has no price of coach.model {self.model!r}; it has: {', '.join(self.prices)}")
        if self.budget.usd is not None and not self.prices:
            raise ValueError("coach.budget.usd needs coach.prices: {'provider:model': {input: …, output: …}}, in USD for a million tokens")
        if self.actions_per_call != 24 and self.when != "episode":
            raise ValueError(f"coach.actions_per_call has no effect with coach.when {self.when!r}; it is for 'episode'")
        if self.timeout_s is not None and self.timeout_s < self.tries_s:
            wait = max(30.0, self.max_wait_s)
            raise ValueError(
                f"coach.timeout_s {self.timeout_s:g} would cut off the coach's own tries: {self.reasks + 1} questions of "
                f"{self.retries + 1} requests, each up to {self.request_timeout_s:g} s after a wait of up to {wait:g} s, may take "
                f"{self.tries_s:g} s; leave it out, or lower reasks, retries, request_timeout_s or max_wait_s"
            )


_LLM_SETTINGS = (
    *("model", "model_options", "prompt", "reasks", "retries", "request_timeout_s", "max_wait_s"),
    *("budget", "prices", "cache", "output", "actions_per_call"),
)
