"""One tree of settings for a run, checked when it is read.

An unknown key is an error that names the nearest known one; an option that can't take effect is an error too. A config is read
from YAML, changed by dotted overrides (`train.iterations=5`), and written into the run's folder as it was used. Its sections are in
`sections/`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from .errors import ConfigError
from .sections.base import Section
from .sections.coach import CoachConfig
from .sections.engine import EngineConfig, GatewayConfig
from .sections.loop import CheckpointConfig, EvaluateConfig, LoopConfig
from .sections.rollout import EnvironmentConfig, RolloutConfig
from .sections.train import TrainConfig


class RunConfig(Section):
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
    loop: LoopConfig = LoopConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.loop.early_stop is not None and self.evaluate.every == 0:
            raise ValueError("loop.early_stop can't take effect with evaluate.every 0: nothing is evaluated between the ends of a run")
        return self

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
        may_grow |= {"evaluate.pass_at", "loop.trackers", "loop.project", "loop.keep_refused"}
        changed = {k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)} - may_grow
        without_effect = ("coach.budget", "coach.prices", "loop.alarms", "loop.early_stop", "engine.vllm", "engine.upstream")
        return sorted(k for k in changed if not k.startswith(without_effect))


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
    named = str(path) if path else "config"
    return make_config(data, where=f"{named} with --set" if overrides else named)


def make_config(data: Mapping[str, Any], *, where: str = "config") -> RunConfig:
    """A checked `RunConfig` from plain data; `ConfigError` names every setting that is wrong."""
    try:
        return RunConfig.model_validate(dict(data))
    except ValidationError as error:
        # A default that is made of other settings is no mistake of its own where one of those is wrong.
        wrong = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
        raise ConfigError("\n  ".join([f"{where}: {len(wrong)} setting(s) can't be used:", *map(_explain, wrong)])) from None


def _explain(problem: Any) -> str:
    loc = ".".join(str(p) for p in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        tip = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{loc}: unknown setting; {tip}"
    message = problem["msg"].removeprefix("Value error, ")
    said = isinstance(problem["input"], dict) or problem["type"] == "finite_number"
    value = "" if said else f" (got {problem['input']!r})"
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
