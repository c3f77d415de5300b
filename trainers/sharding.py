"""Models in shards (FSDP2): each process holds a part of every tensor, and layers are put together as they are used.

`Scorer` is what is sharded: a module whose forward is our own way through a model, so that `fully_shard`'s hooks see it begin and end.
Every forward and backward is then a collective act: all ranks must make as many of them, in the same order. Gradients come out
summed over ranks, not averaged: the loss is divided by the tokens of all of them already.

Tried on CPUs with gloo only. On GPUs the same calls go through NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mappa_graph.errors import TrainerError

from .logprobs import pack_logprobs
from .packing import Pack


class Scorer(torch.nn.Module):
    """`pack_logprobs` of a model, as a module."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = pack_logprobs(self.model, pack)
        return logprobs.clone(), entropy  # the hook that gathers shards again is lost on a view


@dataclass(frozen=True)
class Sharding:
    """How models are cut up: over all processes, one group of tensors per layer."""

    group: torch.distributed.ProcessGroup
    device: str = "cpu"
    """Type of the device on which shards lie: cuda or cpu."""
    reshard_after_forward: bool = True
    """Free a layer after its forward and gather it again for its backward; False takes more memory and less time."""
    cpu_offload: bool = False
    """Keep the shards in the CPU's memory."""
    layers: tuple[str, ...] = ()
    """Class names of the layers; none = what the model itself says may not be split."""

    def shard(self, model: PreTrainedModel) -> Scorer:
        """Cuts a model up where it stands; its parameters become parts of what they were."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

        kinds = set(self.layers or model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        if not layers:
            raise TrainerError(
                f"{type(model).__name__} has no layers of {sorted(kinds) or 'known names'} to shard by",
                hint="name its layer's class: accelerate launch --fsdp_transformer_layer_cls_to_wrap",
            )
        mesh = DeviceMesh.from_group(self.group, self.device)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.reshard_after_forward}
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        for layer in layers:
            fully_shard(layer, **options)
        scorer = Scorer(model)
        fully_shard(scorer, **options)
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return scorer


def compute(runs: PreTrainedModel | Scorer, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """`pack_logprobs` of what a body gave: a plain model, or one whose shards meet in its forward."""
    if isinstance(runs, PreTrainedModel):
        return pack_logprobs(runs, pack)
    scored: tuple[torch.Tensor, torch.Tensor] = runs(pack)
    return scored


def gathered(tensor: torch.Tensor, *, keep: bool = True) -> torch.Tensor:
    """A tensor in one piece on the CPU; of a shard, what all ranks hold together. Where it isn't kept it is empty."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu() if keep else torch.empty(0)


def put(places: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Copy tensors into parameters by name; into a shard, its part."""
    for name, place in places.items():
        if name not in tensors or tensors[name].shape != place.shape:
            found = "missing" if name not in tensors else f"of shape {tuple(tensors[name].shape)}, not {tuple(place.shape)}"
            raise TrainerError(
                f"the weights in {folder} don't fit: {name} is {found}", hint="they are another model's, or have other settings"
            )
        with torch.no_grad():
            place.copy_(like(tensors[name], place))


def like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank has whole, cut up and placed as `example` is."""
    moved = tensor.to(example.device, example.dtype)
    if not hasattr(example, "full_tensor"):
        return moved
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(example, DTensor)
    return distribute_tensor(moved, example.device_mesh, example.placements)
