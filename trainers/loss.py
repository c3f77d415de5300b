"""The clipped policy loss of one micro-batch, as a sum over its tokens divided by a count that spans the whole optimizer batch.

Because the divisor `N` is the number of trainable tokens of the whole batch, over all ranks, the gradients of any split into
micro-batches add up to the gradient of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """`loss` is differentiable; the other fields are detached, per token `[T]`."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """Whether the clip took the gradient away from this token."""
    weight: torch.Tensor


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip: float = 0.2,
    importance_cap: float = 2.0,
    denominator: float | None = None,
) -> TokenLoss:
    """`-sum_t w_t min(rho_t A_t, clip(rho_t, 1-clip, 1+clip) A_t) / N`, all inputs `[T]` over trainable tokens.

    `rho = pi / pi_old` (PPO, arXiv 1707.06347); `w = min(pi_old / pi_engine, cap)`, detached, corrects for an engine that samples
    with other numerics or older weights than the trainer's (truncated importance sampling). `N` is `denominator`, or T.
    """
    count = float(len(logprobs)) if denominator is None else denominator
    old = old_logprobs.detach()
    weight = (old - engine_logprobs.detach()).exp().clamp(max=importance_cap)
    ratio = (logprobs - old).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip, 1.0 + clip) * advantages
    loss = -(weight * torch.minimum(plain, bounded)).sum() / count
    held = ratio.detach()
    return TokenLoss(loss, held, (bounded < plain).detach(), weight)
