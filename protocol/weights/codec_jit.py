"""Numba kernels of the diff codec: same results as ``classes`` and ``tokens``, in one pass over the words.

Imported only where speed matters (see ``kernels``). All release the GIL. Words of a class are counted in two registers
of eight one-byte counters, which adding one 64-bit number from a table per word keeps up to date; a block is short
enough that no counter overflows.

Legend: C classes, n changed words, N words of one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import int64, types, uint8, uint16, uint32, uint64
from numpy.typing import NDArray

#: Words per block: a counter that starts at 0 stays below 128.
_BLOCK = 127
_ALARM = np.uint64(0x8080808080808080)
_FAR = np.int64(2**62)
_U0, _U1, _U8, _U63, _U127, _U255 = (np.uint64(n) for n in (0, 1, 8, 63, 127, 255))

_F = TypeVar("_F", bound=Callable[..., Any])


def _inlined(function: _F) -> _F:
    """A helper for kernels."""
    return cast("_F", numba.njit(cache=True, inline="always")(function))


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


@_kernel(*(
    int64(_of(w), _of(w), uint64, uint64, _of(uint64), _of(uint64), _of(uint8), int64[::1], int64[::1], uint8[::1],
          uint32[::1], w[::1], int64)
    for w in (uint16, uint32)
))
def scan_piece(
    old: NDArray[Any], new: NDArray[Any], shift: np.uint64, top: np.uint64, low: NDArray[np.uint64],
    high: NDArray[np.uint64], table: NDArray[np.uint8], populations_C: NDArray[np.int64],
    previous_C: NDArray[np.int64], classes: NDArray[np.uint8], gaps: NDArray[np.uint32], folded: NDArray[Any], n: int
) -> int:
    """Append the changes of one piece to ``classes``, ``gaps`` and ``folded``; how many there are now.

    ``populations_C`` counts on; ``previous_C`` is the rank of the class's last changed word, -1 before the first.
    """
    for start in range(0, len(old), _BLOCK):
        a = b = _U0
        for i in range(start, min(start + _BLOCK, len(old))):
            word = np.uint64(old[i])
            key = (word >> shift) & _U255
            if old[i] != new[i]:
                c = np.int64(table[key])
                lane = a if c < 8 else b
                rank = populations_C[c] + np.int64((lane >> np.uint64((c & 7) << 3)) & _U255)
                classes[n] = table[key]
                gaps[n] = np.uint32(rank - previous_C[c] - 1)
                folded[n] = _fold(word, np.uint64(new[i]), top)
                previous_C[c] = rank
                n += 1
            a += low[key]
            b += high[key]
        for k in range(len(populations_C)):
            lane = a if k < 8 else b
            populations_C[k] += np.int64((lane >> np.uint64((k & 7) << 3)) & _U255)
    return n


@_kernel(*(
    int64(_of(w), uint64, uint64, _of(uint64), _of(uint64), _of(uint8), _of(uint32), _of(w), int64[::1], int64[::1],
          _of(int64), int64[::1], uint32[::1], w[::1])
    for w in (uint16, uint32)
))
def find_piece(
    old: NDArray[Any], shift: np.uint64, top: np.uint64, low: NDArray[np.uint64], high: NDArray[np.uint64],
    table: NDArray[np.uint8], gaps: NDArray[np.uint32], folded: NDArray[Any], left_C: NDArray[np.int64],
    next_C: NDArray[np.int64], end_C: NDArray[np.int64], populations_C: NDArray[np.int64], where: NDArray[np.uint32],
    words: NDArray[Any],
) -> int:
    """Write index and new word of each change in one piece; how many there are.

    A class's next change is number ``next_C`` of ``gaps`` and ``folded``, until ``end_C``; ``left_C`` more of its
    words stay before it. ``populations_C`` counts on.
    """
    classes, n = len(left_C), 0
    begin_C = np.empty(classes, np.uint64)
    for start in range(0, len(old), _BLOCK):
        a = b = _U0
        for c in range(classes):
            begin_C[c] = _U127 - np.uint64(min(left_C[c], 127))
            if c < 8:
                a |= begin_C[c] << np.uint64(c << 3)
            else:
                b |= begin_C[c] << np.uint64((c & 7) << 3)
        for i in range(start, min(start + _BLOCK, len(old))):
            key = (np.uint64(old[i]) >> shift) & _U255
            a += low[key]
            b += high[key]
            if (a | b) & _ALARM:
                c = int(table[key])
                populations_C[c] += np.int64(_U127 - begin_C[c]) + 1
                where[n] = np.uint32(i)
                words[n] = _unfold(np.uint64(old[i]), np.uint64(folded[next_C[c]]), top)
                n += 1
                next_C[c] += 1
                left_C[c] = np.int64(gaps[next_C[c]]) if next_C[c] < end_C[c] else _FAR
                begin_C[c] = _U127 - np.uint64(min(left_C[c], 127))
                place = np.uint64((c & 7) << 3)
                if c < 8:
                    a = (a & ~(_U255 << place)) | (begin_C[c] << place)
                else:
                    b = (b & ~(_U255 << place)) | (begin_C[c] << place)
        for c in range(classes):
            lane = a if c < 8 else b
            seen = np.int64(((lane >> np.uint64((c & 7) << 3)) & _U255) - begin_C[c])
            left_C[c] -= seen
            populations_C[c] += seen
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


@_kernel(types.void(_of(uint32), _of(uint8), uint8[::1]))
def pack(values: NDArray[np.uint32], widths: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
    """Bits of each number, one after the other (see ``tokens.pack_bits``)."""
    held, count, at = _U0, _U0, 0
    for i in range(len(values)):
        width = np.uint64(widths[i])
        held |= (np.uint64(values[i]) & ((_U1 << width) - _U1)) << count
        count += width
        while count >= _U8:
            data[at] = np.uint8(held & _U255)
            held >>= _U8
            count -= _U8
            at += 1
    if count > _U0:
        data[at] = np.uint8(held & _U255)


@_kernel(types.void(_of(uint8), _of(uint8), uint32[::1]))
def unpack(data: NDArray[np.uint8], widths: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
    """Inverse of :func:`pack`."""
    held, count, at = _U0, _U0, 0
    for i in range(len(widths)):
        width = np.uint64(widths[i])
        while count < width:
            held |= np.uint64(data[at]) << count
            count += _U8
            at += 1
        values[i] = np.uint32(held & ((_U1 << width) - _U1))
        held >>= width
        count -= width
