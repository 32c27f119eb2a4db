"""Key-value cache with one slot per row, each at its own length; a cache object that transformers models accept.

Legend: S slots, H key-value heads, L positions, D head size, R rows of a pass, Q inputs per row of a pass.
Rows in use lie in slots 0 .. n-1, so a pass over the first R of them reads and writes views, not copies.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

#: Slots grow in steps of this many positions, so that growing stays rare.
_STEP: Final = 64


class _Pass:
    """What one forward pass writes and reads; shared by all layers."""

    def __init__(self) -> None:
        self.first = 0  #: first slot written by a prefill
        self.copies_R: torch.Tensor | None = None  #: (R,) prefill: which batch row fills each slot; None in a decode
        self.rows_R: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.positions_R: torch.Tensor = torch.empty(0, dtype=torch.int64)  #: (R,) decode: position written
        self.length = 0  #: decode: positions read


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer's keys and values, (S, H, L, D) each."""

    def __init__(self, slots: int, current: _Pass):
        super().__init__()
        self._slots, self._pass = slots, current

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the heads and sizes of these states."""
        self.keys = key_states.new_zeros((self._slots, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((self._slots, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def reserve(self, length: int) -> None:
        """Have room for ``length`` positions per slot."""
        grown = -(-length // _STEP) * _STEP
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[2] < length:
                new = old.new_zeros((old.shape[0], old.shape[1], grown, old.shape[3]))
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (R, H, Q, D) states and return what the pass attends to."""
        current = self._pass
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if current.copies_R is not None:
            width = key_states.shape[2]
            self.reserve(width)
            stop = current.first + len(current.copies_R)
            self.keys[current.first : stop, :, :width] = key_states[current.copies_R]
            self.values[current.first : stop, :, :width] = value_states[current.copies_R]
            return key_states, value_states
        self.reserve(current.length)
        self.keys[current.rows_R, :, current.positions_R] = key_states[:, :, 0]
        self.values[current.rows_R, :, current.positions_R] = value_states[:, :, 0]
        rows = len(current.rows_R)
        return self.keys[:rows, :, : current.length], self.values[:rows, :, : current.length]

    def exchange(self, a: int, b: int, length: int) -> None:
        """Swap the first ``length`` positions of two slots."""
        for store in (self.keys, self.values):
            kept = store[a, :, :length].clone()
            store[a, :, :length] = store[b, :, :length]
            store[b, :, :length] = kept

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot over another's."""
        for store in (self.keys, self.values):
            store[target, :, :length] = store[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) for the plain causal mask of a prefill; decodes bring their own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are the engine's business, and every prefill starts at the beginning."""
        return 0

    def get_max_length(self) -> int:
        """-1: slots grow."""
        return -1


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """All layers' slots."""

    def __init__(self, layers: int, slots: int):
        self._pass = _Pass()
        super().__init__(layers=[SlotLayer(slots, self._pass) for _ in range(layers)])

    def prefill(self, first: int, copies_R: torch.Tensor) -> None:
        """Aim the next pass at slots ``first ...``: slot ``first + i`` takes the states of row ``copies_R[i]``."""
        self._pass.first, self._pass.copies_R = first, copies_R

    def decode(self, positions_R: torch.Tensor, length: int) -> None:
        """Aim the next pass at the first R slots: one input each at ``positions_R``, reading ``length`` positions."""
        current = self._pass
        current.copies_R = None
        if len(current.rows_R) != len(positions_R):
            current.rows_R = torch.arange(len(positions_R))
        current.positions_R, current.length = positions_R, length

    def exchange(self, a: int, b: int, length: int) -> None:
        """Swap two slots' first ``length`` positions."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.exchange(a, b, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first ``length`` positions over another slot."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.move(source, target, length)
