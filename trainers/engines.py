"""The engine that a config asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mappa_graph.config import RunConfig
from mappa_graph.errors import ConfigError
from mappa_graph.sections.engine import VllmConfig

if TYPE_CHECKING:
    from mappa_graph.gateway.engine import Engine


def make_engine(config: RunConfig, models: Mapping[str, Path]) -> Engine:
    """The engine, not started. Raises `ConfigError` where its settings don't fit the rest of the config.

    Args:
        models: policy -> folder of its first weights.
    """
    if config.engine.kind == "vllm":
        return _vllm(config, models)
    if config.engine.kind == "upstream":
        return _upstream(config, models)
    from mappa_graph.gateway.local import LocalEngine

    return LocalEngine(
        models,
        dtype=config.engine.dtype,
        device=config.engine.device,
        max_batch_tokens=config.engine.max_batch_tokens,
        threads=config.engine.threads,
    )


def _vllm(config: RunConfig, models: Mapping[str, Path]) -> Engine:
    from mappa_graph.gateway.vllm import VllmEngine

    options, lora = config.engine.vllm or VllmConfig(), config.train.lora
    mode = options.mode or ("full" if lora is None else "lora")
    if mode == "lora" and options.transfer != "shared":
        raise ConfigError(f"engine.vllm.transfer {options.transfer!r} has no effect with adapters; set engine.vllm.mode full, or drop it")
    if lora is not None and options.transfer != "shared":
        raise ConfigError(
            f"engine.vllm.transfer {options.transfer!r} sends whole weights, and train.lora trains adapters",
            hint="set engine.vllm.transfer to 'shared': merged weights are then written and read",
        )
    if mode == "full" and (options.max_adapters is not None or options.max_lora_rank is not None):
        raise ConfigError("engine.vllm.max_adapters and max_lora_rank have no effect without adapters", hint="set train.lora, or drop them")
    return VllmEngine(
        models,
        options,
        mode=mode,
        folder=config.run / "engine",
        dtype=config.engine.dtype,
        threads=config.engine.threads,
        ranks=[lora.of(policy).rank for policy in models] if lora is not None else (),
    )


def _upstream(config: RunConfig, models: Mapping[str, Path]) -> Engine:
    from mappa_graph.gateway.upstream import UpstreamEngine

    settings = config.engine.upstream
    assert settings is not None  # the section sees to it
    names = settings.models if isinstance(settings.models, dict) else dict.fromkeys(models, settings.models)
    if set(names) != set(models):
        raise ConfigError(
            f"engine.upstream.models names {sorted(names)}, the environment has {sorted(models)}", hint="name each policy once"
        )
    key = os.environ.get(settings.api_key_env) if settings.api_key_env else None
    if settings.api_key_env and not key:
        raise ConfigError(f"the environment variable {settings.api_key_env} (engine.upstream.api_key_env) is not set")
    return UpstreamEngine(settings.base_url, names, api_key=key, timeout_s=settings.timeout_s)
