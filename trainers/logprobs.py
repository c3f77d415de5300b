"""Log-probabilities and entropies of the trainable tokens, and of nothing else.

The transformer runs without its head; the head sees only the positions that predict a trainable token, a chunk at a time, and each chunk
is computed again in the backward pass, where it is turned into its own gradient in place. Memory is the gradient of the head and one
chunk of logits (two, in a batch that has no more), whatever the vocabulary and the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mappa_graph.errors import TrainerError

from .attention import backbone, gather
from .packing import Pack

CHUNK = 1 << 24
"""Logits held at once."""
CACHED = 1 << 20
"""Logits that are gone over several times while they lie in a processor's cache."""
KEPT = 2
"""Chunks that are kept for the backward pass instead of being computed again, where there are no more."""


def pack_logprobs(model: PreTrainedModel, pack: Pack, *, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy (nats, detached) of each trainable token of a pack at its temperature: `[N]`, `[N]`, float32.

    Differentiable where gradients are enabled.
    """
    hidden = gather(backbone(model, pack), pack.source)
    return head_logprobs(head(model), hidden, pack.target, pack.temperature, softcap(model), chunk=chunk)


def head(model: PreTrainedModel) -> torch.nn.Module:
    """The module that turns hidden states into logits."""
    module = model.get_output_embeddings()
    if module is None:
        raise TrainerError(f"{type(model).__name__} has no language-model head", hint="give the folder of a causal language model")
    return module


def softcap(model: PreTrainedModel) -> float | None:
    return getattr(model.config, "final_logit_softcapping", None)


def head_logprobs(
    module: torch.nn.Module,
    hidden: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor,
    cap: float | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `target` `[N]` and entropies `[N]` from hidden states `[N, D]`, at most `chunk` logits at once."""
    weight = cast(torch.Tensor, module.weight)
    size = max(1, chunk // weight.shape[0])
    if type(module) is torch.nn.Linear:
        return cast(tuple[torch.Tensor, torch.Tensor], _Linear.apply(hidden, weight, module.bias, target, temperature, cap, size))
    parts = []
    for start in range(0, len(hidden), size):  # a head of another kind (adapted, quantised) is called as it is
        piece = (hidden[start : start + size], target[start : start + size], temperature[start : start + size])
        parts.append(checkpoint(_logprobs, module, *piece, cap, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class _Linear(torch.autograd.Function):
    """`head_logprobs` of a linear head. With `p = softmax(z)`, `d log p_target / d z = onehot(target) - p`.

    Where the probabilities of all tokens are kept, or made again, little more is computed over the vocabulary than two products: the
    upstream gradient scales hidden states instead of logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        temperature: torch.Tensor,
        cap: float | None,
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.cap, ctx.size = cap, size
        ctx.plain = bool((temperature == 1.0).all())
        keep = cap is None and len(hidden) <= KEPT * size and any(ctx.needs_input_grad[:3])
        ctx.kept = []
        logprobs, entropy, total = hidden.new_empty(3, len(hidden), dtype=torch.float32).unbind()
        for rows in _slices(len(hidden), size):
            z = _logits(hidden[rows], weight, bias, None if ctx.plain else temperature[rows], cap, ctx.dtype)
            for part in _slices(len(z), max(1, CACHED // z.shape[1])):
                at = slice(rows.start + part.start, rows.start + part.stop)
                logprobs[at], entropy[at], total[at] = _normalise(z[part], target[at], keep=keep)
            if keep:
                ctx.kept.append(z)
        ctx.save_for_backward(hidden, weight, bias, target, temperature, total)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target, temperature, total = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = None if not needs_weight else torch.empty_like(weight) if len(hidden) else torch.zeros_like(weight)
        d_bias = torch.zeros_like(bias) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(len(hidden), ctx.size):
                gradient, wanted = upstream[0][rows, None] / temperature[rows, None], target[rows]
                if ctx.kept:
                    p = ctx.kept.pop(0)
                    slope = None
                else:
                    z = _logits(hidden[rows], weight, bias, None if ctx.plain else temperature[rows], ctx.cap, ctx.dtype)
                    slope = None if ctx.cap is None else 1.0 - (z * temperature[rows, None] / ctx.cap) ** 2
                    p = z.sub_(total[rows, None]).exp_()
                # In float32 and before all else: of a confident token `p - 1` is all there is, and half precision would round it away.
                p.scatter_add_(-1, wanted[:, None], p.new_full((1, 1), -1.0).expand(len(p), 1))
                if slope is not None:
                    p *= slope
                p = p.to(ctx.dtype)
                if d_hidden is not None:
                    d_hidden[rows] = (p @ weight.to(ctx.dtype)).float().mul_(-gradient).to(hidden.dtype)
                if d_weight is not None:
                    scaled = (hidden[rows].float() * -gradient).to(ctx.dtype)
                    if ctx.dtype == weight.dtype:
                        d_weight.addmm_(p.t(), scaled, beta=0 if rows.start == 0 else 1)
                    else:
                        made = p.t() @ scaled
                        d_weight = d_weight.copy_(made) if rows.start == 0 else d_weight.add_(made)
                if d_bias is not None:
                    d_bias -= (p.float() * gradient).sum(0).to(d_bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _normalise(z: torch.Tensor, target: torch.Tensor, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob of the target, entropy, and the log of the sum of `exp(z)`, each `[n]`, of logits `[n, V]`, which hold the softmax then."""
    highest = z.amax(-1, keepdim=True)
    z -= highest
    chosen = z.gather(-1, target[:, None])[:, 0]
    e = z.exp()
    mass = e.sum(-1)
    log_mass = mass.log()
    entropy = log_mass - torch.linalg.vecdot(e, z) / mass
    if keep:
        torch.div(e, mass[:, None], out=z)
    return chosen - log_mass, entropy, highest[:, 0] + log_mass


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
    cap: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A chunk of logits at its temperatures (None = 1), float32, in memory of its own."""
    z = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).float()
    if cap is not None:
        z = z.div_(cap).tanh_().mul_(cap)
    return z if temperature is None else z.div_(temperature[:, None])


def _logprobs(
    module: torch.nn.Module, hidden: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = module(hidden).float()
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    log_all = (logits / temperature[:, None]).log_softmax(-1)
    with torch.no_grad():
        entropy = -torch.linalg.vecdot(log_all.exp(), log_all)
    return log_all.gather(-1, target[:, None])[:, 0], entropy


def check_head(model: PreTrainedModel, pack: Pack) -> None:
    """Raises TrainerError if the model's own logits aren't head(hidden states) with a soft cap at most."""
    with torch.no_grad():
        mine, _ = pack_logprobs(model, pack)
        logits = model(input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False).logits.float()
        flat = logits.reshape(-1, logits.shape[-1])[pack.source] / pack.temperature[:, None]
        own = flat.log_softmax(-1).gather(-1, pack.target[:, None])[:, 0]
    if not torch.allclose(mine, own, rtol=1e-2, atol=5e-2):
        raise TrainerError(
            f"{type(model).__name__} scales its logits in a way that is not known here (differs by {float((mine - own).abs().max()):.3g})",
            hint="models whose logits are a linear head, with a soft cap or without, can be trained",
        )
