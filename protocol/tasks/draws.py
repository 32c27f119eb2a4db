"""Random choices that come out alike in every version of every language: SHA-256 in counter mode."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of uniform choices named by a few strings; equal names give equal streams."""

    def __init__(self, *names: str) -> None:
        self._key = hashlib.sha256(b"assay.task-draws.v1\0" + "\0".join(names).encode()).digest()
        self._counter = 0

    def below(self, bound: int) -> int:
        """A uniform integer in [0, bound), by rejection so that no value is favoured."""
        if not 0 < bound <= 2**32:
            raise ValueError(f"bound {bound} outside 1..2^32")
        limit = 2**64 - 2**64 % bound
        while True:
            block = hashlib.sha256(self._key + self._counter.to_bytes(8, "little")).digest()
            value = int.from_bytes(block[:8], "little")
            self._counter += 1
            if value < limit:
                return value % bound

    def between(self, low: int, high: int) -> int:
        """A uniform integer in [low, high]."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """One of ``options``."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different ones of ``options`` in random order (Fisher-Yates)."""
        pool = list(options)
        for i in range(count):
            j = self.between(i, len(pool) - 1)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]
