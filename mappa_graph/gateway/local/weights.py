"""Weights from a folder into a new module, beside the one that serves (inside `LocalEngine`; imports torch).

A folder holds a whole model (`*.safetensors`, config and index files as `save_pretrained` writes them, both optional) or a PEFT LoRA
adapter, which is merged into the policy's first weights. Every tensor has to find its place and every place its tensor: a file
that is half of what it should be is refused, never served.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...errors import EngineError

_PREFIX = "base_model.model."


def load_version(beside: Any, first: Path, weights: Path, dtype: torch.dtype, device: str) -> Any:
    """A module like `beside` with the weights of a folder. Raises `EngineError`."""
    if not weights.is_dir():
        raise EngineError(f"there is no folder of weights at {weights}")
    try:
        if (weights / "adapter_config.json").is_file():
            module = merge_adapter(_base(first, dtype).to(device), weights)
        else:
            module = copy.deepcopy(beside)
            fill(module, read(weights), weights)
    except (OSError, RuntimeError, SafetensorError, ValueError, KeyError) as error:
        raise EngineError(f"the weights in {weights} can't be loaded: {type(error).__name__}: {error}") from error
    return module.eval().requires_grad_(False)


def _base(first: Path, dtype: torch.dtype) -> Any:
    """A policy's first weights, without the progress bar of every publish."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(first, dtype=dtype, local_files_only=True)
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def read(weights: Path, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """All tensors of a folder. With an index file, exactly the files and names that it lists."""
    index = weights / "model.safetensors.index.json"
    files = sorted(weights.glob(pattern))
    wanted: dict[str, str] | None = None
    if index.is_file():
        wanted = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [weights / name for name in sorted(set(wanted.values()))]
    if not files:
        raise EngineError(f"{weights} holds no {pattern} file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    if wanted is not None and set(wanted) - set(tensors):
        raise EngineError(f"{weights} lacks tensors that its index names: {_some(set(wanted) - set(tensors))}")
    return tensors


def fill(module: Any, tensors: dict[str, torch.Tensor], weights: Path) -> None:
    """Copies tensors into a module; only tied weights may be left out."""
    places = module.state_dict()
    unknown = set(tensors) - set(places)
    tied = {places[name].data_ptr() for name in tensors if name in places}
    missing = {name for name, place in places.items() if name not in tensors and place.data_ptr() not in tied}
    if unknown or missing:
        found = f"{len(missing)} missing ({_some(missing)}), {len(unknown)} unknown ({_some(unknown)})"
        raise EngineError(f"the weights in {weights} are not this model's: {found}")
    for name, tensor in tensors.items():
        if places[name].shape != tensor.shape:
            raise EngineError(f"{weights}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(places[name].shape)}")
        places[name].copy_(tensor)


def merge_adapter(module: Any, weights: Path) -> Any:
    """Adds a PEFT LoRA adapter's `scale * B A` to the weights it names."""
    config = json.loads((weights / "adapter_config.json").read_text(encoding="utf-8"))
    if config.get("peft_type", "LORA") != "LORA" or config.get("use_dora") or config.get("bias", "none") != "none":
        raise EngineError(f"{weights} is not a plain LoRA adapter (peft_type LORA, no DoRA, bias none)")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise EngineError(f"{weights} has ranks of its own per layer", hint="merge it with PEFT and publish the merged folder")
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    tensors = read(weights, "adapter_model.safetensors")
    places = dict(module.named_parameters())
    used: set[str] = set()
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        stem = name.removesuffix(".lora_A.weight")
        target = stem.removeprefix(_PREFIX) + ".weight"
        up = tensors.get(f"{stem}.lora_B.weight")
        if target not in places or up is None:
            raise EngineError(f"{weights}: {name} has no place in the model, or no lora_B")
        place = places[target]
        delta = (up.to(place.device, torch.float32) @ down.to(place.device, torch.float32)) * scale
        if config.get("fan_in_fan_out"):
            delta = delta.T
        with torch.no_grad():
            place.add_(delta.to(place.dtype))
        used |= {name, f"{stem}.lora_B.weight"}
    if not used or set(tensors) - used:
        raise EngineError(f"{weights} holds tensors that are not LoRA pairs: {_some(set(tensors) - used)}")
    return module


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (" …" if len(names) > 3 else "") if shown else "none"
