"""Undo logs: what it takes to put a state back that was written to, at any moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.weights.classes import Journal
from protocol.weights.layout import Piece, State


@dataclass
class Undo:
    """Old words of everything that was written, newest last.

    ``journals``: of segments that are being written, with their pieces; they become ``writes`` at the end.
    """

    writes: list[tuple[str, NDArray[Any] | slice, NDArray[Any]]] = field(default_factory=list)
    journals: list[tuple[list[Piece], Journal]] = field(default_factory=list)

    def revert(self, state: State) -> None:
        """Put the old words back; the state is then bit-identical to what it was."""
        self.settle()
        for name, where, old in reversed(self.writes):
            state[name].reshape(-1)[where] = old

    def swap(self, state: State) -> None:
        """Exchange the words it holds with those of the state: once puts the old ones back, twice the new ones."""
        for i in reversed(range(len(self.writes))):
            name, where, words = self.writes[i]
            target = state[name].reshape(-1)
            self.writes[i] = name, where, target[where].copy()
            target[where] = words

    def settle(self) -> None:
        """Turn journals into writes."""
        while self.journals:
            pieces, journal = self.journals[-1]
            written = [
                (piece.entry.name, shift(where, piece), old)
                for piece, (where, old) in zip(pieces, journal.of_pieces(), strict=True) if len(where)
            ]
            self.writes += written
            del self.journals[-1]

    @property
    def nbytes(self) -> int:
        """Memory it holds."""
        return sum(old.nbytes + (0 if isinstance(at, slice) else at.nbytes) for _, at, old in self.writes)


def shift(where: NDArray[np.uint32], piece: Piece) -> NDArray[Any]:
    """Indices within a piece as indices within its tensor, in 4 bytes where that is enough."""
    if piece.hi <= 2**32:
        return where + np.uint32(piece.lo) if piece.lo else where
    return where + np.int64(piece.lo)
