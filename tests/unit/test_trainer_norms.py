"""The quick RMSNorm: the module's own numbers, and only where it is that norm."""

import copy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mappa_graph.trainers.norms import quicken_norms

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_outputs_and_gradients_are_those_of_the_formula_in_float64(scale):
    torch.manual_seed(0)
    module = LlamaRMSNorm(24, eps=1e-5)
    with torch.no_grad():
        module.weight.normal_()
    exact = copy.deepcopy(module).double()
    assert quicken_norms(torch.nn.Sequential(module)) == 1
    x, d = scale * torch.randn(3, 5, 24), torch.randn(3, 5, 24)
    x64 = x.double().requires_grad_()
    wide = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * exact.weight
    wide.backward(d.double())
    x.requires_grad_()
    out = module(x)
    out.backward(d)
    torch.testing.assert_close(out.double(), wide, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-5 / scale)
    torch.testing.assert_close(module.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-5)


def test_models_with_this_norm_take_it_and_others_keep_their_own():
    llama, qwen = LlamaForCausalLM(LlamaConfig(**SMALL)), Qwen3ForCausalLM(Qwen3Config(**SMALL))
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL))
    ids = torch.arange(12).view(2, 6)
    for model, count in ((llama, 5), (qwen, 9), (gemma, 0)):
        before = model(ids).logits
        assert quicken_norms(model) == count
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-6)


def test_other_dtypes_and_autocast_stay_with_the_modules_own_forward():
    module, own = LlamaRMSNorm(16), LlamaRMSNorm(16)
    quicken_norms(torch.nn.Sequential(module))
    x = torch.randn(4, 16)
    assert torch.equal(module(x.bfloat16()), own(x.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), own(x))


def test_a_copy_computes_with_its_own_weight_and_a_hooked_module_keeps_its_hook():
    module = torch.nn.Sequential(LlamaRMSNorm(8))
    assert quicken_norms(module) == 1 and quicken_norms(module) == 0
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].weight.zero_()
    x = torch.randn(2, 8)
    assert not other(x).any() and module(x).any()
    hooked = LlamaRMSNorm(8)
    hooked.forward = lambda hidden: hidden
    assert quicken_norms(torch.nn.Sequential(hooked)) == 0 and torch.equal(hooked(x), x)
