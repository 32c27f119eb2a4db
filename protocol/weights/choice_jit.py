"""The kernel that chooses classes: the same ones as ``choice``, operation by operation, in one call per segment."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float64, int64, types, uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from protocol.jit import inlined, kernel, read_only
from protocol.weights.choice import (
    CLASS_BITS,
    EMPTY_CLASS_BITS,
    GROUPS,
    LOG_STEPS_BITS,
    LOGS,
    MAGNITUDES,
    SAMPLE_BLOCK,
)
from protocol.weights.classes import MAX_CLASSES
from protocol.weights.entropy_jit import token_of
from protocol.weights.fold_jit import fold
from protocol.weights.vector_jit import at_address, leading_zeros

_WIDE = np.uint64(2**16)
_S7, _S23 = np.uint32(7), np.uint32(23)
_U1 = np.uint64(1)
_STEPS = np.int64(1 << LOG_STEPS_BITS)


@inlined
def _count(
    old: NDArray[Any], new: NDArray[Any], lo: int, hi: int, top: np.uint64, keys_K: NDArray[np.int64],
    cells_KM: NDArray[np.int64],
) -> None:
    """Add words ``lo`` to ``hi`` to ``keys_K`` and ``cells_KM`` (see ``choice.count_cells``)."""
    shift, mask = _S23 if top > _WIDE else _S7, (top << _U1) - _U1
    for i in range(lo, hi):
        key = np.uint8(old[i] >> shift)
        keys_K[key] += 1
        if old[i] != new[i]:
            magnitude = (fold(np.uint64(old[i]), np.uint64(new[i]), top) & mask) >> _U1
            cells_KM[np.int64(key), min(int(token_of(np.uint32(magnitude))), MAGNITUDES - 1)] += 1


@kernel(float64(int64))
def xlog2x(value: int) -> float:
    """See ``choice._xlog2x``."""
    if value <= 0:
        return 0.0
    exponent = np.int64(31) - np.int64(leading_zeros(np.uint32(value)))
    steps_up = (np.float64(value) / np.float64(np.int64(1) << exponent) - 1.0) * _STEPS
    at = np.int64(steps_up)
    fraction = steps_up - at
    return float(value * (exponent + (LOGS[at] + fraction * (LOGS[at + 1] - LOGS[at]))))


@kernel(int64(int64[::1], int64[::1], int64[::1]))
def _groups(populations_K: NDArray[np.int64], changed_K: NDArray[np.int64], groups_G: NDArray[np.int64]) -> int:
    words, changes = max(populations_K.sum(), 1), max(changed_K.sum(), 1)
    count, before, words_so_far, changes_so_far = 0, -1.0, 0, 0
    for key in range(256):
        words_so_far += populations_K[key]
        changes_so_far += changed_K[key]
        bucket = np.floor((words_so_far / words + changes_so_far / changes) * GROUPS)
        if key == 0 or bucket != before:
            groups_G[count] = key
            count += 1
        before = bucket
    return count


@kernel(types.void(int64[::1], int64[:, ::1], int64[::1], float64[:, ::1]))
def _range_costs(
    populations_K: NDArray[np.int64], cells_KM: NDArray[np.int64], groups_G: NDArray[np.int64],
    costs: NDArray[np.float64],
) -> None:
    """Fill the upper right of ``costs`` (see ``choice._range_costs``)."""
    for i in range(len(groups_G)):
        total, changed, sizes_M = 0, 0, np.zeros(MAGNITUDES, np.int64)
        for j in range(i, len(groups_G)):
            end = groups_G[j + 1] if j + 1 < len(groups_G) else 256
            for key in range(groups_G[j], end):
                total += populations_K[key]
                for m in range(MAGNITUDES):
                    sizes_M[m] += cells_KM[key, m]
                    changed += cells_KM[key, m]
            step_bits = 0.0
            for m in range(MAGNITUDES):
                step_bits += xlog2x(sizes_M[m])
            place_bits = xlog2x(total) - xlog2x(changed) - xlog2x(total - changed)
            own_bits = CLASS_BITS if changed > 0 else EMPTY_CLASS_BITS
            costs[i, j + 1] = place_bits + (xlog2x(changed) - step_bits) + changed + own_bits


@kernel(int64(float64[:, ::1], int64[::1]))
def _best_cuts(costs: NDArray[np.float64], cuts: NDArray[np.int64]) -> int:
    """Fill ``cuts`` from its end (see ``choice._best_cuts``); how many there are."""
    groups = len(costs)
    best = np.full((MAX_CLASSES + 1, groups + 1), np.inf)
    best[0, 0] = 0.0
    origin = np.zeros((MAX_CLASSES + 1, groups + 1), np.int64)
    for c in range(1, MAX_CLASSES + 1):
        for end in range(1, groups + 1):
            for start in range(end):
                bits = best[c - 1, start] + costs[start, end]
                if bits < best[c, end]:
                    best[c, end], origin[c, end] = bits, start
    count = 0
    for c in range(1, MAX_CLASSES + 1):
        if best[c, groups] < best[count, groups]:
            count = c
    end = groups
    for k in range(count):
        end = origin[count - k, end]
        cuts[len(cuts) - 1 - k] = end
    return count


@kernel(*(
    int64(read_only(uint64), read_only(uint64), read_only(int64), w[::1], uint64, int64, uint8[::1])
    for w in (uint16, uint32)
))
def choose(
    old_P: NDArray[np.uint64], new_P: NDArray[np.uint64], lengths_P: NDArray[np.int64], like: NDArray[Any],
    top: np.uint64, stride: int, firsts: NDArray[np.uint8],
) -> int:
    """Fill ``firsts`` (see ``choice.choose``); how many there are. Pieces are given by their addresses."""
    keys, cells = np.zeros(256, np.int64), np.zeros((256, MAGNITUDES), np.int64)
    some_keys, some_cells = np.zeros(256, np.int64), np.zeros((256, MAGNITUDES), np.int64)
    words, seen = 0, 0
    for p in range(len(lengths_P)):
        length = lengths_P[p]
        before, after = carray(at_address(old_P[p], like), length), carray(at_address(new_P[p], like), length)
        if stride == 1 or length < stride * SAMPLE_BLOCK:
            _count(before, after, 0, length, top, keys, cells)
            continue
        words += length
        for block in range(0, length // SAMPLE_BLOCK, stride):
            _count(before, after, block * SAMPLE_BLOCK, (block + 1) * SAMPLE_BLOCK, top, some_keys, some_cells)
            seen += SAMPLE_BLOCK
    changed = np.zeros(256, np.int64)
    for key in range(256):
        if seen:
            keys[key] += (2 * some_keys[key] * words + seen) // (2 * seen)
        for m in range(MAGNITUDES):
            if seen:
                cells[key, m] += (2 * some_cells[key, m] * words + seen) // (2 * seen)
            changed[key] += cells[key, m]
    groups = np.empty(256, np.int64)
    groups = groups[: _groups(keys, changed, groups)]
    costs, cuts = np.full((len(groups), len(groups) + 1), np.inf), np.empty(MAX_CLASSES, np.int64)
    _range_costs(keys, cells, groups, costs)
    count = _best_cuts(costs, cuts)
    for c in range(count):
        firsts[c] = groups[cuts[MAX_CLASSES - count + c]]
    return count
