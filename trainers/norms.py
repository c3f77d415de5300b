"""RMSNorm on a CPU in a third of the passes over memory: the sum over a row at once, and a backward pass written out.

The one thing to know: a module takes it only if it computes exactly `weight * x / sqrt(mean(x^2) + eps)`, which is tried and not guessed
from its name; anything else (another dtype, a weight that counts from one) stays with the module's own forward.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """With `n = x / r`, `r = sqrt(mean(x^2) + eps)` and `u = weight * d`: `dx = (u - n * mean(u * n)) / r`, `dweight = sum(d * n)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, weight, scale = ctx.saved_tensors
        d = upstream[0]
        width = d.shape[-1]
        d_weight = (d * normed).reshape(-1, width).sum(0) if ctx.needs_input_grad[1] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = d * weight
            d_x = d_x.addcmul_(normed, torch.linalg.vecdot(d_x, normed).div_(-width).unsqueeze(-1)).mul_(scale)
        return d_x, d_weight, None


def quicken_norms(model: torch.nn.Module) -> int:
    """Gives the model's RMSNorms this forward; returns how many there are."""
    count = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", None)
        if "forward" in vars(module):
            continue  # somebody's hook
        if isinstance(eps, float) and [name for name, _ in module.named_parameters()] == ["weight"] and _is_plain(module, eps):
            module.forward = MethodType(_forward, module)
            count += 1
    return count


def _forward(module: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    weight, eps = module.weight, module.variance_epsilon
    assert isinstance(weight, torch.Tensor) and isinstance(eps, float)
    if hidden_states.dtype != torch.float32 or weight.dtype != torch.float32 or torch.is_autocast_enabled(hidden_states.device.type):
        own: torch.Tensor = type(module).forward(module, hidden_states)
        return own
    out: torch.Tensor = _RMSNorm.apply(hidden_states, weight, eps)
    return out


@torch.no_grad()
def _is_plain(module: torch.nn.Module, eps: float) -> bool:
    weight = module.weight
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    x = torch.linspace(-2.0, 3.0, 3 * weight.numel()).view(3, -1).sin()
    return torch.allclose(module(x), x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, rtol=1e-5, atol=1e-7)
