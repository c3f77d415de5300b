"""How processes agree: sums, maxima and unions over ranks. One process is the case in which all of them are the identity.

Each rank gives its own samples to `update`; statistics, token counts, gradients and metrics are those of all of them together. Every
rank must hold the same policies and call `update` as often; a rank without samples gives none and still takes part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist


class Alone:
    """One process."""

    count = 1
    rank = 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return [value]

    def union(self, names: Iterable[Hashable]) -> list[Hashable]:
        return sorted({name for part in self.gather(list(names)) for name in part}, key=repr)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to add."""


class Ranks(Alone):
    """The processes of a torch.distributed group (gloo or nccl), the default one if none is given."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients over ranks, in place and in one message per dtype; a parameter without one counts as zero."""
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for members in by_dtype.values():
            for p in members:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            flat = torch.cat([p.grad.reshape(-1) for p in members if p.grad is not None])
            flat = self.sum(flat)
            for p, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                p.grad = part.view_as(p)

    def _reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        moved = tensor.detach().to(self.device).clone()
        dist.all_reduce(moved, op=op, group=self.group)
        return moved.to(tensor.device)
