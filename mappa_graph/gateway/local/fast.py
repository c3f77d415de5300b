"""One decode step of Llama-shaped models with few operations (inside `LocalEngine`; imports torch).

Small models on a CPU spend most of a step in Python between the operations of the general forward. This one fuses the projections,
looks rotary tables up and attends with grouped heads directly. It takes the place of the general forward only after it has
been compared with it: `fast_step` gives None for a model that it does not know or does not match.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear, rms_norm, silu

log = logging.getLogger("mappa_graph.gateway")
_KNOWN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


class Slots(Protocol):
    """What a step needs of the key/value cache."""

    layers: Any
    at: torch.Tensor
    """[rows]: the position that each row writes."""
    slots: torch.Tensor
    top: int


class _Layer(NamedTuple):
    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class FastStep:
    """`step(tokens [rows, 1], cache, mask [rows, 1, 1, top]) -> logits [rows, vocabulary]`."""

    def __init__(self, module: Any, max_positions: int) -> None:
        config, body = module.config, module.model
        attention = body.layers[0].self_attn
        self.head = int(attention.head_dim)
        self.heads = int(config.num_attention_heads)
        self.groups = int(config.num_key_value_heads)
        self.scale = float(attention.scaling)
        self.eps = float(config.rms_norm_eps)
        self.embedding = body.embed_tokens.weight
        self.norm = body.norm.weight
        self.unembedding = module.lm_head.weight
        self.unembedding_bias = module.lm_head.bias
        positions = torch.arange(max_positions, device=self.embedding.device)[None]
        cos, sin = body.rotary_emb(self.embedding[:1], positions)
        self.cos, self.sin = cos[0], sin[0]
        self.layers = [self._layer(layer) for layer in body.layers]

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        return _Layer(
            norm_in=layer.input_layernorm.weight,
            qkv=_fuse(*qkv),
            qkv_bias=None if qkv[0].bias is None else torch.cat([p.bias for p in qkv]),
            q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            out=attention.o_proj.weight,
            out_bias=attention.o_proj.bias,
            norm_mlp=layer.post_attention_layernorm.weight,
            gate_up=_fuse(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj.weight,
        )

    def __call__(self, tokens: torch.Tensor, cache: Slots, mask: torch.Tensor) -> torch.Tensor:
        rows, head, heads, groups = len(tokens), self.head, self.heads, self.groups
        shared = heads // groups
        at, slots, top = cache.at, cache.slots, cache.top
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        x = self.embedding[tokens[:, 0]]
        width = (x.shape[1],)
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            qkv = linear(rms_norm(x, width, layer.norm_in, self.eps), layer.qkv, layer.qkv_bias).view(rows, heads + 2 * groups, head)
            qk, v = qkv[:, : heads + groups], qkv[:, heads + groups :]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = rms_norm(qk[:, :heads], (head,), layer.q_norm, self.eps)
                qk = torch.cat([q, rms_norm(qk[:, heads:], (head,), layer.k_norm, self.eps)], dim=1)
            first, second = qk.chunk(2, dim=-1)
            qk = qk * cos + torch.cat([-second, first], dim=-1) * sin
            if not kept.is_initialized:
                kept.lazy_initialization(qk[:, heads:, None], v[:, :, None])
            kept.keys[slots, :, at] = qk[:, heads:]
            kept.values[slots, :, at] = v
            q = qk[:, :heads].reshape(rows, groups, shared, head)
            scores = torch.matmul(q, kept.keys[:rows, :, :top].transpose(2, 3)).mul_(self.scale).add_(mask)
            seen = torch.matmul(scores.softmax(-1), kept.values[:rows, :, :top]).view(rows, heads * head)
            x = x + linear(seen, layer.out, layer.out_bias)
            gate, up = linear(rms_norm(x, width, layer.norm_mlp, self.eps), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return linear(rms_norm(x, width, self.norm, self.eps), self.unembedding, self.unembedding_bias)


def _fuse(*projections: Any) -> torch.Tensor:
    """One weight for several projections of the same input. They become views of it, so that nothing is held twice."""
    fused = torch.cat([p.weight for p in projections])
    place = 0
    for projection in projections:
        rows = projection.weight.shape[0]
        projection.weight.data = fused[place : place + rows]
        place += rows
    return fused


def fast_step(module: Any, cache: Any, max_positions: int, *, compare: bool) -> FastStep | None:
    """The fast step of a module, or None. `cache` is an empty cache of its own, used to compare the two forwards."""
    config = module.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    mlp_bias = getattr(config, "mlp_bias", False)
    if type(module).__name__ not in _KNOWN or rope not in _ROPE or config.hidden_act != "silu" or mlp_bias:
        return None
    with torch.no_grad():
        step = FastStep(module, max_positions)
        if not compare:
            return step
        ids = torch.arange(1, 6, device=step.embedding.device) % config.vocab_size
        wanted = module(input_ids=ids[None], use_cache=False).logits[0]
        got = []
        for place, id in enumerate(ids):
            cache.at = torch.tensor([place], device=ids.device)
            cache.slots = torch.zeros(1, dtype=torch.long, device=ids.device)
            cache.top = place + 1
            got.append(step(id.view(1, 1), cache, wanted.new_zeros(1, 1, 1, cache.top))[0])
    worst = float((torch.stack(got) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
    if not worst < (1e-4 if wanted.dtype == torch.float32 else 5e-2):
        log.warning("the fast step of %s differs from its forward by %.2g; the general forward is used", type(module).__name__, worst)
        return None
    return step
