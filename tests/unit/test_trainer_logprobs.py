"""Log-probs and entropies in chunks: the same numbers and gradients as all logits at once, with one chunk of logits alive."""

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel

from mappa_graph.errors import TrainerError
from mappa_graph.trainers.learner import prepare
from mappa_graph.trainers.logprobs import head_logprobs


class Adapted(torch.nn.Linear):
    """A head that can't be known to be plainly linear, and so is called as it is; notes how many logits each call made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made = []

    def forward(self, x):
        out = super().forward(x)
        self.made.append(out.numel())
        return out


@pytest.mark.parametrize("kind", [torch.nn.Linear, Adapted])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_chunks_give_the_values_and_gradients_of_all_logits_at_once(kind, bias, cap):
    torch.manual_seed(0)
    head = kind(8, 50, bias=bias).double()
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    target, temperature = torch.randint(0, 50, (23,)), torch.tensor([0.5, 1.0, 2.0]).repeat(8)[:23]
    upstream = torch.randn(23, dtype=torch.float64)
    leaves = (hidden, *head.parameters())

    logits = head(hidden) if cap is None else torch.tanh(head(hidden) / cap) * cap
    log_all = (logits / temperature[:, None]).log_softmax(-1)
    expected = log_all.gather(1, target[:, None])[:, 0]
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), leaves)
    for chunk in (1 << 20, 250, 1):
        logprobs, entropy = head_logprobs(head, hidden, target, temperature, cap, chunk=chunk)
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), -(log_all.exp() * log_all).sum(-1), rtol=1e-5, atol=1e-5)
        assert not entropy.requires_grad
        for got, wanted in zip(torch.autograd.grad((logprobs * upstream).sum(), leaves), expected_gradients, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_no_more_than_a_chunk_of_logits_is_made_at_once_and_each_is_made_again_for_the_gradient():
    head = Adapted(4, 50)
    logprobs, _ = head_logprobs(head, torch.randn(23, 4), torch.zeros(23, dtype=torch.long), torch.ones(23), chunk=250)
    logprobs.sum().backward()
    assert max(head.made) <= 250 and len(head.made) == 2 * 5
    head.made.clear()
    with torch.no_grad():
        head_logprobs(head, torch.randn(23, 4), torch.zeros(23, dtype=torch.long), torch.ones(23), chunk=250)
    assert len(head.made) == 5


@pytest.mark.parametrize("kind", [torch.nn.Linear, Adapted])
def test_logits_far_apart_stay_finite(kind):
    head = kind(2, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[300.0, 0.0], [0.0, 0.0], [-300.0, 0.0]]))
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    logprobs, entropy = head_logprobs(head, hidden, torch.tensor([1]), torch.ones(1))
    logprobs.sum().backward()
    assert logprobs.tolist() == [-300.0] and entropy.tolist() == [0.0] and hidden.grad.tolist() == [[-300.0, 0.0]]


def test_a_frozen_head_gets_no_gradient():
    head = torch.nn.Linear(4, 50)
    head.requires_grad_(False)
    hidden = torch.randn(5, 4, requires_grad=True)
    head_logprobs(head, hidden, torch.zeros(5, dtype=torch.long), torch.ones(5))[0].sum().backward()
    assert head.weight.grad is None and hidden.grad.abs().sum() > 0


def test_a_model_that_scales_its_logits_is_refused_rather_than_trained_wrongly():
    config = CohereConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        logit_scale=0.01,
        initializer_range=2.0,
    )
    with pytest.raises(TrainerError, match="CohereForCausalLM scales its logits"):
        prepare(CohereForCausalLM(config).eval(), "p")


def test_a_model_with_learned_positions_takes_rows_too():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    assert prepare(GPT2LMHeadModel(config).eval(), "p")


@pytest.mark.parametrize("size", [1 << 24, 64])
def test_the_gradient_of_confident_tokens_survives_half_precision(size):
    """Of a token with probability p there is `1 - p` to learn, which half precision can't tell from 0 beside p."""
    torch.manual_seed(0)
    weight = torch.eye(32) + 0.05 * torch.randn(32, 32)
    hidden = 9.0 * (torch.eye(32)[:24] + 0.05 * torch.randn(24, 32))
    target = torch.arange(24)
    grads = {}
    for half in (False, True):
        head = torch.nn.Linear(32, 32, bias=True)
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.zero_()
        seen = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logprobs, _ = head_logprobs(head, seen, target, torch.ones(24), chunk=size * 32 if size == 64 else size)
        assert logprobs.exp().mean() > 0.99
        logprobs.sum().backward()
        grads[half] = (seen.grad, head.weight.grad, head.bias.grad)
    for full, rough in zip(grads[False], grads[True], strict=True):
        assert (full - rough).norm() < 0.1 * full.norm()
