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
from protocol.weights.classes import MAGNITUDES, MAX_CLASSES, Changes


@cache
def compiled() -> ModuleType | None:
    """The numba kernels, or None where numba is missing or has nowhere to cache; results are the same either way."""
    try:
        from protocol.weights import codec_jit
    except (ImportError, RuntimeError):
        return None
    return codec_jit


def choose(old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """See :func:`classes.choose`."""
    kernel = compiled()
    if kernel is None:
        return classes.choose(old, new)

    def count(before: NDArray[Any], after: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        keys, cells = np.zeros(256, np.int64), np.zeros((256, MAGNITUDES), np.int64)
        kernel.count_cells(_aligned(before), _aligned(after), _top(before.dtype), keys, cells)
        return keys, cells

    return classes.choose(old, new, count)


def scan(old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]], firsts: NDArray[np.uint8]) -> Changes:
    """See :func:`classes.scan`."""
    kernel = compiled()
    if kernel is None:
        return classes.scan(old, new, firsts)
    words = old[0].dtype
    size = sum(map(len, old))  # pages that are never written take no memory
    which, gaps, folded = np.empty(size, np.uint8), np.empty(size, np.uint32), np.empty(size, words)
    populations, previous = np.zeros(MAX_CLASSES, np.int64), np.full(MAX_CLASSES, -1, np.int64)
    state = _limits(firsts), classes.table_of(firsts), populations, previous, which, gaps, folded
    n = 0
    for before, after in zip(old, new, strict=True):
        n = kernel.scan_piece(_aligned(before), _aligned(after), _top(words), *state, n)
    counts = np.bincount(which[:n], minlength=len(firsts))
    sorted_gaps, sorted_folded = np.empty(n, np.uint32), np.empty(n, words)
    kernel.by_class(which[:n], gaps[:n], folded[:n], np.cumsum(counts) - counts, sorted_gaps, sorted_folded)
    return Changes(firsts, populations[: len(firsts)], counts, sorted_gaps, sorted_folded)


def apply(pieces: Sequence[NDArray[Any]], changes: Changes) -> list[tuple[NDArray[np.uint32], NDArray[Any]]] | None:
    """See :func:`classes.apply`."""
    kernel = compiled()
    if kernel is None or not all(piece.flags.aligned for piece in pieces):
        return classes.apply(pieces, changes)
    words, count = changes.folded.dtype, len(changes.gaps)
    where, old = np.empty(count, np.uint32), np.empty(count, words)
    ends = np.cumsum(changes.counts)
    following = ends - changes.counts
    left = np.full(MAX_CLASSES, 2**40, np.int64)  # farther than any segment is long
    used = np.flatnonzero(changes.counts)
    left[used] = changes.gaps[following[used]]
    populations = np.zeros(MAX_CLASSES, np.int64)
    state = _limits(changes.firsts), changes.gaps, changes.folded, left, following, ends, populations
    done: list[tuple[NDArray[np.uint32], NDArray[Any]]] = []
    at = 0
    for piece in pieces:
        n = kernel.apply_piece(piece, _top(words), *state, where[at:], old[at:])
        done.append((where[at : at + n], old[at : at + n]))
        at += n
    if (populations[: len(ends)] == changes.populations).all():
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
    kernel.entropy.tokenise(values, found)
    return found


def extra_bytes(named: NDArray[np.uint8]) -> tuple[int, int]:
    """See :func:`tokens.extra_bytes`."""
    kernel = compiled()
    if kernel is None:
        return tokens.extra_bytes(named)
    bits = kernel.entropy.extra_bits(named, tokens.EXTRA_BITS)
    return -(-bits // 8), -bits % 8


def pack_extras(values: NDArray[np.uint32], named: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """See :func:`tokens.pack_extras`."""
    kernel = compiled()
    if kernel is None:
        return tokens.pack_extras(values, named)
    size = extra_bytes(named)[0]
    data = np.empty(size + 8, np.uint8)
    kernel.entropy.pack_extras(values, named, tokens.EXTRA_BITS, data)
    return data[:size]


def numbers_of(named: NDArray[np.uint8], data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """See :func:`tokens.numbers_of`."""
    kernel = compiled()
    if kernel is None:
        return tokens.numbers_of(named, data)
    values = np.empty(len(named), np.uint32)
    kernel.entropy.numbers(named, np.append(data, np.zeros(8, np.uint8)), tokens.EXTRA_BITS, tokens.BASES, values)
    return values


def join(
    numbers: NDArray[np.uint32], away: NDArray[np.uint8], counts: NDArray[np.int64], words: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """See :func:`classes.join`."""
    kernel = compiled()
    if kernel is None:
        return classes.join(numbers, away, counts, words)
    folded, reached = np.empty(len(away), words), np.empty(len(counts), np.int64)
    return (folded, reached) if kernel.join(numbers, away, counts, reached, folded) else None


def count_bytes(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(256,) how often each byte occurs."""
    kernel = compiled()
    if kernel is None:
        return np.bincount(data, minlength=256)
    counts = np.zeros(256, np.int64)
    kernel.entropy.count_bytes(data, counts)
    return counts


def table_for(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """See :func:`rans.table_for`."""
    kernel = compiled()
    if kernel is None:
        return rans.table_for(counts)
    table = np.empty(int(np.flatnonzero(counts)[-1]) + 1, np.uint8)
    kernel.entropy.table_for(counts, rans.WEIGHTS, table)
    return table


def frequencies(table: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """See :func:`rans.frequencies`."""
    kernel = compiled()
    if kernel is None:
        return rans.frequencies(table)
    found = np.empty(256, np.uint32)
    kernel.entropy.frequencies(table, rans.WEIGHTS, found)
    return found


def rans_encode(
    data: NDArray[np.uint8], frequency: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """See :func:`rans.encode`."""
    kernel = compiled()
    if kernel is None:
        return rans.encode(data, frequency)
    states = np.full(rans.lanes_of(len(data)), rans.LOWEST_STATE, np.uint32)
    refills = np.empty(len(data) + 1, np.uint16)  # at most one per byte
    at = kernel.entropy.rans_encode(data, frequency, rans.starts_of(frequency), states, refills)
    return states, refills[at:]


def rans_decode(
    states: NDArray[np.uint32], refills: NDArray[np.uint16], frequency: NDArray[np.uint32], count: int
) -> NDArray[np.uint8] | None:
    """See :func:`rans.decode`."""
    kernel = compiled()
    if kernel is None:
        return rans.decode(states, refills, frequency, count)
    data, last = np.empty(count, np.uint8), states.copy()
    used = kernel.entropy.rans_decode(last, refills if len(refills) else np.zeros(1, np.uint16), frequency, data)
    return data if used == len(refills) and (last == rans.LOWEST_STATE).all() else None


def _top(words: np.dtype[Any]) -> np.uint64:
    """The sign bit."""
    return np.uint64(1 << (8 * words.itemsize - 1))


def _limits(firsts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """For each class the largest key below it, as often as ``vector_jit.class_sets`` needs it."""
    limits = np.full(MAX_CLASSES, 255, np.uint8)
    limits[1 : len(firsts)] = firsts[1:] - np.uint8(1)
    return np.repeat(limits, 64)


def _aligned(words: NDArray[Any]) -> NDArray[Any]:
    return np.require(words, requirements="A")
