"""The columns of an XC segment, laid end to end: what its streams hold before they are coded.

For each class with n changes: n gap tokens, n magnitude tokens, and n directions as bits, lowest first. Spec:
``docs/spec/weight-diff.md``, "Exponent classes".

*Numbers* are all gaps, class after class, followed by all magnitudes; *tokens* are theirs in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.weights.tokens import tokens_of

_Bytes = NDArray[np.uint8]


def sizes_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """(3 K,) bytes of each column, for the K classes with changes among these counts."""
    used = counts[counts > 0]
    return np.stack([used, used, -(-used // 8)], axis=1).reshape(-1)


def split(
    gaps: NDArray[np.uint32], folded: NDArray[Any], counts: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], _Bytes, _Bytes]:
    """(2n,) numbers, (2n,) tokens and all columns of n changes, given by class."""
    numbers = np.concatenate([gaps, (folded >> 1).astype(np.uint32)])
    tokens, away = tokens_of(numbers), (folded & 1).astype(np.uint8)
    columns = [np.zeros(0, np.uint8)]
    for lo, hi in _ranges(counts):
        columns += [tokens[lo:hi], tokens[len(gaps) + lo : len(gaps) + hi], np.packbits(away[lo:hi], bitorder="little")]
    return numbers, tokens, np.concatenate(columns)


def gather(columns: _Bytes, counts: NDArray[np.int64]) -> tuple[_Bytes, _Bytes] | None:
    """(2n,) tokens and (n,) directions, 1 for away from zero; None where bits behind the last direction are set."""
    count, at, padded = int(counts.sum()), 0, False
    tokens, away = np.empty(2 * count, np.uint8), np.empty(count, np.uint8)
    for lo, hi in _ranges(counts):
        size = hi - lo
        tokens[lo:hi], tokens[count + lo : count + hi] = columns[at : at + size], columns[at + size : at + 2 * size]
        at += 2 * size
        bits = np.unpackbits(columns[at : at - (-size // 8)], bitorder="little")
        away[lo:hi] = bits[:size]
        padded |= bool(bits[size:].any())
        at -= -size // 8
    return None if padded else (tokens, away)


def _ranges(counts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where the changes of each class that has any lie."""
    ends = np.cumsum(counts)
    return [(int(hi - n), int(hi)) for hi, n in zip(ends, counts, strict=True) if n]
