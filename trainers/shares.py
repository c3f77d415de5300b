"""How samples are shared out over ranks: by what they cost, and without tearing apart what shares a prefix.

The cost of a sample is that of the positions that nobody computed before it: linear in them, and for attention in them times what
they look back on. Each policy's samples are laid in the order of their token ids, in which neighbours share the longest prefixes,
and cut where they share little, or where a rank would have its part; the costliest pieces are then given out first, each to the rank that
has least. Nothing is dropped; a rank may get none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .batch import Sample
from .packing import _common, _sequence

TOGETHER = 0.5
"""Samples that share at least this part of the second are neighbours on one rank, while there is room."""
SLACK = 1.05


def cost(own: int, length: int, width: int) -> float:
    """Of `own` new positions at the end of `length`, in linear positions. Attention over one position costs a layer about `4 width`
    multiplications, all else about `24 width²` a position (a transformer layer with a feed-forward of 4 width)."""
    return own + own * (length - own / 2) / (6 * width)


def shares(samples: Sequence[Sample], ranks: int, *, width: int = 1024) -> list[list[Sample]]:
    """The samples of each rank; the same whatever their order.

    Args:
        width: of the model's hidden states.
    """
    out: list[list[Sample]] = [[] for _ in range(ranks)]
    for policy in sorted({s.policy for s in samples}):
        chosen = sorted((s for s in samples if s.policy == policy), key=lambda s: (_sequence(s), s.episode, s.action_id), reverse=True)
        loads = [0.0] * ranks
        for load, piece in sorted(_pieces(chosen, ranks, width), key=lambda p: -p[0]):
            rank = min(range(ranks), key=loads.__getitem__)
            loads[rank] += load
            out[rank].extend(piece)
    return out


def _pieces(ordered: Sequence[Sample], ranks: int, width: int) -> list[tuple[float, list[Sample]]]:
    """What stays together, with its cost."""
    arrays = [np.asarray(_sequence(s), dtype=np.int64) for s in ordered]
    shared = [0] + [_common(a, b) for a, b in pairwise(arrays)]
    after = [cost(len(a) - k, len(a), width) for a, k in zip(arrays, shared, strict=True)]
    limit = SLACK * sum(after) / ranks
    loads: list[float] = []
    pieces: list[list[Sample]] = []
    for sample, array, k, more in zip(ordered, arrays, shared, after, strict=True):
        if pieces and k >= TOGETHER * len(array) and loads[-1] + more <= limit:
            loads[-1] += more
            pieces[-1].append(sample)
        else:
            loads.append(cost(len(array), len(array), width))
            pieces.append([sample])
    return list(zip(loads, pieces, strict=True))
