"""The codec's hot loops, compiled where numba is at hand; in numpy, with the same results, where it is not.

Everything here delegates to :mod:`choice`, :mod:`classes`, :mod:`columns`, :mod:`tokens` and :mod:`rans`, or to the
kernels of ``choice_jit``, ``codec_jit`` and ``entropy_jit``. A kernel does all it can for a whole segment in one call:
what Python does in between holds the GIL, and threads that wait for that are put to sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.weights import choice, classes, columns, rans, tokens
from protocol.weights.classes import MAX_CLASSES, Changes, Journal

#: One word in so many is given room when changes are looked for; where more have changed, the room is made larger.
_EXPECTED_ONE_IN = 16
#: Room beyond that: two blocks of the kernel.
_MARGIN = 4096


class Compiled(NamedTuple):
    """Modules of kernels."""

    choice: ModuleType
    codec: ModuleType
    entropy: ModuleType


@cache
def compiled() -> Compiled | None:
    """The numba kernels, or None where numba is missing or has nowhere to cache; results are the same either way."""
    try:
        from protocol.weights import choice_jit, codec_jit, entropy_jit
    except (ImportError, RuntimeError):
        return None
    return Compiled(choice_jit, codec_jit, entropy_jit)


def choose(old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """See :func:`choice.choose`."""
    kernel, stride = compiled(), choice.stride_of(sum(map(len, old)))
    if kernel is None or not stride:
        return choice.choose(old, new)
    words, firsts = old[0].dtype, np.empty(MAX_CLASSES, np.uint8)
    before, after = _aligned(old), _aligned(new)
    lengths = _lengths(old)
    addresses = _addresses(before, words, lengths), _addresses(after, words, lengths)
    found = kernel.choice.choose(*addresses, lengths, np.empty(0, words), _top(words), stride, firsts)
    return firsts[:found]


def scan(old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]], firsts: NDArray[np.uint8]) -> Changes:
    """See :func:`classes.scan`."""
    kernel = compiled()
    if kernel is None:
        return classes.scan(old, new, firsts)
    words, before, after = old[0].dtype, _aligned(old), _aligned(new)
    populations, previous = np.zeros(MAX_CLASSES, np.int64), np.full(MAX_CLASSES, -1, np.int64)
    place, n = np.zeros(2, np.int64), 0
    lengths = _lengths(old)
    pieces = _addresses(before, words, lengths), _addresses(after, words, lengths), lengths, _top(words)
    state = _limits(firsts), classes.table_of(firsts), populations, previous, place
    found = [np.empty(0, kind) for kind in (np.uint8, np.uint32, words)]
    room = sum(map(len, old)) // _EXPECTED_ONE_IN + _MARGIN
    while place[0] < len(old):
        found = [_longer(column, n, room) for column in found]
        n = kernel.codec.scan(*pieces, *state, *found, n)
        room = 4 * room
    which, gaps, folded = (column[:n] for column in found)
    counts = np.bincount(which, minlength=len(firsts))
    sorted_gaps, sorted_folded = np.empty(n, np.uint32), np.empty(n, words)
    kernel.codec.by_class(which, gaps, folded, np.cumsum(counts) - counts, sorted_gaps, sorted_folded)
    return Changes(firsts, populations[: len(firsts)], counts, sorted_gaps, sorted_folded)


def apply(pieces: Sequence[NDArray[Any]], changes: Changes, journal: Journal) -> bool:
    """See :func:`classes.apply`."""
    kernel = compiled()
    if kernel is None or not all(piece.flags.carray for piece in pieces):
        return classes.apply(pieces, changes, journal)
    words, lengths = changes.folded.dtype, _lengths(pieces)
    addresses = _addresses(pieces, words, lengths)
    ends = np.cumsum(changes.counts)
    following = ends - changes.counts
    left = np.full(MAX_CLASSES, 2**40, np.int64)  # farther than any segment is long
    used = np.flatnonzero(changes.counts)
    left[used] = changes.gaps[following[used]]
    populations = np.zeros(MAX_CLASSES, np.int64)
    kernel.codec.apply(
        addresses, lengths, _top(words), _limits(changes.firsts), changes.gaps, changes.folded, left, following, ends,
        populations, journal.where, journal.old, journal.ends,
    )
    return bool((populations[: len(ends)] == changes.populations).all())


def split(
    gaps: NDArray[np.uint32], folded: NDArray[Any], counts: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint8]]:
    """See :func:`columns.split`."""
    kernel = compiled()
    if kernel is None:
        return columns.split(gaps, folded, counts)
    numbers, named = np.empty(2 * len(gaps), np.uint32), np.empty(2 * len(gaps), np.uint8)
    laid = np.empty(int(columns.sizes_of(counts).sum()), np.uint8)
    kernel.entropy.split(gaps, folded, counts, numbers, named, laid)
    return numbers, named, laid


def gather(laid: NDArray[np.uint8], counts: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
    """See :func:`columns.gather`."""
    kernel = compiled()
    if kernel is None:
        return columns.gather(laid, counts)
    count = int(counts.sum())
    named, away = np.empty(2 * count, np.uint8), np.empty(count, np.uint8)
    return (named, away) if kernel.entropy.gather(laid, counts, named, away) else None


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
    return (folded, reached) if kernel.codec.join(numbers, away, counts, reached, folded) else None


def rans_encode(data: NDArray[np.uint8], counts: NDArray[np.int64]) -> list[bytes]:
    """Body of a rANS stream for each of the (S,) ``counts`` bytes that lie end to end in ``data``; see :mod:`rans`."""
    kernel = compiled()
    ends = np.cumsum(counts)
    if kernel is None:
        return [rans.pack(data[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    lanes, sizes = rans.lanes_of_all(counts), np.empty(len(counts), np.int64)
    out = np.empty(2 * len(data) + rans.MOST_OVERHEAD * len(counts), np.uint8)
    kernel.entropy.encode_streams(data, counts, lanes, rans.WEIGHTS, out, sizes)
    return [out[end - size : end].tobytes() for end, size in zip(np.cumsum(sizes), sizes, strict=True)]


def decode_streams(
    chunk: NDArray[np.uint8], at: int, counts: NDArray[np.int64], out: NDArray[np.uint8]
) -> tuple[NDArray[np.bool_], int]:
    """(S,) which of the streams from ``at`` on are in ``out`` now, end to end; where they end, if it is all of them.

    The others are malformed, or of a kind that only :mod:`streams` decodes; without numba that is all of them.
    """
    kernel, done = compiled(), np.zeros(len(counts), np.bool_)
    if kernel is None:
        return done, at
    lanes = rans.lanes_of_all(counts)
    return done, int(kernel.entropy.decode_streams(chunk, at, counts, lanes, rans.WEIGHTS, out, done))


def decode_body(
    chunk: NDArray[np.uint8], at: int, populations: NDArray[np.int64], counts: NDArray[np.int64], words: np.dtype[Any]
) -> tuple[NDArray[np.uint32], NDArray[Any]] | None:
    """Gaps and folded steps from the streams of an XC segment, which begin at ``at``, in one call.

    None where anything about them is wrong, by a coder of :mod:`streams`, or without numba: to be decoded in steps.
    """
    kernel = compiled()
    if kernel is None:
        return None
    sizes, count = columns.sizes_of(counts), int(counts.sum())
    gaps, folded = np.empty(count, np.uint32), np.empty(count, words)
    whole = kernel.codec.decode_body(
        chunk, at, sizes, rans.lanes_of_all(sizes), populations, counts, rans.WEIGHTS, tokens.EXTRA_BITS, tokens.BASES,
        gaps, folded,
    )
    return (gaps, folded) if whole else None


def _top(words: np.dtype[Any]) -> np.uint64:
    """The sign bit."""
    return np.uint64(1 << (8 * words.itemsize - 1))


def _limits(firsts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """For each class the largest key below it, as often as ``vector_jit.class_sets`` needs it."""
    limits = np.full(MAX_CLASSES, 255, np.uint8)
    limits[1 : len(firsts)] = firsts[1:] - np.uint8(1)
    return np.repeat(limits, 64)


def _aligned(pieces: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """The pieces, copied where a kernel could not read them in place."""
    return [np.require(piece, requirements=["C", "A"]) for piece in pieces]


def _addresses(pieces: Sequence[NDArray[Any]], words: np.dtype[Any], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(P,) where each piece begins; good as long as the pieces are held. Kernels trust what is checked here.

    Raises:
        ValueError: when a piece is of another length or type, or not whole words in one place.
    """
    for piece, length in zip(pieces, lengths.tolist(), strict=True):
        flags = piece.flags
        if piece.dtype != words or piece.shape != (length,) or not (flags.c_contiguous and flags.aligned):
            raise ValueError(f"pieces do not match: expected {length} of {words}, got {piece.shape} of {piece.dtype}")
    return np.array([piece.__array_interface__["data"][0] for piece in pieces], np.uint64)


def _lengths(pieces: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.array([len(piece) for piece in pieces], np.int64)


def _longer(column: NDArray[Any], used: int, size: int) -> NDArray[Any]:
    """A column of ``size`` with the first ``used`` numbers of another."""
    longer = np.empty(size, column.dtype)
    longer[:used] = column[:used]
    return longer
