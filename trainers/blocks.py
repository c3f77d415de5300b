"""Attention over rows on a CPU, with long shared prefixes attended to once for all rows that share them.

Row by row, a shared prefix is copied, with its gradient, for each row that reads it. Here it is a *block* instead: its tokens as keys, and
all that descends from it, which in a pack is a run of tokens, as queries. What is left of a row (its own tokens, and ancestors too short to
pay) is attended to as before. A token's softmax then runs over several calls, which are put together by their log-sum-exps; going
backwards, each call is given the whole softmax's sum and output, from which a flash kernel computes exactly its own part of the gradient.

The one thing to know: each pair of a query and a key that it sees is in exactly one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .packing import RowGroup, Split

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel that this rests on is there for such tensors."""
    known = value.dtype in (torch.float32, torch.bfloat16, torch.float64)
    return value.device.type == "cpu" and known and query.shape[-1] == value.shape[-1]


def split_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split: Split, scaling: float | None) -> torch.Tensor:
    """Query `[T, H, D]`, key and value `[T, G, D]` (G divides H) -> `[T, H, D]`, all of value's dtype: autocast leaves keys float32."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: torch.Tensor = _Attention.apply(query, key, value, split, scale)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split: Split, scale: float) -> torch.Tensor:
        heads = query.shape[1]
        outs, sums = [], []
        for group in split.groups:
            q, k, v = _taken(group, query, key, value)
            o, s = _forward(q, k, v, 0.0, group.rooted, attn_mask=_mask(group, query.dtype), scale=scale)
            outs.append(o.transpose(1, 2).reshape(-1, heads, o.shape[-1]))
            sums.append(s.transpose(1, 2).reshape(-1, heads))
        whole, total = (torch.cat(x) if len(x) > 1 else x[0] for x in (outs, sums))
        if split.place is not None:
            whole, total = whole[split.place], total[split.place]
        out = whole.float() if query.dtype == torch.bfloat16 else whole
        for start, end, last in split.blocks:
            o, s = _forward(*_block(query, key, value, start, end, last), 0.0, False, scale=scale)
            o, s = _flat(o), s.permute(2, 0, 1).reshape(-1, heads)
            before = total[end:last]
            both = torch.logaddexp(before, s)
            out[end:last].mul_((before - both).exp_()[..., None]).addcmul_(o, (s - both).exp_()[..., None].to(o.dtype))
            total[end:last] = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.split, ctx.scale = split, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        split, scale = ctx.split, ctx.scale
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[2]
        gradient = upstream[0].contiguous()
        # Queries that only pad a group have no gradient, and no part in any softmax.
        rows = _spread(gradient, split, 0.0), _spread(out, split, 0.0), _spread(total, split, torch.inf)
        d_query_rows, d_key, d_value = [], torch.zeros_like(key), torch.zeros_like(value)
        at = 0
        for group in split.groups:
            n, wide = group.queries.shape
            g, o, s = (x[at : at + n * wide].view(n, wide, *x.shape[1:]).transpose(1, 2) for x in rows)
            at += n * wide
            q, k, v = _taken(group, query, key, value)
            mask = _mask(group, query.dtype)
            dq, dk, dv = _backward(g, q, k, v, o, s.contiguous(), 0.0, group.rooted, attn_mask=mask, scale=scale)
            d_query_rows.append(dq.transpose(1, 2).reshape(n * wide, heads, width))
            for into, d in ((d_key, dk), (d_value, dv)):
                _give_back(into, group, d.unflatten(1, (kv_heads, -1)).sum(2) if kv_heads != heads else d)
        d_query = torch.cat(d_query_rows) if len(d_query_rows) > 1 else d_query_rows[0]
        if split.place is not None:
            d_query = d_query[split.place]
        for start, end, last in split.blocks:
            q, k, v = _block(query, key, value, start, end, last)
            g, o = (_grouped(x[end:last], kv_heads) for x in (gradient, out))
            s = total[end:last].view(-1, kv_heads, heads // kv_heads).permute(1, 2, 0).contiguous()
            dq, dk, dv = _backward(g, q, k, v, o, s, 0.0, False, scale=scale)
            d_query[end:last] += _flat(dq)
            d_key[start:end] += dk.sum(1).transpose(0, 1)
            d_value[start:end] += dv.sum(1).transpose(0, 1)
        return d_query, d_key, d_value, None, None


def _taken(group: RowGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`[n, H, L, D]` of a group's queries, keys and values."""
    heads, kv_heads = query.shape[1], key.shape[1]
    q = _at(query, group.queries, group.query_run)
    k, v = (_at(x, group.keys, group.key_run) for x in (key, value))
    if kv_heads != heads:
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, heads // kv_heads, -1).flatten(2, 3) for x in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _at(values: torch.Tensor, index: torch.Tensor, run: slice | None) -> torch.Tensor:
    """`[n, L, heads, D]` of `[T, heads, D]` values at an index `[n, L]`."""
    return (values[index.reshape(-1)] if run is None else values[run]).view(*index.shape, *values.shape[1:])


def _spread(values: torch.Tensor, split: Split, fill: float) -> torch.Tensor:
    """Values of tokens, `[T, ...]`, where the groups have their queries, one group after another."""
    if split.place is None:
        return values
    count = sum(group.queries.numel() for group in split.groups)
    return values.new_full((count, *values.shape[1:]), fill).index_copy_(0, split.place, values)


def _give_back(into: torch.Tensor, group: RowGroup, gradient: torch.Tensor) -> None:
    """Adds the gradient `[n, G, P, D]` of a group's keys to `[T, G, D]`."""
    flat = gradient.transpose(1, 2).reshape(-1, *into.shape[1:])
    if group.key_run is not None:
        into[group.key_run] += flat
    else:  # far faster on a CPU than adding at an index
        width = into[0].numel()
        into += torch.ops.aten.embedding_dense_backward(flat.reshape(-1, width), group.keys.reshape(-1), len(into), -1, False).view_as(into)


def _block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, end: int, last: int) -> tuple[torch.Tensor, ...]:
    """Queries `[G, H / G, last - end, D]` and keys and values `[G, H / G, end - start, D]`; heads that share keys see the same memory."""
    kv_heads = key.shape[1]
    share = query.shape[1] // kv_heads
    k, v = (x[start:end].transpose(0, 1).unsqueeze(1).expand(-1, share, -1, -1) for x in (key, value))
    return _grouped(query[end:last], kv_heads), k, v


def _grouped(values: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[L, H, D]` -> `[G, H / G, L, D]`."""
    return values.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """`[G, H / G, L, D]` -> `[L, H, D]`."""
    return values.permute(2, 0, 1, 3).flatten(1, 2)


def _mask(group: RowGroup, dtype: torch.dtype) -> torch.Tensor | None:
    """0 where a query sees a key, -inf elsewhere: `[n, 1, O, P]`; None where plain causal attention says the same."""
    seen = group.mask(None)
    if seen is None:
        return None
    if dtype not in group.added:
        group.added[dtype] = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return group.added[dtype]
