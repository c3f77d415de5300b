"""Attention over rows: each token once, each row reading its own path (see `packing`).

Two implementations of the same: `mappa_rows` attends row by row through SDPA, with no mask over all pairs of tokens, and runs anywhere;
`mappa_flex` is one FlexAttention call with a block mask, for GPUs.

Registered with transformers as the attention implementation `mappa_rows`, which any model that takes attention functions from
outside can use; the plan travels as the keyword `rows` of the model's forward. Grouped-query attention, sliding windows and
logit soft caps are honoured; a model that needs more (attention sinks, recurrent layers, ALiBi) fails `takes_rows`, and is trained on
padded rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from . import blocks, flex
from .packing import Pack, Rows

NAME = "mappa_rows"


def gather(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`values[index]` for `[T, D]` values: an embedding lookup, whose backward is far faster on a CPU than that of indexing."""
    return F.embedding(index, values)


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    rows: Rows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Query `[1, H, T, D]`, key and value `[1, G, T, D]` (G divides H) -> `[1, T, H, D]`."""
    if rows is None:
        raise ValueError("the attention implementation 'mappa_rows' was called without rows")
    if s_aux is not None:
        raise NotImplementedError("attention sinks over rows")
    heads, kv_heads, tokens = query.shape[1], key.shape[1], query.shape[2]
    split = rows.split
    if split is not None and softcap is None and (sliding_window is None or sliding_window >= tokens) and blocks.takes(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return blocks.split_attention(q, k, v, split, scaling)[None], None
    flat_q, flat_k, flat_v = (x[0].transpose(0, 1).reshape(tokens, -1) for x in (query, key, value))
    outputs = []
    for group in rows.groups:
        (n, wide), long = group.queries.shape, group.keys.shape[1]
        q = _rows(flat_q, group.queries, group.query_run, heads)
        k, v = (_rows(flat, group.keys, group.key_run, kv_heads) for flat in (flat_k, flat_v))
        if kv_heads != heads:
            k, v = (x[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).reshape(n, heads, long, -1) for x in (k, v))
        mask = group.mask(sliding_window)
        if softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        else:
            out = _capped(q, k, v, mask, scaling, softcap)
        outputs.append(out.transpose(1, 2).reshape(n * wide, -1))
    whole = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (whole if rows.place is None else gather(whole, rows.place)).view(1, tokens, heads, -1), None


def _rows(flat: torch.Tensor, index: torch.Tensor, run: slice | None, heads: int) -> torch.Tensor:
    """`[n, heads, L, D]` of `[T, heads * D]` values at an index `[n, L]`."""
    taken = gather(flat, index) if run is None else flat[run]
    return taken.view(*index.shape, heads, -1).transpose(1, 2)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float | None, softcap: float
) -> torch.Tensor:
    weights = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = torch.tanh(weights / softcap) * softcap
    seen = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).tril() if mask is None else mask
    return weights.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


AttentionInterface.register(NAME, rows_attention)


def takes_rows(model: PreTrainedModel, forks: Sequence[Pack], alone: Pack) -> str | None:
    """None if the model gives the same hidden states for forked packs as for their sequences alone; else why not.

    Leaves the model on the first of the implementations that does, FlexAttention first on a GPU, and as it was when none does.
    """
    before = model.config._attn_implementation
    with torch.no_grad():
        plain = backbone(model, alone)[alone.source]
    reasons = []
    for name in (flex.NAME, NAME) if model.device.type == "cuda" else (NAME,):
        found = [reason for fork in forks if (reason := _differs(model, fork, plain, name)) is not None]
        if not found:
            return None
        reasons.append(found[0])
    model.set_attn_implementation(before)
    return reasons[-1]


def _differs(model: PreTrainedModel, fork: Pack, plain: torch.Tensor, name: str) -> str | None:
    try:
        with torch.no_grad():
            model.set_attn_implementation(name)
            rows = backbone(model, fork)[fork.source]
    except (TypeError, ValueError, NotImplementedError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if plain.shape == rows.shape and torch.allclose(plain, rows, rtol=1e-2, atol=1e-2 * float(plain.abs().max())):
        return None
    return "its hidden states differ from those of the sequences alone"


def backbone(model: PreTrainedModel, pack: Pack) -> torch.Tensor:
    """Last hidden states of a pack, `[T, D]` flat."""
    extra = {} if pack.rows is None else {"rows": pack.rows}
    out = model.base_model(input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, **extra)
    hidden: torch.Tensor = out.last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])
