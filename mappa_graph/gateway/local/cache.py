"""The key/value cache of a batch: one slot a row, each row at a position of its own.

New tokens are written where their row stands, so rows of any length lie side by side without padding on the left, join without
moving the others, and leave their slot to the last row. What a row has not written is zeros or the past of another row, which
the attention mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_MIN_ROWS, _MIN_LENGTH = 8, 128


class Layer(CacheLayerMixin):
    """Keys and values of one layer, [slot, head, position, dimension]; zeros where nothing was written."""

    is_sliding = False

    def __init__(self, cache: Slots) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, length = self.cache.rows, self.cache.length
        self.keys = key_states.new_zeros(rows, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def resize(self, rows: int, length: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        if cache.filling is not None:
            first, source = cache.filling
            span = key_states.shape[2]
            self.keys[first : first + len(source), :, :span] = key_states.index_select(0, source)
            self.values[first : first + len(source), :, :span] = value_states.index_select(0, source)
            return key_states, value_states
        rows = key_states.shape[0]
        self.keys[cache.slots, :, cache.at] = key_states[:, :, 0]
        self.values[cache.slots, :, cache.at] = value_states[:, :, 0]
        return self.keys[:rows, :, : cache.top], self.values[:rows, :, : cache.top]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length, 0) if self.cache.filling is not None else (self.cache.top, 0)

    def get_seq_length(self) -> int:
        return 0 if self.cache.filling is not None else self.cache.top - 1

    def get_max_length(self) -> int:
        return -1


class Slots(Cache):
    """The key/value cache of a batch."""

    def __init__(self, layers: int) -> None:
        self.rows, self.length = _MIN_ROWS, _MIN_LENGTH
        self.filling: tuple[int, torch.Tensor] | None = None
        """While prompts are taken in: the first slot, and which prompt of the forward each slot gets."""
        self.at = self.slots = torch.empty(0, dtype=torch.long)
        self.top = 0
        super().__init__(layers=[Layer(self) for _ in range(layers)])

    def reserve(self, rows: int, length: int) -> None:
        if rows <= self.rows and length <= self.length:
            return
        while self.rows < rows:
            self.rows *= 2
        while self.length < length:
            self.length *= 2
        for layer in self.layers:
            if layer.is_initialized:
                layer.resize(self.rows, self.length)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[target] = layer.keys[source]
                layer.values[target] = layer.values[source]


def new_cache(module: Any) -> Slots:
    return Slots(module.config.get_text_config().num_hidden_layers)
