"""Adapters: any number of policies on one base model in memory, each a LoRA of its own (PEFT).

The base is frozen. To compute a policy its adapter is switched on, to compute the reference all are switched off: the reference *is*
the base, bit for bit, and needs no memory. An adapter starts with B = 0, so version 0 of a policy is its base. What is written is an
ordinary PEFT folder (`adapter_config.json`, `adapter_model.safetensors`); `merge` makes an ordinary model folder of one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft.functional import cast_adapter_dtype, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mappa_graph.errors import EngineError, TrainerError
from mappa_graph.gateway.local.weights import merge_adapter
from mappa_graph.sections.train import LoraConfig

from .kernels import use_kernels
from .learner import prepare
from .settings import TrainerSettings
from .sharding import Scorer, Sharding, gathered, put
from .weights import atomic_folder, load_model, save_model

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class SharedBase:
    """A frozen model, the adapters on it, and the switch between them.

    The base is kept in the arithmetic's own dtype (bfloat16 halves its memory), adapters in float32.
    """

    def __init__(self, folder: Path, settings: TrainerSettings, device: torch.device, sharding: Sharding | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self.sharding = sharding
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self.model = load_model(folder, dtype, device if sharding is None else "cpu")
        self.model.requires_grad_(False)
        self.tree = settings.tree and prepare(self.model, f"base {folder.name}")
        use_kernels(self.model, settings, device, rows=self.tree)
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.linear = _linear_modules(self.model)
        self.keys: dict[str, str] = {}
        self._layers: list[LoraLayer] = []
        self._on: str | None = None
        self._runs: PreTrainedModel | Scorer = self.model

    def add(self, policy: str, lora: LoraConfig, seed: int) -> PeftLoraConfig:
        """Put a policy's adapter on the base. Its first A depends on the seed and the policy's name alone, whoever else is there."""
        targets = self._targets(lora, policy)
        self.keys[policy] = f"policy_{len(self.keys)}"  # a name of PEFT's must be no attribute of a ModuleDict, and no part of another
        config = PeftLoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
            target_modules=targets,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self.folder),
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are what is wanted
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}\0{policy}".encode()).digest()[:7], "big"))
            inject_adapter_in_model(config, self.model, self.keys[policy])
        cast_adapter_dtype(self.model, self.keys[policy])
        return config

    def close(self) -> None:
        """No more adapters come: shard the whole, if it is to be sharded."""
        self._layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        self._trainable(True)
        if self.sharding is not None:
            self._runs = self.sharding.shard(self.model)
        self._on = next(iter(self.keys))
        self.switch(None)

    def switch(self, policy: str | None) -> PreTrainedModel | Scorer:
        """The model with one policy's adapter on, or with none."""
        if policy != self._on:
            for layer in self._layers:
                layer.enable_adapters(policy is not None)
                if policy is not None:
                    layer.set_adapter(self.keys[policy])
            self._trainable(True)
            self._on = policy
        return self._runs

    def _trainable(self, flag: bool) -> None:
        """Of all adapters: PEFT freezes those that are off, and a backward pass that is still to come would then leave them out."""
        for layer in self._layers:
            layer.lora_A.requires_grad_(flag)
            layer.lora_B.requires_grad_(flag)

    def parameters(self, policy: str) -> dict[str, torch.nn.Parameter]:
        """A policy's trainable parameters, by their names in a PEFT folder."""
        key = self.keys[policy]
        found: dict[str, torch.nn.Parameter] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer) and key in module.lora_A:
                found[f"{_PREFIX}{name}.lora_A.weight"] = module.lora_A[key].weight
                found[f"{_PREFIX}{name}.lora_B.weight"] = module.lora_B[key].weight
        return found

    def _targets(self, lora: LoraConfig, policy: str) -> list[str]:
        head = self.model.get_output_embeddings()
        if lora.targets == "all-linear":
            found = sorted({name.rpartition(".")[2] for name, module in self.linear.items() if module is not head})
            if not found:
                raise TrainerError(
                    f"{self.folder} has no linear layers for an adapter", hint="train its whole weights: leave train.lora out"
                )
            return found
        for target in lora.targets:
            matched = [module for name, module in self.linear.items() if name == target or name.endswith(f".{target}")]
            known = ", ".join(sorted({name.rpartition(".")[2] for name in self.linear}))
            if not matched:
                raise TrainerError(
                    f"train.lora.targets of {policy!r}: {target!r} is no linear layer of {self.folder}", hint=f"it has: {known}"
                )
            if any(module is head for module in matched) and getattr(self.model.config, "tie_word_embeddings", False):
                raise TrainerError(
                    f"train.lora.targets of {policy!r}: the head {target!r} of {self.folder} shares its weight with the embedding",
                    hint="leave it out; an adapter of one would not be one of the other",
                )
        return sorted(lora.targets)


class Adapter:
    """A policy that is an adapter on a shared base."""

    def __init__(self, policy: str, base: SharedBase, config: PeftLoraConfig, *, reference: bool) -> None:
        self.name = policy
        self.base = base
        self.config = config
        self.folder = base.folder
        self.model = base.model
        self.tree = base.tree
        self.sharded = base.sharding is not None
        self.frozen = base.model if reference else None
        trained = base.parameters(policy)
        self.names, self.parameters = list(trained), list(trained.values())

    def policy(self) -> PreTrainedModel | Scorer:
        return self.base.switch(self.name)

    def reference(self) -> PreTrainedModel | Scorer:
        return self.base.switch(None)

    def save(self, folder: Path, *, write: bool = True, durable: bool = True) -> None:
        tensors = {n: gathered(p, keep=write).contiguous() for n, p in zip(self.names, self.parameters, strict=True)}
        if not write:
            return
        with atomic_folder(folder, durable=durable) as aside:
            self.config.inference_mode = True
            self.config.save_pretrained(str(aside))
            save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        if not (folder / CONFIG).is_file():
            raise TrainerError(
                f"{folder} holds no adapter ({CONFIG}), and adapters are trained here", hint="continue with train.lora as it was"
            )
        try:
            tensors = load_file(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise TrainerError(f"the adapter in {folder} can't be read: {error}") from error
        put(dict(zip(self.names, self.parameters, strict=True)), tensors, folder)


def open_adapters(
    models: Mapping[str, Path], settings: TrainerSettings, device: torch.device, seed: int, sharding: Sharding | None = None
) -> dict[str, Adapter]:
    """A body for every policy, on one base for each folder."""
    lora = settings.lora
    assert lora is not None
    unknown = sorted(set(lora.policies) - set(models))
    if unknown:
        raise TrainerError(f"train.lora.policies names {', '.join(unknown)}", hint=f"in training are: {', '.join(models)}")
    bases = {folder: SharedBase(folder, settings, device, sharding) for folder in dict.fromkeys(models.values())}
    configs = {policy: bases[folder].add(policy, lora.of(policy), seed) for policy, folder in models.items()}
    for base in bases.values():
        base.close()
    return {p: Adapter(p, bases[f], configs[p], reference=settings.beta > 0.0) for p, f in models.items()}


def merge(adapter: Path | str, folder: Path | str, *, base: Path | str | None = None, durable: bool = True) -> Path:
    """Write an adapter's base with the adapter merged in as an ordinary model folder, in the base's own dtype, tokenizer included.

    Args:
        adapter: a PEFT LoRA folder.
        base: the model's folder; None = the one that the adapter names.
        durable: it is on disk on return.
    """
    adapter, folder = Path(adapter), Path(folder)
    try:
        named = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise TrainerError(f"{adapter} is no adapter folder: {error}") from error
    source = Path(base or named or "")
    if not (source / "config.json").is_file():
        raise TrainerError(f"the base model of the adapter {adapter} is not at {str(source)!r}", hint="say where it is: base=FOLDER")
    model = load_model(source, "auto", "cpu")
    try:
        merge_adapter(model, adapter)
    except (EngineError, OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise TrainerError(f"the adapter {adapter} can't be merged into {source}: {error}") from error
    return save_model(model, source, folder, durable=durable)


def _linear_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    kinds: Iterable[tuple[str, Any]] = model.named_modules()
    return {name: module for name, module in kinds if isinstance(module, torch.nn.Linear)}
