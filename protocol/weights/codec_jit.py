"""Numba kernels of the diff codec: same results as ``classes`` and ``tokens``, in one pass over the words.

Imported only where speed matters (see ``kernels``). All release the GIL. Words are looked at in small blocks: loops of
fixed length over 8-bit keys become vector instructions, and only where a block holds a change are words looked at one
by one.

Legend: C classes, n changed words, N words of one piece, B words of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import int64, types, uint8, uint16, uint32, uint64
from numpy.typing import NDArray

#: Words per block (counters are bytes), and per group within a block.
_BLOCK, _GROUP = 128, 16
#: Eight small numbers in one, a byte each: all 1, all 128.
_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_PLACES = np.arange(_BLOCK, dtype=np.uint8)
_ONE, _LAST = np.uint8(1), np.uint8(255)
_FAR, _WIDE = np.int64(2**62), np.uint64(2**16)
_S7, _S23 = np.uint32(7), np.uint32(23)
_U0, _U1, _U7, _U8, _U56, _U255 = (np.uint64(n) for n in (0, 1, 7, 8, 56, 255))

_U12, _U16, _U20, _LOW_12, _LOW_16, _LOWEST = (np.uint64(n) for n in (12, 16, 20, 2**12 - 1, 2**16 - 1, 2**16))

_F = TypeVar("_F", bound=Callable[..., Any])


def _inlined(function: _F) -> _F:
    """A helper for kernels."""
    return cast("_F", numba.njit(cache=True)(function))


def _kernel(*signatures: Any) -> Callable[[_F], _F]:
    """A kernel compiled for these signatures, so that no call ever waits for another compilation."""
    return cast("Callable[[_F], _F]", numba.njit(list(signatures), cache=True, nogil=True))


def _of(scalar: Any) -> Any:
    """Type of a contiguous vector that is only read."""
    return types.Array(scalar, 1, "C", readonly=True)


@_inlined
def _rank(word: np.uint64, top: np.uint64) -> np.uint64:
    return (~word) & ((top << _U1) - _U1) if word & top else word | top


@_inlined
def _fold(old: np.uint64, new: np.uint64, top: np.uint64) -> np.uint64:
    mask = (top << _U1) - _U1
    step = (_rank(new, top) - _rank(old, top)) & mask
    if old & top:
        step = (_U0 - step) & mask
    zigzag = (((mask - step) << _U1) + _U1) if step & top else step << _U1
    return (zigzag - _U1) & mask


@_inlined
def _unfold(old: np.uint64, folded: np.uint64, top: np.uint64) -> np.uint64:
    mask = (top << _U1) - _U1
    zigzag = folded + _U1
    step = (zigzag >> _U1) ^ (_U0 - (zigzag & _U1))
    if old & top:
        step = _U0 - step
    rank = (_rank(old, top) + step) & mask
    return rank ^ top if rank & top else (~rank) & mask


@_inlined
def _load(words_B: NDArray[Any], wide: bool, keys_B: NDArray[np.uint8]) -> None:
    """The key of each word of a block; zeros behind the last."""
    size = len(words_B)
    if size < _BLOCK:
        for i in range(_BLOCK):
            keys_B[i] = np.uint8(words_B[i] >> (_S23 if wide else _S7)) if i < size else np.uint8(0)
    elif wide:
        for i in range(_BLOCK):
            keys_B[i] = np.uint8(words_B[i] >> _S23)
    else:
        for i in range(_BLOCK):
            keys_B[i] = np.uint8(words_B[i] >> _S7)


@_inlined
def _count(keys_B: NDArray[np.uint8], size: int, firsts_C: NDArray[np.uint8], counts_C: NDArray[np.int64]) -> None:
    """How many of the first ``size`` words of a block are in each class."""
    above = _BLOCK
    for c in range(len(firsts_C) - 1):
        first, following = firsts_C[c + 1], np.uint8(0)
        for i in range(_BLOCK):
            following = np.uint8(following + np.uint8(keys_B[i] >= first))
        counts_C[c] = above - np.int64(following)
        above = np.int64(following)
    counts_C[len(firsts_C) - 1] = above
    counts_C[0] -= _BLOCK - size


@_inlined
def _equal(old: NDArray[Any], new: NDArray[Any]) -> bool:
    """Whether a whole group of words is the same."""
    differing = np.uint8(0)
    for i in range(_GROUP):
        differing = np.uint8(differing + np.uint8(old[i] != new[i]))
    return differing == 0


@_inlined
def _last(firsts_C: NDArray[np.uint8], c: int) -> np.uint8:
    """Largest key of a class."""
    return np.uint8(firsts_C[c + 1] - _ONE) if c + 1 < len(firsts_C) else _LAST


@_inlined
def _rank_in_block(keys_B: NDArray[np.uint8], first: np.uint8, last: np.uint8, at: int) -> np.int64:
    """How many words before ``at`` have keys from ``first`` to ``last``."""
    end, found = np.uint8(at), np.uint8(0)
    for i in range(_BLOCK):
        found = np.uint8(found + np.uint8((keys_B[i] >= first) & (keys_B[i] <= last) & (_PLACES[i] < end)))
    return np.int64(found)


@_inlined
def _mark(keys_B: NDArray[np.uint8], first: np.uint8, last: np.uint8, marks_B: NDArray[np.uint8]) -> None:
    """1 for each word with a key from ``first`` to ``last``, 0 for others."""
    for i in range(_BLOCK):
        marks_B[i] = np.uint8((keys_B[i] >= first) & (keys_B[i] <= last))


@_inlined
def _sums(eights: NDArray[np.uint64], begin: int) -> np.uint64:
    """Marks up to and with each of eight numbers from ``begin`` on, a byte each."""
    counts = _U0
    for k in range(8):
        counts |= ((eights[begin + k] * _ONES) >> _U56) << np.uint64(8 * k)
    return counts * _ONES


@_inlined
def _at_most(sums: np.uint64, bound: np.int64) -> np.int64:
    """How many of eight bytes below 128 are at most ``bound``, itself below 128."""
    return np.int64((((((np.uint64(bound) * _ONES) | _TOPS) - sums) & _TOPS) >> _U7) * _ONES >> _U56)


@_inlined
def _select(eights: NDArray[np.uint64], low: np.uint64, high: np.uint64, rank: np.int64) -> np.int64:
    """Where the mark lies that has ``rank`` marks before it; ``low`` and ``high`` are the sums of both halves."""
    half = np.int64(low >> _U56)
    k, sums, base = np.int64(0), low, np.int64(0)
    if rank >= half:
        k, sums, base = np.int64(8), high, half
    inside = _at_most(sums, rank - base)
    before = np.int64(((sums << _U8) >> np.uint64(inside << 3)) & _U255) + base
    k += inside
    return (k << 3) + _at_most(eights[k] * _ONES, rank - before)


@_kernel(*(
    int64(_of(w), _of(w), uint64, _of(uint8), _of(uint8), int64[::1], int64[::1], uint8[::1],
          uint32[::1], w[::1], int64)
    for w in (uint16, uint32)
))
def scan_piece(
    old: NDArray[Any], new: NDArray[Any], top: np.uint64, firsts_C: NDArray[np.uint8], table: NDArray[np.uint8],
    populations_C: NDArray[np.int64], previous_C: NDArray[np.int64], classes: NDArray[np.uint8],
    gaps: NDArray[np.uint32], folded: NDArray[Any], n: int,
) -> int:
    """Append the changes of one piece to ``classes``, ``gaps`` and ``folded``; how many there are now.

    ``populations_C`` counts on; ``previous_C`` is the rank of the class's last changed word, -1 before the first.
    """
    keys_B, counts_C = np.empty(_BLOCK, np.uint8), np.empty(len(firsts_C), np.int64)
    wide = top > _WIDE
    for start in range(0, len(old), _BLOCK):
        size = min(_BLOCK, len(old) - start)
        _load(old[start : start + size], wide, keys_B)
        for begin in range(start, start + size, _GROUP):
            end = min(begin + _GROUP, start + size)
            if end - begin == _GROUP and _equal(old[begin:end], new[begin:end]):
                continue
            for i in range(begin, end):
                if old[i] == new[i]:
                    continue
                c = int(table[keys_B[i - start]])
                rank = populations_C[c] + _rank_in_block(keys_B, firsts_C[c], _last(firsts_C, c), i - start)
                classes[n] = np.uint8(c)
                gaps[n] = np.uint32(rank - previous_C[c] - 1)
                folded[n] = _fold(np.uint64(old[i]), np.uint64(new[i]), top)
                previous_C[c] = rank
                n += 1
        _count(keys_B, size, firsts_C, counts_C)
        for k in range(len(counts_C)):
            populations_C[k] += counts_C[k]
    return n


@_kernel(*(
    int64(w[::1], uint64, _of(uint8), _of(uint32), _of(w), int64[::1], int64[::1], _of(int64),
          int64[::1], uint32[::1], w[::1])
    for w in (uint16, uint32)
))
def apply_piece(
    live: NDArray[Any], top: np.uint64, firsts_C: NDArray[np.uint8],
    gaps: NDArray[np.uint32], folded: NDArray[Any], left_C: NDArray[np.int64], next_C: NDArray[np.int64],
    end_C: NDArray[np.int64], populations_C: NDArray[np.int64], where: NDArray[np.uint32], old: NDArray[Any],
) -> int:
    """Make the changes in one piece, in place, and write down index and old word of each; how many there are.

    A class's next change is number ``next_C`` of ``gaps`` and ``folded``, until ``end_C``; ``left_C`` more of its
    words stay before it. ``populations_C`` counts on.
    """
    keys_B, counts_C, n = np.empty(_BLOCK, np.uint8), np.empty(len(firsts_C), np.int64), 0
    eights = np.empty(_BLOCK // 8, np.uint64)
    marks_B = eights.view(np.uint8)
    wide, low, high = top > _WIDE, _U0, _U0
    for start in range(0, len(live), _BLOCK):
        size = min(_BLOCK, len(live) - start)
        _load(live[start : start + size], wide, keys_B)
        _count(keys_B, size, firsts_C, counts_C)
        for c in range(len(counts_C)):
            populations_C[c] += counts_C[c]
            left = left_C[c]
            if left < counts_C[c]:
                _mark(keys_B, firsts_C[c], _last(firsts_C, c), marks_B)
                low, high = _sums(eights, 0), _sums(eights, 8)
            while left < counts_C[c]:
                i = start + _select(eights, low, high, left)
                where[n], old[n] = np.uint32(i), live[i]
                live[i] = _unfold(np.uint64(live[i]), np.uint64(folded[next_C[c]]), top)
                n += 1
                next_C[c] += 1
                left = left + 1 + np.int64(gaps[next_C[c]]) if next_C[c] < end_C[c] else _FAR
            left_C[c] = left - counts_C[c]
    return n


@_kernel(*(
    types.void(_of(uint8), _of(uint32), _of(w), int64[::1], uint32[::1], w[::1]) for w in (uint16, uint32)
))
def by_class(
    classes: NDArray[np.uint8], gaps: NDArray[np.uint32], folded: NDArray[Any], next_C: NDArray[np.int64],
    gaps_out: NDArray[np.uint32], folded_out: NDArray[Any],
) -> None:
    """Sort changes by class, keeping the order within each; ``next_C`` is where each class begins."""
    for i in range(len(classes)):
        at = next_C[classes[i]]
        gaps_out[at] = gaps[i]
        folded_out[at] = folded[i]
        next_C[classes[i]] = at + 1


@_kernel(types.void(_of(uint32), uint8[::1]))
def tokenise(values: NDArray[np.uint32], tokens: NDArray[np.uint8]) -> None:
    """Token of each number (see ``tokens.tokens_of``)."""
    for i in range(len(values)):
        value, octave = np.uint64(values[i]), np.uint64(0)
        if value < 16:
            tokens[i] = np.uint8(value)
            continue
        while value >> octave >= 8:
            octave += _U1
        tokens[i] = np.uint8(np.uint64(16) + (octave << _U1 << _U1) - _U8 + (value >> octave) - np.uint64(4))


@_kernel(types.void(_of(uint32), _of(uint8), _of(uint8), uint8[::1]))
def pack_extras(
    values: NDArray[np.uint32], tokens: NDArray[np.uint8], extra_bits: NDArray[np.uint8], data: NDArray[np.uint8]
) -> None:
    """Extra bits of each number, one after the other (see ``tokens.pack_extras``)."""
    held, count, at = _U0, _U0, 0
    for i in range(len(values)):
        width = np.uint64(extra_bits[tokens[i]])
        held |= (np.uint64(values[i]) & ((_U1 << width) - _U1)) << count
        count += width
        while count >= _U8:
            data[at] = np.uint8(held & _U255)
            held >>= _U8
            count -= _U8
            at += 1
    if count > _U0:
        data[at] = np.uint8(held & _U255)


@_kernel(types.void(_of(uint8), _of(uint8), _of(uint8), _of(uint32), uint32[::1]))
def numbers(
    tokens: NDArray[np.uint8], data: NDArray[np.uint8], extra_bits: NDArray[np.uint8], bases: NDArray[np.uint32],
    values: NDArray[np.uint32],
) -> None:
    """The number of each token and its extra bits (see ``tokens.numbers_of``)."""
    held, count, at = _U0, _U0, 0
    for i in range(len(tokens)):
        width = np.uint64(extra_bits[tokens[i]])
        while count < width:
            held |= np.uint64(data[at]) << count
            count += _U8
            at += 1
        values[i] = np.uint32(np.uint64(bases[tokens[i]]) + (held & ((_U1 << width) - _U1)))
        held >>= width
        count -= width


@_kernel(int64(_of(uint8), _of(uint32), _of(uint32), uint32[::1], uint16[::1]))
def rans_encode(
    data: NDArray[np.uint8], frequency: NDArray[np.uint32], starts: NDArray[np.uint32], states: NDArray[np.uint32],
    refills: NDArray[np.uint16],
) -> int:
    """Fill ``refills`` from its end and set ``states`` (see ``rans.encode``); where in ``refills`` they begin."""
    at, mask = len(refills), len(states) - 1
    for i in range(len(data) - 1, -1, -1):
        byte, x = data[i], np.uint64(states[i & mask])
        f = np.uint64(frequency[byte])
        if x >= f << _U20:
            at -= 1
            refills[at] = np.uint16(x & _LOW_16)
            x >>= _U16
        quotient = np.uint64(np.uint32(x) // np.uint32(f))
        states[i & mask] = np.uint32((quotient << _U12) + (x - quotient * f) + np.uint64(starts[byte]))
    return at


@_kernel(int64(uint32[::1], _of(uint16), _of(uint32), _of(uint32), _of(uint8), uint8[::1]))
def rans_decode(
    states: NDArray[np.uint32], refills: NDArray[np.uint16], frequency: NDArray[np.uint32], starts: NDArray[np.uint32],
    slots: NDArray[np.uint8], data: NDArray[np.uint8],
) -> int:
    """Fill ``data`` (see ``rans.decode``); how many refills were used, -1 when there were too few."""
    at, mask = 0, len(states) - 1
    for i in range(len(data)):
        x = np.uint64(states[i & mask])
        slot = x & _LOW_12
        byte = slots[slot]
        x = np.uint64(frequency[byte]) * (x >> _U12) + slot - np.uint64(starts[byte])
        if x < _LOWEST:
            if at == len(refills):
                return -1
            x = x << _U16 | np.uint64(refills[at])
            at += 1
        states[i & mask] = np.uint32(x)
        data[i] = byte
    return at
