"""One tree of settings for a run, checked when it is read.

An unknown key is an error that names the nearest known one; an option that can't take effect is an error too. A config is read
from YAML, changed by dotted overrides (`train.iterations=5`), and written into the run's folder as it was used.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentConfig(_Section):
    """Which environment, and the keyword arguments of its factory."""

    name: str = "mathchat"
    """A built-in environment, or `package.module:object` naming an `Environment` or a function that makes one."""
    options: dict[str, Any] = Field(default_factory=dict)


class EngineConfig(_Section):
    """What generates tokens. `local` runs the models in this process and needs no server."""

    kind: Literal["local"] = "local"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1)
    max_batch_tokens: int = Field(default=65_536, ge=64)
    """Most tokens (prompts and room for completions) decoded at once."""


class GatewayConfig(_Section):
    """Where the OpenAI-compatible server listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65_535)


class BudgetConfig(_Section):
    """The most that an LLM coach may use in one command; None is no limit."""

    calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    usd: float | None = Field(default=None, ge=0)


class PricesConfig(_Section):
    """US dollars for a million tokens."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)


class CoachConfig(_Section):
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


class RolloutConfig(_Section):
    """How episodes are sampled."""

    tasks: int = Field(default=32, ge=1)
    """Tasks an iteration."""
    samples: int = Field(default=2, ge=1)
    """Episodes a task."""
    concurrency: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion; None leaves it to the engine's context."""
    episode_timeout_s: float = Field(default=120.0, gt=0)
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """A run stops when a larger share of an iteration's episodes failed."""

    @field_validator("top_p")
    @classmethod
    def _on_policy(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("rollout.top_p must be 1 while training: the trainer's log-probs know nothing of a truncated distribution")
        return value


class TrainConfig(_Section):
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


class EvaluateConfig(_Section):
    """Held-out evaluation: `every` iterations, before, and after."""

    every: int = Field(default=10, ge=0)
    """0: only before and after."""
    tasks: int = Field(default=200, ge=1)
    between_tasks: int | None = Field(default=None, ge=1)
    """How many tasks the evaluations between the first and the last use; None = `tasks`."""
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.6, ge=0)
    split: str = "heldout"


class CheckpointConfig(_Section):
    """Checkpoints: every so many iterations, the last few and the best kept."""

    every: int = Field(default=1, ge=1)
    keep_last: int = Field(default=2, ge=1)


class RunConfig(_Section):
    """Everything a run is made of."""

    run: Path = Path("runs/demo")
    """Folder of the run: config, store, metrics, checkpoints, report."""
    seed: int = 0
    model: str | dict[str, str] = "tiny"
    """`tiny`, `smollm2`, a folder, or a Hugging Face name; or one per policy, by policy name."""
    environment: EnvironmentConfig = EnvironmentConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    coach: CoachConfig = CoachConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def dump(self) -> str:
        """The config as YAML that `load_config` reads back to an equal one."""
        data = self.model_dump(mode="json")
        if self.train.credit == "own":
            del data["train"]["gamma"]  # it has no effect then, and would be refused
        return yaml.safe_dump(data, sort_keys=False)

    def same_training(self, other: RunConfig) -> list[str]:
        """Dotted names of the settings by which two configs would train differently (what a resumed run may not change)."""
        free = {"run", "gateway", "checkpoint"}
        mine, theirs = (_flatten(c.model_dump(mode="json", exclude=free)) for c in (self, other))
        may_grow = {"train.iterations", "evaluate.every", "rollout.concurrency", "rollout.episode_timeout_s", "engine.threads"}
        may_grow |= {f"coach.{name}" for name in ("concurrency", "timeout_s", "max_unscored_share", "retries", "cache")}
        may_grow |= {f"coach.{name}" for name in ("request_timeout_s", "max_wait_s")}
        changed = {k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)} - may_grow
        return sorted(k for k in changed if not k.startswith(("coach.budget", "coach.prices")))


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def load_config(path: Path | None = None, overrides: Sequence[str] = (), *, base: Mapping[str, Any] | None = None) -> RunConfig:
    """The config in a YAML file (or `base`), with `key.path=value` overrides (values are YAML).

    Raises `ConfigError` for an unreadable file, an unknown key (with the nearest known one) or a value out of range.
    """
    data: dict[str, Any] = _deep_copy(base or {})
    if path is not None:
        try:
            read = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"can't read config {path}: {error.strerror or error}", hint="give a YAML file; configs/ has examples"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config {path} is not valid YAML: {error}") from error
        if read is not None and not isinstance(read, dict):
            raise ConfigError(f"config {path} holds a {type(read).__name__}, not a mapping of settings")
        data = _merge(data, read or {})
    for override in overrides:
        key, sep, text = override.partition("=")
        if not sep or not key:
            raise ConfigError(f"override {override!r} is not of the form key.path=value", hint="for example: train.iterations=5")
        try:
            value = _number(yaml.safe_load(text)) if text else None
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
        data = _merge(data, _nest(key.split("."), value))
    return make_config(data, where=str(path) if path else "config")


def make_config(data: Mapping[str, Any], *, where: str = "config") -> RunConfig:
    """A checked `RunConfig` from plain data; `ConfigError` names every setting that is wrong."""
    try:
        return RunConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(
            "\n  ".join([f"{where}: {len(error.errors())} setting(s) can't be used:", *map(_explain, error.errors())])
        ) from None


def _explain(problem: Any) -> str:
    loc = ".".join(str(p) for p in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        tip = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{loc}: unknown setting; {tip}"
    message = problem["msg"].removeprefix("Value error, ")
    value = "" if isinstance(problem["input"], dict) else f" (got {problem['input']!r})"
    return f"{loc}: {message}{value}" if loc else message


def _known_keys(loc: Sequence[Any]) -> list[str]:
    model: type[BaseModel] = RunConfig
    named = False
    for part in loc:
        if named:  # the name of an entry of a table
            named = False
            continue
        annotation = model.model_fields[str(part)].annotation
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        named = annotation is not inner[0]
        model = inner[0]
    return list(model.model_fields)


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text; people mean the number."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        mine = out.get(key)
        out[key] = _merge(mine, value) if isinstance(mine, dict) and isinstance(value, Mapping) else value
    return out


def _deep_copy(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _deep_copy(v) if isinstance(v, Mapping) else v for k, v in data.items()}
