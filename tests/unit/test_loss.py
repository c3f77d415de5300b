"""The clipped loss against hand-worked numbers, a slow float64 implementation, and TRL's GRPO loss where the two coincide."""

import math
import types
from collections import defaultdict

import pytest
import torch

from mappa_graph.trainers import policy_loss


def slow_loss(logprobs, old, engine, advantages, clip, cap, n):
    total = 0.0
    for lp, o, e, a in zip(logprobs, old, engine, advantages, strict=True):
        w = min(math.exp(o - e), cap)
        rho = math.exp(lp - o)
        total -= w * min(rho * a, min(max(rho, 1 - clip), 1 + clip) * a)
    return total / n


def slow_gradient(logprobs, old, engine, advantages, clip, cap, n):
    out = []
    for lp, o, e, a in zip(logprobs, old, engine, advantages, strict=True):
        rho = math.exp(lp - o)
        stopped = (a > 0 and rho > 1 + clip) or (a < 0 and rho < 1 - clip)
        out.append(0.0 if stopped else -min(math.exp(o - e), cap) * rho * a / n)
    return out


def tensors(*rows):
    return [torch.tensor(r, dtype=torch.float64) for r in rows]


def test_worked_by_hand():
    # Token 1: rho = 1.5 is clipped to 1.2, A = 2 -> 2.4.  Token 2: rho = 0.5, A = -1: min(-0.5, -0.8) = -0.8.  Both w = 1, N = 4.
    lp, old, engine, adv = tensors([math.log(0.3), math.log(0.2)], [math.log(0.2), math.log(0.4)], [math.log(0.2), math.log(0.4)], [2, -1])
    out = policy_loss(lp, old, engine, adv, denominator=4.0)
    assert out.loss.item() == pytest.approx(-(2.4 - 0.8) / 4, abs=1e-12)
    assert out.clipped.tolist() == [True, True]


def test_a_token_outside_the_clip_on_the_harmless_side_still_learns():
    lp, old, engine, adv = tensors([math.log(0.1)], [math.log(0.2)], [math.log(0.2)], [1.0])
    lp.requires_grad_()
    out = policy_loss(lp, old, engine, adv)
    out.loss.backward()
    assert float(lp.grad[0]) == pytest.approx(-0.5, abs=1e-12) and not bool(out.clipped[0])


def test_the_importance_weight_is_capped_and_carries_no_gradient():
    lp, old, engine, adv = tensors([-1.0, -1.0], [-1.0, -1.0], [-3.0, -0.5], [1.0, 1.0])
    lp.requires_grad_()
    old.requires_grad_()
    out = policy_loss(lp, old, engine, adv, denominator=1.0)
    out.loss.backward()
    assert out.weight.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert lp.grad.tolist() == pytest.approx([-2.0, -math.exp(-0.5)])
    assert old.grad is None


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_agree_with_the_slow_implementation_in_value_and_gradient(seed):
    rng = torch.Generator().manual_seed(seed)
    n = 40
    lp = -torch.rand(n, generator=rng, dtype=torch.float64) * 3
    old = lp + torch.randn(n, generator=rng, dtype=torch.float64) * 0.3
    engine = old + torch.randn(n, generator=rng, dtype=torch.float64)
    adv = torch.randn(n, generator=rng, dtype=torch.float64)
    lp.requires_grad_()
    out = policy_loss(lp, old, engine, adv, clip=0.15, importance_cap=1.5, denominator=77.0)
    out.loss.backward()
    args = [t.tolist() for t in (lp, old, engine, adv)]
    assert out.loss.item() == pytest.approx(slow_loss(*args, 0.15, 1.5, 77.0), abs=1e-12)
    assert lp.grad.tolist() == pytest.approx(slow_gradient(*args, 0.15, 1.5, 77.0), abs=1e-12)


def test_parts_add_up_to_the_whole():
    rng = torch.Generator().manual_seed(1)
    lp, old, engine, adv = (torch.randn(10, generator=rng, dtype=torch.float64) for _ in range(4))
    whole = policy_loss(lp, old, engine, adv, denominator=10.0).loss
    parts = [policy_loss(*(t[s] for t in (lp, old, engine, adv)), denominator=10.0).loss for s in (slice(0, 3), slice(3, 10))]
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-12)


def test_zero_advantages_give_exactly_zero_gradient():
    lp, old, engine, adv = tensors([-1.0, -2.0], [-1.5, -1.0], [-1.0, -4.0], [0.0, 0.0])
    lp.requires_grad_()
    policy_loss(lp, old, engine, adv).loss.backward()
    assert lp.grad.tolist() == [0.0, 0.0]


def test_equals_the_loss_of_trl_on_the_same_tensors():
    """TRL's GRPO loss with type `dapo`, beta 0 and truncated importance weights is this loss; its own code computes the other side."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    rng = torch.Generator().manual_seed(0)
    batch, width = 3, 6
    lp = (-torch.rand(batch, width, generator=rng)).requires_grad_()
    old = lp.detach() + 0.3 * torch.randn(batch, width, generator=rng)
    engine = old + torch.randn(batch, width, generator=rng)
    advantages = torch.randn(batch, width, generator=rng)
    mask = (torch.arange(width)[None] < torch.tensor([[6], [3], [1]])).long()
    weight = (old - engine).exp().clamp(max=2.0)

    class Stub(types.SimpleNamespace):
        def __getattr__(self, name):
            return False if name.startswith(("_entropy", "aux")) else None

    stub = Stub(
        _get_per_token_logps_and_entropies=lambda *_, **__: (lp, torch.zeros(batch, width), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        args=types.SimpleNamespace(delta=None, steps_per_generation=1),
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, **_: t),
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(batch, 2, dtype=torch.long),
        "prompt_mask": torch.ones(batch, 2, dtype=torch.long),
        "completion_ids": torch.zeros(batch, width, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "importance_sampling_ratio": weight,
        "num_items_in_batch": mask.sum(),
    }
    theirs = GRPOTrainer._compute_loss(stub, None, inputs)
    (their_gradient,) = torch.autograd.grad(theirs, lp)

    chosen = mask.bool()
    ours = policy_loss(lp[chosen], old[chosen], engine[chosen], advantages[chosen])
    (our_gradient,) = torch.autograd.grad(ours.loss, lp)
    assert ours.loss.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(our_gradient, their_gradient)
