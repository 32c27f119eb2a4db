"""Numba kernels of the diff codec: same results as ``classes`` and ``tokens``, in one pass over the words.

Imported only where speed matters (see ``kernels``). All release the GIL. Words are looked at in units of 64, of which
``vector_jit`` knows at once which are in which class; only changed ones are looked at one by one.

Legend: P pieces of a segment, by their addresses; C classes (arrays of MAX_CLASSES), n changed words, B words of a
block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, int64, types, uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from protocol.jit import inlined, kernel, read_only
from protocol.weights import entropy_jit as entropy
from protocol.weights.classes import MAX_CLASSES
from protocol.weights.coder import STREAM_HEAD
from protocol.weights.fold_jit import fold, unfold
from protocol.weights.tokens import MAX_TOKENS
from protocol.weights.vector_jit import (
    UNIT,
    UNITS,
    at_address,
    class_sets,
    count_block,
    differing,
    first,
    members,
    take,
    unit_of,
)

_STREAM_HEAD_BYTES = STREAM_HEAD.size
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
_U0, _U1, _U2, _U4, _U7, _U8 = (np.uint64(n) for n in (0, 1, 2, 4, 7, 8))
_U53, _U56, _U255 = np.uint64(53), np.uint64(56), np.uint64(255)


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
    rest_B[:rest], rest_B[rest:] = words[start:], 0  # of class 0, whatever was there before
    for u in range(UNITS):
        sets[u * MAX_CLASSES] = _lowest(rest - u * UNIT)
        class_sets(rest_B, u * UNIT, limits, sets, u)


@kernel(*(
    int64(read_only(uint64), read_only(uint64), read_only(int64), uint64, read_only(uint8), read_only(uint8),
          int64[::1], int64[::1], int64[::1], uint8[::1], uint32[::1], w[::1], int64)
    for w in (uint16, uint32)
))
def scan(
    old_P: NDArray[np.uint64], new_P: NDArray[np.uint64], lengths_P: NDArray[np.int64], top: np.uint64,
    limits: NDArray[np.uint8], table: NDArray[np.uint8], populations_C: NDArray[np.int64],
    previous_C: NDArray[np.int64], place: NDArray[np.int64], classes: NDArray[np.uint8], gaps: NDArray[np.uint32],
    folded: NDArray[Any], n: int,
) -> int:
    """Append the changes of all pieces to ``classes``, ``gaps`` and ``folded``; how many there are now.

    Begins at ``place``, the number of a piece and of a word, and stops there when a block might not fit any more;
    until then, more remains. ``populations_C`` counts on; ``previous_C`` is the rank of the class's last changed word,
    -1 before the first.
    """
    sets, before, totals_C = np.empty(_ROWS, np.uint64), np.empty(_ROWS, np.int64), np.empty(MAX_CLASSES, np.int64)
    rest_B, other_B = np.zeros(_BLOCK, folded.dtype), np.zeros(_BLOCK, folded.dtype)
    shift, mask = _S23 if top > _WIDE else _S7, (top << _U1) - _U1
    while place[0] < len(lengths_P):
        length = lengths_P[place[0]]
        old = carray(at_address(old_P[place[0]], folded), length)
        new = carray(at_address(new_P[place[0]], folded), length)
        for start in range(place[1], length, _BLOCK):
            if n + _BLOCK > len(classes):
                place[1] = start
                return n
            rest = length - start
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
                    folded[n] = fold(np.uint64(old[i]), np.uint64(new[i]), top) & mask
                    previous_C[c] = rank
                    n += 1
                    changed &= changed - _U1
            for k in range(MAX_CLASSES):
                populations_C[k] += totals_C[k]
        place[0], place[1] = place[0] + 1, 0
    return n


@kernel(*(
    types.void(read_only(uint64), read_only(int64), uint64, read_only(uint8), read_only(uint32), read_only(w),
               int64[::1], int64[::1], read_only(int64), int64[::1], uint32[::1], w[::1], int64[::1])
    for w in (uint16, uint32)
))
def apply(
    live_P: NDArray[np.uint64], lengths_P: NDArray[np.int64], top: np.uint64, limits: NDArray[np.uint8],
    gaps: NDArray[np.uint32], folded: NDArray[Any], left_C: NDArray[np.int64], next_C: NDArray[np.int64],
    end_C: NDArray[np.int64], populations_C: NDArray[np.int64], where: NDArray[np.uint32], old: NDArray[Any],
    ends_P: NDArray[np.int64],
) -> None:
    """Make the changes in all pieces, in place, and write down index and old word of each, piece after piece.

    A class's next change is number ``next_C`` of ``gaps`` and ``folded``, until ``end_C``; ``left_C`` more of its
    words stay before it. ``populations_C`` counts on. A piece's changes are written down until ``ends_P``.
    """
    sets, before, totals_C = np.empty(_ROWS, np.uint64), np.empty(_ROWS, np.int64), np.empty(MAX_CLASSES, np.int64)
    rest_B, n, mask = np.zeros(_BLOCK, old.dtype), 0, (top << _U1) - _U1
    for p in range(len(lengths_P)):
        live = carray(at_address(live_P[p], old), lengths_P[p])
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
                    live[i] = unfold(np.uint64(word), np.uint64(folded[k]), top) & mask
                    n += 1
                    k += 1
                    left += np.int64(gaps[k]) + 1 if k < end else _FAR
                next_C[c], left_C[c] = k, left
        ends_P[p] = n


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


@kernel(*(
    types.boolean(read_only(uint8), int64, read_only(int64), read_only(int64), read_only(int64), read_only(int64),
                  read_only(int64), read_only(uint8), read_only(uint32), uint32[::1], w[::1])
    for w in (uint16, uint32)
))
def decode_body(
    chunk: NDArray[np.uint8], at: int, sizes_S: NDArray[np.int64], lanes_S: NDArray[np.int64],
    populations_C: NDArray[np.int64], counts_C: NDArray[np.int64], weights: NDArray[np.int64],
    extra_bits: NDArray[np.uint8], bases: NDArray[np.uint32], gaps: NDArray[np.uint32], folded: NDArray[Any],
) -> bool:
    """What follows the class records of an XC segment, from ``at`` on, into ``gaps`` and ``folded`` (see ``xc``).

    False where anything in it is malformed, or by a coder that no kernel knows.
    """
    count = len(gaps)
    if not entropy.all_known(chunk, at, len(sizes_S)):
        return False
    columns, tokens, away = np.empty(sizes_S.sum(), np.uint8), np.empty(2 * count, np.uint8), np.empty(count, np.uint8)
    done, numbers = np.zeros(len(sizes_S), np.bool_), np.empty(2 * count, np.uint32)
    at = entropy.decode_streams(chunk, at, sizes_S, lanes_S, weights, columns, done)
    if not done.all() or not entropy.gather(columns, counts_C, tokens, away) or tokens.max() >= MAX_TOKENS:
        return False
    bits = entropy.extra_bits(tokens, extra_bits)
    size = entropy.raw_size(chunk, at)
    if size != (bits + 7) >> 3:
        return False
    at += _STREAM_HEAD_BYTES
    if bits & 7 and chunk[at + size - 1] >> np.uint8(bits & 7):
        return False
    padded = np.zeros(size + 8, np.uint8)
    padded[:size] = chunk[at : at + size]
    entropy.numbers(tokens, padded, extra_bits, bases, numbers)
    reached_C = np.empty(len(counts_C), np.int64)
    if not join(numbers, away, counts_C, reached_C, folded):
        return False
    for c in range(len(counts_C)):
        if reached_C[c] > populations_C[c]:
            return False
    gaps[:] = numbers[:count]
    return True
