"""Layouts: how samples become tensors, so that what they share is computed once.

`tree_packs` lays the samples of one policy out as a trie over token ids. Sorted sequences make the trie without building one: each
sequence repeats a prefix of the one before it and *owns* the rest, so a pack is a flat run of unique tokens, and a *row* is a
sequence's owned tokens as queries and its whole path, shared prefix included, as keys. Every token is embedded, normalised and multiplied
once; attention reads exactly the keys it would have read alone, so no ancestor mask over all pairs of tokens exists
anywhere. `padded_packs` is the ordinary layout, for models that can't take rows and to check the other against.

Sequences end one token early: the last completion token predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .batch import Sample

GROUP_WASTE = 0.25
"""Rows of different shapes are attended to in one call while padding adds at most this share of work, or this many pairs."""
GROUP_SLACK = 16384
BLOCK_PAIRS = 16384
"""Pairs of tokens and ones that all see them, from which on they are attended to in a call of their own."""
PAIR_COST = 1 / 6144
"""What a query and key cost beside a token: 4 D of 24 D^2 floating-point operations a layer, so 1 / (6 D) at width D, here for 1024."""

_Row = tuple[np.ndarray, int]
"""The positions in the pack of a path, and how many at its end are owned."""


@dataclass(frozen=True)
class RowGroup:
    """n rows that are attended to in one call, padded to O queries and P keys."""

    queries: torch.Tensor
    """`[n, O]` positions in the pack of the owned tokens."""
    keys: torch.Tensor
    """`[n, P]` positions in the pack of the paths."""
    offset: torch.Tensor
    """`[n]` place in the path of the first owned token."""
    rooted: bool
    """Whether no row shares a prefix: plain causal attention, no mask."""
    query_run: slice | None = None
    """Where `queries`, flattened, is a run of neighbours: the run, which needs no gathering."""
    key_run: slice | None = None
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    added: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """The plain mask as it is added to scores."""

    def mask(self, window: int | None) -> torch.Tensor | None:
        """`[n, 1, O, P]` True where a query sees a key; None where plain causal attention says the same."""
        if self.rooted and (window is None or window >= self.keys.shape[1]):
            return None
        if window not in self.masks:
            device = self.keys.device
            place = self.offset[:, None] + torch.arange(self.queries.shape[1], device=device)  # [n, O]
            behind = place[:, :, None] - torch.arange(self.keys.shape[1], device=device)  # [n, O, P]
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            seen[:, :, 0] |= ~seen.any(-1)  # padding queries beyond every window still need one key, or softmax gives NaN
            self.masks[window] = seen[:, None]
        return self.masks[window]


@dataclass(frozen=True)
class Split:
    """The same attention with long shared prefixes taken out of the rows (see `blocks`)."""

    blocks: tuple[tuple[int, int, int], ...]
    """`(start, end, last)`: the tokens from `start` to `end` are seen by all from `end` to `last`."""
    groups: tuple[RowGroup, ...]
    """What is left of the rows, cut where a block ends."""
    place: torch.Tensor | None
    """As `Rows.place`, for these groups."""


@dataclass(frozen=True)
class Rows:
    """The attention plan of a pack: groups of rows, and where each token's output lies in their concatenated outputs."""

    groups: tuple[RowGroup, ...]
    place: torch.Tensor | None
    """`[T]` positions in the outputs of all groups, flattened one after another; None where that is the pack's own order."""
    ends: torch.Tensor
    """`[T]` where the tokens that descend from each end: token q sees token k just if `k <= q < ends[k]`."""
    depth: torch.Tensor
    """`[T]` each token's place in its own sequence."""
    split: Split | None
    """Where it pays: on a CPU, with prefixes that are long and shared."""
    masks: dict[int | None, Any] = field(default_factory=dict)
    """FlexAttention's block masks by window, made when first used."""


@dataclass(frozen=True)
class Pack:
    """One micro-batch of one policy."""

    input_ids: torch.Tensor
    """`[1, T]` in rows, `[B, L]` padded."""
    position_ids: torch.Tensor
    source: torch.Tensor
    """`[N]` flat position of the hidden state that predicts each trainable token."""
    target: torch.Tensor
    """`[N]` the trainable tokens."""
    temperature: torch.Tensor
    """`[N]`"""
    samples: tuple[int, ...]
    """Which samples, in the order of the trainable tokens."""
    lengths: tuple[int, ...]
    """How many trainable tokens each has."""
    rows: Rows | None
    tokens: int
    """Positions that are computed, padding aside."""
    shared: int
    """Positions that are not computed because an earlier row has them."""


def tree_packs(
    samples: Sequence[Sample],
    budget: int,
    device: torch.device | str = "cpu",
    *,
    pair_cost: float = PAIR_COST,
    block_pairs: int | None = None,
) -> list[Pack]:
    """Packs of at most `budget` unique tokens (a longer single sequence gets one of its own), of costs as even as the trie allows.

    The cost of a pack is its tokens, plus `pair_cost` for every pair of a token and one that it sees. `block_pairs`: None = `BLOCK_PAIRS`.
    """
    least = BLOCK_PAIRS if block_pairs is None else block_pairs
    if not samples:
        return []
    sequences = [_sequence(s) for s in samples]
    order = sorted(range(len(samples)), key=sequences.__getitem__, reverse=True)
    arrays = {i: np.asarray(sequences[i], dtype=np.int64) for i in order}
    shared = [0] + [_common(arrays[a], arrays[b]) for a, b in pairwise(order)]
    total = sum(len(sequences[i]) for i in order) - sum(shared)
    costs = [_cost(len(sequences[i]), kept, pair_cost) for i, kept in zip(order, shared, strict=True)]
    target = sum(costs) / -(-total // budget)
    packs: list[Pack] = []
    start, size, cost = 0, len(sequences[order[0]]), costs[0]
    for at in range(1, len(order)):
        whole = len(sequences[order[at]])
        own = whole - shared[at]
        if size + own > budget or (own > 0 and cost >= target):
            packs.append(_tree_pack(samples, order[start:at], arrays, shared[start:at], device, least))
            start, size, cost = at, whole, _cost(whole, 0, pair_cost)
        else:
            size += own
            cost += costs[at]
    packs.append(_tree_pack(samples, order[start:], arrays, shared[start:], device, least))
    return packs


def padded_packs(samples: Sequence[Sample], budget: int, device: torch.device | str = "cpu") -> list[Pack]:
    """Packs of right-padded rows, longest first, of at most `budget` positions with padding (one row at least)."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].prompt_ids) + len(samples[i].completion_ids), reverse=True)
    packs: list[Pack] = []
    start = 0
    while start < len(order):
        width = len(_sequence(samples[order[start]]))
        chosen = order[start : start + max(1, budget // width)]
        packs.append(_padded_pack(samples, chosen, width, device))
        start += len(chosen)
    return packs


def _cost(whole: int, kept: int, pair_cost: float) -> float:
    own = whole - kept
    return own + pair_cost * (own * kept + own * (own + 1) / 2)


def _sequence(sample: Sample) -> tuple[int, ...]:
    return sample.prompt_ids + sample.completion_ids[:-1]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the prefix that both share."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _tree_pack(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    arrays: dict[int, np.ndarray],
    shared: Sequence[int],
    device: torch.device | str,
    least: int,
) -> Pack:
    ids: list[np.ndarray] = []
    places: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    rows: list[_Row] = []
    ends = np.empty(sum(len(arrays[i]) for i in chosen), dtype=np.int64)
    size = 0
    for at, i in enumerate(chosen):
        kept = shared[at] if at else 0
        sequence = arrays[i]
        if at:
            ends[paths[-1][kept:]] = size  # sequences are sorted: what this one does not share, no later one does
        own = len(sequence) - kept
        path = np.concatenate([paths[-1][:kept], np.arange(size, size + own)]) if at else np.arange(own)
        paths.append(path)
        if own:
            ids.append(sequence[kept:])
            places.append(np.arange(kept, len(sequence)))
            rows.append((path, own))
            size += own
    ends[paths[-1]] = size
    depth = np.concatenate(places)
    source = [path[len(samples[i].prompt_ids) - 1 :] for i, path in zip(chosen, paths, strict=True)]
    return Pack(
        input_ids=_tensor(np.concatenate(ids), device)[None],
        position_ids=_tensor(depth, device)[None],
        source=_tensor(np.concatenate(source), device),
        rows=_plan(rows, size, ends[:size], depth, device, least),
        tokens=size,
        shared=sum(map(len, paths)) - size,
        **_targets(samples, chosen, device),
    )


def _plan(rows: Sequence[_Row], size: int, ends: np.ndarray, depth: np.ndarray, device: torch.device | str, least: int) -> Rows:
    groups, place = _groups(rows, size, device)
    blocks, pieces = _split(rows, ends, least) if torch.device(device).type == "cpu" else ([], [])
    split = Split(tuple(blocks), *_groups(pieces, size, device)) if blocks else None
    return Rows(groups, place, _tensor(ends, device), _tensor(depth, device), split)


def _split(rows: Sequence[_Row], ends: np.ndarray, least: int) -> tuple[list[tuple[int, int, int]], list[_Row]]:
    """Blocks, and the rows that are left: each cut behind the tokens that became a block's keys, and without such tokens in its path."""
    blocks: list[tuple[int, int, int]] = []
    pieces: list[_Row] = []
    taken = np.zeros(len(ends), dtype=bool)
    for path, own in rows:
        first, after = int(path[-own]), int(path[-1]) + 1
        turns = first + 1 + np.flatnonzero(np.diff(ends[first:after]))
        cuts = [first]
        for start, end in pairwise([first, *map(int, turns), after]):
            last = int(ends[start])
            if (end - start) * (last - end) >= least:
                blocks.append((start, end, last))
                taken[start:end] = True
                if end < after:
                    cuts.append(end)
        for start, end in pairwise([*cuts, after]):
            before = path[: len(path) - (after - start)]
            before = before[~taken[before]]
            for begin, stop in _halved(start, end, blocks, least):
                pieces.append((np.concatenate([before, np.arange(begin, stop)]), stop - begin))
    return blocks, pieces


def _halved(start: int, end: int, blocks: list[tuple[int, int, int]], least: int) -> list[tuple[int, int]]:
    """A run of tokens in parts, the first half a block that the second one sees, and so on: a causal kernel computes what it masks too."""
    middle = (start + end) // 2
    if (middle - start) * (end - middle) < max(least, 1):
        return [(start, end)]
    blocks.append((start, middle, end))
    return _halved(start, middle, blocks, least) + _halved(middle, end, blocks, least)


def _groups(rows: Sequence[_Row], size: int, device: torch.device | str) -> tuple[tuple[RowGroup, ...], torch.Tensor | None]:
    """Groups of rows of like shape, and each token's place in them. Rooted rows never mix with others: they need no mask."""
    order = sorted(range(len(rows)), key=lambda r: (rows[r][1] < len(rows[r][0]), -len(rows[r][0]), -rows[r][1]))
    groups: list[RowGroup] = []
    place = np.empty(size, dtype=np.int64)
    filled, at = 0, 0
    while at < len(order):
        rooted = rows[order[at]][1] == len(rows[order[at]][0])
        members: list[int] = []
        wide = long = real = 0
        while at < len(order):
            path, own = rows[order[at]]
            if (own == len(path)) != rooted:
                break
            wider, longer, more = max(wide, own), max(long, len(path)), real + own * len(path)
            padded = (len(members) + 1) * wider * longer
            if members and padded - more > max(GROUP_SLACK, GROUP_WASTE * more):
                break
            wide, long, real = wider, longer, more
            members.append(order[at])
            at += 1
        queries = np.zeros((len(members), wide), dtype=np.int64)
        keys = np.zeros((len(members), long), dtype=np.int64)
        for n, r in enumerate(members):
            path, own = rows[r]
            queries[n, :own] = path[-own:]
            keys[n, : len(path)] = path
            place[path[-own:]] = filled + n * wide + np.arange(own)
        filled += queries.size
        offset = np.array([len(rows[r][0]) - rows[r][1] for r in members], dtype=np.int64)
        groups.append(RowGroup(_tensor(queries, device), _tensor(keys, device), _tensor(offset, device), rooted, _run(queries), _run(keys)))
    ordered = filled == size and bool((place == np.arange(size)).all())
    return tuple(groups), None if ordered else _tensor(place, device)


def _run(index: np.ndarray) -> slice | None:
    flat = index.reshape(-1)
    start = int(flat[0])
    return slice(start, start + len(flat)) if bool((flat == np.arange(start, start + len(flat))).all()) else None


def _padded_pack(samples: Sequence[Sample], chosen: Sequence[int], width: int, device: torch.device | str) -> Pack:
    ids = np.zeros((len(chosen), width), dtype=np.int64)
    source, real = [], 0
    for n, i in enumerate(chosen):
        sequence = _sequence(samples[i])
        ids[n, : len(sequence)] = sequence
        source.append(n * width + np.arange(len(samples[i].prompt_ids) - 1, len(sequence)))
        real += len(sequence)
    return Pack(
        input_ids=_tensor(ids, device),
        position_ids=torch.arange(width, device=device).expand(len(chosen), width),
        source=_tensor(np.concatenate(source), device),
        rows=None,
        tokens=real,
        shared=0,
        **_targets(samples, chosen, device),
    )


def _targets(samples: Sequence[Sample], chosen: Sequence[int], device: torch.device | str) -> dict[str, Any]:
    lengths = tuple(len(samples[i].completion_ids) for i in chosen)
    heat = np.array([samples[i].temperature or 1.0 for i in chosen], dtype=np.float32)
    target = np.fromiter((t for i in chosen for t in samples[i].completion_ids), dtype=np.int64, count=sum(lengths))
    return {
        "target": _tensor(target, device),
        "temperature": _tensor(np.repeat(heat, lengths), device),
        "samples": tuple(chosen),
        "lengths": lengths,
    }


def _tensor(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
