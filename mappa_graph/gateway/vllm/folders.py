"""What a folder of weights is: an adapter or a whole model, of which rank, on which base. Reads configs, never weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError, EngineError


def absolute(folder: Path) -> Path:
    return Path(folder).absolute()


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def adapter_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} is not a LoRA adapter folder: its adapter_config.json can't be read ({error})") from error
    if not isinstance(config, dict):
        raise EngineError(f"{folder / 'adapter_config.json'} holds no settings of an adapter")
    return config


def check_adapter(folder: Path, largest: int, *, ours: bool) -> None:
    if not is_adapter(folder):
        raise EngineError(
            f"{folder} is not a LoRA adapter folder", hint="with mode lora adapters are published; whole weights need mode full"
        )
    config = adapter_config(folder)
    rank = max([int(config.get("r") or 0), *map(int, (config.get("rank_pattern") or {}).values())])
    if ours and rank > largest:
        raise EngineError(
            f"the adapter in {folder} has rank {rank}, the server takes {largest}", hint=f"set engine.vllm.max_lora_rank to {rank}"
        )


def ranks(first: Mapping[str, Path]) -> list[int]:
    return [int(adapter_config(path).get("r") or 0) for path in first.values() if is_adapter(path)]


def base_of(first: Mapping[str, Path]) -> Path:
    """The one base model of all policies."""
    bases: dict[Path, str] = {}
    for policy, path in first.items():
        base = Path(str(adapter_config(path).get("base_model_name_or_path"))).absolute() if is_adapter(path) else path
        if not (base / "config.json").is_file():
            raise ConfigError(f"the base model of {policy!r}, {base}, is no model folder", hint="it must hold config.json and the weights")
        bases.setdefault(base.resolve(), policy)
    if len(bases) > 1:
        named = ", ".join(f"{policy}: {base}" for base, policy in bases.items())
        raise ConfigError(
            f"the policies have different base models ({named}); adapters share one", hint="give one model, or set engine.vllm.mode full"
        )
    return next(iter(bases))
