"""Numba kernels of the diff codec: same results as ``classes`` and ``tokens``, in one pass over the words.

Imported only where speed matters (see ``kernels``). All release the GIL. Words are looked at in units of 64, of which
``vector_jit`` knows at once which are in which class; only changed ones are looked at one by one.

Legend: C classes (arrays of MAX_CLASSES), n changed words, N words of one piece, B words of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, types, uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from protocol.weights import entropy_jit as entropy
from protocol.weights.classes import MAX_CLASSES
from protocol.weights.jit import inlined, kernel, read_only
from protocol.weights.vector_jit import (
    UNIT,
    UNITS,
    class_sets,
    count_block,
    differing,
    first,
    members,
    take,
    unit_of,
)

#: Words of a block; numbers in an array with one for each class in each unit.
_BLOCK, _ROWS = UNITS * UNIT, UNITS * MAX_CLASSES
#: Eight small numbers in one, a byte each: all 1, all 128.
_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_FIVES, _THREES, _FIFTEENS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_ALL = np.uint64(2**64 - 1)
#: For a byte b and a rank r, at 256 r + b: which bit of b has r others before it.
_SELECT = np.array([([i for i in range(8) if b >> i & 1] + [0] * 8)[r] for r in range(8) for b in range(256)], np.uint8)
_FAR, _WIDE = np.int64(2**40), np.uint64(2**16)
_S7, _S23 = np.uint32(7), np.uint32(23)
_ONE = np.uint32(1)
_U0, _U1, _U2, _U3, _U4, _U7, _U8 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 7, 8))
_U53, _U56, _U255 = np.uint64(53), np.uint64(56), np.uint64(255)


# Signs are as good as random, so nothing here branches on one.


@inlined
def _sign(word: np.uint64, top: np.uint64) -> np.uint64:
    """All bits set where the sign bit is set, none where it is not."""
    return _U0 - np.uint64((word & top) != _U0)


@inlined
def _rank(word: np.uint64, top: np.uint64) -> np.uint64:
    """Rank among all patterns; correct in the bits up to ``top``, as in all that follows."""
    return word ^ (_sign(word, top) | top)


@inlined
def _fold(old: np.uint64, new: np.uint64, top: np.uint64) -> np.uint64:
    sign = _sign(old, top)
    step = ((_rank(new, top) - _rank(old, top)) ^ sign) - sign
    return ((step << _U1) ^ _sign(step, top)) - _U1


@inlined
def _unfold(old: np.uint64, folded: np.uint64, top: np.uint64) -> np.uint64:
    sign, zigzag = _sign(old, top), (folded + _U1) & ((top << _U1) - _U1)
    step = (((zigzag >> _U1) ^ (_U0 - (zigzag & _U1))) ^ sign) - sign
    rank = _rank(old, top) + step
    return rank ^ (~_sign(rank, top) | top)


@inlined
def _select(members: np.uint64, rank: np.uint64) -> np.uint64:
    """The word of a set that has ``rank`` members before it (Vigna, "Broadword implementation of rank/select")."""
    pairs = members - ((members >> _U1) & _FIVES)
    fours = (pairs & _THREES) + ((pairs >> _U2) & _THREES)
    sums = ((fours + (fours >> _U4)) & _FIFTEENS) * _ONES  # members up to and with each byte
    place = (((((rank * _ONES) | _TOPS) - sums) & _TOPS) >> _U7) * _ONES >> _U53 & _U56
    before = (sums << _U8) >> place & _U255
    byte = members >> place & _U255
    return place + np.uint64(_SELECT[(rank - before) << _U8 | byte])


@inlined
def _lowest(count: int) -> np.uint64:
    """The first ``count`` words of a unit, none or all of them where it is not between 1 and 63."""
    if count >= UNIT:
        return _ALL
    return (_U1 << np.uint64(count)) - _U1 if count > 0 else _U0


@inlined
def _load_block(
    words: NDArray[Any], start: int, rest_B: NDArray[Any], limits: NDArray[np.uint8], sets: NDArray[np.uint64]
) -> None:
    """Into ``sets``, for each class: which words of the block from ``start`` on have keys of it or of a later one."""
    rest = len(words) - start
    if rest >= _BLOCK:
        for u in range(UNITS):
            sets[u * MAX_CLASSES] = _ALL
            class_sets(words, start + u * UNIT, limits, sets, u)
        return
    rest_B[:rest] = words[start:]
    for u in range(UNITS):
        sets[u * MAX_CLASSES] = _lowest(rest - u * UNIT)
        class_sets(rest_B, u * UNIT, limits, sets, u)


@kernel(*(
    int64(read_only(w), read_only(w), uint64, read_only(uint8), read_only(uint8), int64[::1], int64[::1], uint8[::1],
          uint32[::1], w[::1], int64)
    for w in (uint16, uint32)
))
def scan_piece(
    old: NDArray[Any], new: NDArray[Any], top: np.uint64, limits: NDArray[np.uint8], table: NDArray[np.uint8],
    populations_C: NDArray[np.int64], previous_C: NDArray[np.int64], classes: NDArray[np.uint8],
    gaps: NDArray[np.uint32], folded: NDArray[Any], n: int,
) -> int:
    """Append the changes of one piece to ``classes``, ``gaps`` and ``folded``; how many there are now.

    ``populations_C`` counts on; ``previous_C`` is the rank of the class's last changed word, -1 before the first.
    """
    sets, before, totals_C = np.empty(_ROWS, np.uint64), np.empty(_ROWS, np.int64), np.empty(MAX_CLASSES, np.int64)
    rest_B, other_B = np.zeros(_BLOCK, old.dtype), np.zeros(_BLOCK, old.dtype)
    shift, mask = _S23 if top > _WIDE else _S7, (top << _U1) - _U1
    for start in range(0, len(old), _BLOCK):
        rest = len(old) - start
        _load_block(old, start, rest_B, limits, sets)
        if rest < _BLOCK:
            other_B[:rest], other_B[rest:] = new[start:], rest_B[rest:]
        count_block(sets, before, totals_C)
        for u in range(UNITS):
            begin = start + u * UNIT
            changed = differing(old, new, begin) if rest >= _BLOCK else differing(rest_B, other_B, u * UNIT)
            while changed:
                at = first(changed)
                i = begin + np.int64(at)
                c = int(table[np.uint8(old[i] >> shift)])
                cell = u * MAX_CLASSES + c
                rank = populations_C[c] + before[cell] + np.int64(members(sets[cell] & ((_U1 << at) - _U1)))
                classes[n] = np.uint8(c)
                gaps[n] = np.uint32(rank - previous_C[c] - 1)
                folded[n] = _fold(np.uint64(old[i]), np.uint64(new[i]), top) & mask
                previous_C[c] = rank
                n += 1
                changed &= changed - _U1
        for k in range(MAX_CLASSES):
            populations_C[k] += totals_C[k]
    return n


@kernel(*(
    int64(w[::1], uint64, read_only(uint8), read_only(uint32), read_only(w), int64[::1], int64[::1], read_only(int64),
          int64[::1], uint32[::1], w[::1])
    for w in (uint16, uint32)
))
def apply_piece(
    live: NDArray[Any], top: np.uint64, limits: NDArray[np.uint8],
    gaps: NDArray[np.uint32], folded: NDArray[Any], left_C: NDArray[np.int64], next_C: NDArray[np.int64],
    end_C: NDArray[np.int64], populations_C: NDArray[np.int64], where: NDArray[np.uint32], old: NDArray[Any],
) -> int:
    """Make the changes in one piece, in place, and write down index and old word of each; how many there are.

    A class's next change is number ``next_C`` of ``gaps`` and ``folded``, until ``end_C``; ``left_C`` more of its
    words stay before it. ``populations_C`` counts on.
    """
    sets, before, totals_C = np.empty(_ROWS, np.uint64), np.empty(_ROWS, np.int64), np.empty(MAX_CLASSES, np.int64)
    rest_B, n, mask = np.zeros(_BLOCK, live.dtype), 0, (top << _U1) - _U1
    for start in range(0, len(live), _BLOCK):
        _load_block(live, start, rest_B, limits, sets)
        count_block(sets, before, totals_C)
        for k in range(MAX_CLASSES):
            populations_C[k] += totals_C[k]
        hit = take(left_C, totals_C)
        while hit:
            c = np.int64(first(hit))
            hit &= hit - _U1
            k, end, left, total = next_C[c], end_C[c], left_C[c], totals_C[c]
            while left < 0:
                rank = left + total
                u = unit_of(before, c, rank)
                cell = u * MAX_CLASSES + c
                at = _select(sets[cell], np.uint64(rank - before[cell]))
                i = start + u * UNIT + np.int64(at)
                word = live[i]
                where[n], old[n] = np.uint32(i), word
                live[i] = _unfold(np.uint64(word), np.uint64(folded[k]), top) & mask
                n += 1
                k += 1
                left += np.int64(gaps[k]) + 1 if k < end else _FAR
            next_C[c], left_C[c] = k, left
    return n


@kernel(*(
    types.void(read_only(uint8), read_only(uint32), read_only(w), int64[::1], uint32[::1], w[::1])
    for w in (uint16, uint32)
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


@kernel(*(types.void(read_only(w), read_only(w), uint64, int64[::1], int64[:, ::1]) for w in (uint16, uint32)))
def count_cells(
    old: NDArray[Any], new: NDArray[Any], top: np.uint64, keys: NDArray[np.int64], cells: NDArray[np.int64]
) -> None:
    """Add to ``keys`` and ``cells`` (see ``classes.count_cells``)."""
    shift, mask = _S23 if top > _WIDE else _S7, (top << _U1) - _U1
    for i in range(len(old)):
        key = np.uint8(old[i] >> shift)
        keys[key] += 1
        if old[i] != new[i]:
            magnitude = (_fold(np.uint64(old[i]), np.uint64(new[i]), top) & mask) >> _U1
            cells[np.int64(key), min(int(entropy.token_of(np.uint32(magnitude))), cells.shape[1] - 1)] += 1


@kernel(*(
    types.boolean(read_only(uint32), read_only(uint8), read_only(int64), int64[::1], w[::1]) for w in (uint16, uint32)
))
def join(
    numbers: NDArray[np.uint32], away: NDArray[np.uint8], counts_C: NDArray[np.int64], reached_C: NDArray[np.int64],
    folded: NDArray[Any],
) -> bool:
    """See ``classes.join``; False where a step is out of bounds."""
    count, right = len(folded), True
    last = np.uint32((1 << (8 * folded.itemsize - 1)) - 1)
    for i in range(count):
        magnitude, outwards = numbers[count + i], np.uint32(away[i])
        right &= magnitude + outwards <= last
        folded[i] = magnitude << _ONE | outwards
    at = 0
    for c in range(len(counts_C)):
        total = counts_C[c]
        for i in range(at, at + counts_C[c]):
            total += np.int64(numbers[i])
        reached_C[c] = total
        at += counts_C[c]
    return right
