"""The codec's hot loops, compiled where numba is at hand; in numpy, with the same results, where it is not.

Everything here delegates to :mod:`classes`, :mod:`tokens` and :mod:`rans`, or to the kernels of ``codec_jit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.weights import classes, rans, tokens
from protocol.weights.classes import Changes


@cache
def compiled() -> ModuleType | None:
    """The numba kernels, or None where numba is missing or has nowhere to cache; results are the same either way."""
    try:
        from protocol.weights import codec_jit
    except (ImportError, RuntimeError):
        return None
    return codec_jit


def scan(old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]], firsts: NDArray[np.uint8]) -> Changes:
    """See :func:`classes.scan`."""
    kernel = compiled()
    if kernel is None:
        return classes.scan(old, new, firsts)
    words = old[0].dtype
    size = sum(map(len, old))  # pages that are never written take no memory
    which, gaps, folded = np.empty(size, np.uint8), np.empty(size, np.uint32), np.empty(size, words)
    populations, previous = np.zeros(len(firsts), np.int64), np.full(len(firsts), -1, np.int64)
    state = firsts, classes.table_of(firsts), populations, previous, which, gaps, folded
    n = 0
    for before, after in zip(old, new, strict=True):
        n = kernel.scan_piece(_aligned(before), _aligned(after), _top(words), *state, n)
    counts = np.bincount(which[:n], minlength=len(firsts))
    sorted_gaps, sorted_folded = np.empty(n, np.uint32), np.empty(n, words)
    kernel.by_class(which[:n], gaps[:n], folded[:n], np.cumsum(counts) - counts, sorted_gaps, sorted_folded)
    return Changes(firsts, populations, counts, sorted_gaps, sorted_folded)


def apply(pieces: Sequence[NDArray[Any]], changes: Changes) -> list[tuple[NDArray[np.uint32], NDArray[Any]]] | None:
    """See :func:`classes.apply`."""
    kernel = compiled()
    if kernel is None or not all(piece.flags.aligned for piece in pieces):
        return classes.apply(pieces, changes)
    words, count = changes.folded.dtype, len(changes.gaps)
    where, old = np.empty(count, np.uint32), np.empty(count, words)
    ends = np.cumsum(changes.counts)
    following = ends - changes.counts
    left = np.full(len(ends), 2**62, np.int64)
    left[changes.counts > 0] = changes.gaps[following[changes.counts > 0]]
    populations = np.zeros(len(ends), np.int64)
    state = changes.firsts, changes.gaps, changes.folded, left, following, ends, populations
    done: list[tuple[NDArray[np.uint32], NDArray[Any]]] = []
    at = 0
    for piece in pieces:
        n = kernel.apply_piece(piece, _top(words), *state, where[at:], old[at:])
        done.append((where[at : at + n], old[at : at + n]))
        at += n
    if (populations == changes.populations).all():
        return done
    for piece, (places, before) in zip(pieces, done, strict=True):
        piece[places] = before
    return None


def tokens_of(values: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """See :func:`tokens.tokens_of`."""
    kernel = compiled()
    if kernel is None:
        return tokens.tokens_of(values)
    found = np.empty(len(values), np.uint8)
    kernel.tokenise(values, found)
    return found


def pack_extras(values: NDArray[np.uint32], named: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """See :func:`tokens.pack_extras`."""
    kernel = compiled()
    if kernel is None:
        return tokens.pack_extras(values, named)
    data = np.zeros(tokens.extra_bytes(named)[0], np.uint8)
    kernel.pack_extras(values, named, tokens.EXTRA_BITS, data)
    return data


def numbers_of(named: NDArray[np.uint8], data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """See :func:`tokens.numbers_of`."""
    kernel = compiled()
    if kernel is None:
        return tokens.numbers_of(named, data)
    values = np.empty(len(named), np.uint32)
    kernel.numbers(named, data, tokens.EXTRA_BITS, tokens.BASES, values)
    return values


def rans_encode(
    data: NDArray[np.uint8], frequency: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """See :func:`rans.encode`."""
    kernel = compiled()
    if kernel is None:
        return rans.encode(data, frequency)
    states = np.full(rans.lanes_of(len(data)), rans.LOWEST_STATE, np.uint32)
    refills = np.empty(len(data), np.uint16)  # at most one per byte
    at = kernel.rans_encode(data, frequency, rans.starts_of(frequency), states, refills)
    return states, refills[at:]


def rans_decode(
    states: NDArray[np.uint32], refills: NDArray[np.uint16], frequency: NDArray[np.uint32], count: int
) -> NDArray[np.uint8] | None:
    """See :func:`rans.decode`."""
    kernel = compiled()
    if kernel is None:
        return rans.decode(states, refills, frequency, count)
    slots = np.repeat(np.arange(256, dtype=np.uint8), frequency)
    data, last = np.empty(count, np.uint8), states.copy()
    used = kernel.rans_decode(last, refills, frequency, rans.starts_of(frequency), slots, data)
    return data if used == len(refills) and (last == rans.LOWEST_STATE).all() else None


def _top(words: np.dtype[Any]) -> np.uint64:
    """The sign bit."""
    return np.uint64(1 << (8 * words.itemsize - 1))


def _aligned(words: NDArray[Any]) -> NDArray[Any]:
    return np.require(words, requirements="A")
