"""FlexAttention over a pack: one call for all rows, with a block mask made from where each token's descendants end.

In a pack, sequences lie in sorted order, so what descends from a token is a run of tokens that begins with it: token q sees token k just
if `k <= q < ends[k]`, whatever the shape of the trie. The one thing to know: on a GPU the call is compiled, and whole blocks of pairs that
nobody sees are skipped; elsewhere it runs uncompiled, which serves to check it and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface

from .packing import Rows

NAME = "mappa_flex"


def sees(rows: Rows, window: int | None) -> Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The mask of a pack, as FlexAttention takes it: whether query q sees key k."""
    ends, depth = rows.ends, rows.depth

    def path(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < ends[k])

    if window is None:
        return path

    def near(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return path(batch, head, q, k) & (depth[q] - depth[k] < window)

    return near


def flex_rows(
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
        raise ValueError(f"the attention implementation {NAME!r} was called without rows")
    if s_aux is not None:
        raise NotImplementedError("attention sinks over rows")

    def capped(score: torch.Tensor, batch: Any, head: Any, q: Any, k: Any) -> torch.Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out = _attend(query.device.type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=_mask(rows, sliding_window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


def _mask(rows: Rows, window: int | None) -> Any:
    """The block mask of a pack, made once for all layers."""
    from torch.nn.attention.flex_attention import create_block_mask

    if window not in rows.masks:
        size = len(rows.ends)
        rows.masks[window] = create_block_mask(sees(rows, window), None, None, size, size, device=rows.ends.device.type)
    return rows.masks[window]


@cache
def _attend(device: str) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cuda":
        return torch.compile(flex_attention, dynamic=True)

    def uncompiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is uncompiled is meant
            out: torch.Tensor = flex_attention(*args, **kwargs)
            return out

    return uncompiled


AttentionInterface.register(NAME, flex_rows)
