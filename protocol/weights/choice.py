"""How the classes of a segment are chosen: from a sample, the ranges of keys that should make it shortest.

What is chosen is said in the segment, so any choice decodes; a good one is small. All of it is integers, one table of
logarithms, and exactly rounded operations in a fixed order, so that the kernel in ``choice_jit`` chooses the same.

Legend: G groups of keys that may become classes, K = 256 keys, M = MAGNITUDES sizes of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.weights import steps
from protocol.weights.classes import MAX_CLASSES, keys_of
from protocol.weights.tokens import tokens_of

#: Estimated cost in bits of one more class: its record, three streams, two tables of an entropy coder; without changes.
CLASS_BITS: Final = 8 * 80
EMPTY_CLASS_BITS: Final = 8 * 9
#: Step magnitudes told apart.
MAGNITUDES: Final = 64
#: Words per block of a sample, and how many blocks one sampled block stands for.
SAMPLE_BLOCK: Final = 2048
_SAMPLE_EVERY: Final = 32
#: Fewest words for which sampling is exact enough.
_SAMPLED_WORDS: Final = 2**20
#: Words below which more than one class does not pay.
_SMALL_WORDS: Final = 512
#: Twice as many groups as there may be, for two shares that each reach one.
GROUPS: Final = 24
#: Steps between powers of two at which logarithms are exact; linear between them, 4.4e-8 off at most.
LOG_STEPS_BITS: Final = 11
LOGS: Final[NDArray[np.float64]] = np.log2(1 + np.arange(2**LOG_STEPS_BITS + 1) / 2**LOG_STEPS_BITS)


def stride_of(words: int) -> int:
    """Every how many blocks of a segment of so many words are looked at; 0 where one class is enough."""
    if words < _SMALL_WORDS:
        return 0
    return _SAMPLE_EVERY if words >= _SAMPLED_WORDS else 1


def choose(old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """(C,) smallest key of each class, for two equal lists of one-dimensional pieces of a segment.

    Exact optimum, under the estimate, over all ways to cut the groups into ranges.
    """
    stride = stride_of(sum(map(len, old)))
    if not stride:
        return np.zeros(1, np.uint8)
    populations_K, cells_KM = _histograms(old, new, stride)
    groups_G = _groups(populations_K, cells_KM.sum(1))
    costs = _range_costs(np.add.reduceat(populations_K, groups_G), np.add.reduceat(cells_KM, groups_G, axis=0))
    return groups_G[_best_cuts(costs)].astype(np.uint8)


def count_cells(before: NDArray[Any], after: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(K,) words of each key; (K, M) changed ones by token of the step's magnitude, the last for more."""
    keys = keys_of(before)
    at = np.flatnonzero(before != after)
    size = np.minimum(tokens_of((steps.fold(before[at], after[at]) >> 1).astype(np.uint32)), MAGNITUDES - 1)
    cells = np.bincount(keys[at].astype(np.int64) * MAGNITUDES + size, minlength=256 * MAGNITUDES)
    return np.bincount(keys, minlength=256), cells.reshape(256, MAGNITUDES)


def _histograms(
    old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]], stride: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(K,) words of each key and (K, M) changed ones by size of the step; of long pieces scaled up from a sample."""
    exact, sampled = [(np.zeros(256, np.int64), np.zeros((256, MAGNITUDES), np.int64)) for _ in range(2)]
    words = seen = 0
    for before, after in zip(old, new, strict=True):
        keys, cells = exact
        if stride > 1 and len(before) >= stride * SAMPLE_BLOCK:
            keys, cells = sampled
            words += len(before)
            whole = len(before) // SAMPLE_BLOCK * SAMPLE_BLOCK
            before, after = (x[:whole].reshape(-1, SAMPLE_BLOCK)[::stride].reshape(-1) for x in (before, after))
            seen += len(before)
        of_keys, of_cells = count_cells(before, after)
        keys += of_keys
        cells += of_cells
    if not seen:
        return exact
    scaled_K, scaled_KM = [(2 * counts * words + seen) // (2 * seen) for counts in sampled]
    return exact[0] + scaled_K, exact[1] + scaled_KM


def _groups(populations_K: NDArray[np.int64], changed_K: NDArray[np.int64]) -> NDArray[np.int64]:
    """(G,) first keys of ranges that hold comparable shares of words and changes."""
    shares = [np.cumsum(counts) / max(int(counts.sum()), 1) for counts in (populations_K, changed_K)]
    bucket = np.floor((shares[0] + shares[1]) * GROUPS)
    return np.concatenate([[0], np.flatnonzero(np.diff(bucket)) + 1])


def _range_costs(populations_G: NDArray[np.int64], cells_GM: NDArray[np.int64]) -> NDArray[np.float64]:
    """(G, G + 1) bits that one class of groups i to j (excluded) takes; infinite where i >= j."""
    total = _differences(populations_G)
    changed = _differences(cells_GM.sum(1))
    step_bits = np.zeros_like(total, np.float64)
    for column_G in cells_GM.T:
        step_bits += _xlog2x(_differences(column_G))
    place_bits = _xlog2x(total) - _xlog2x(changed) - _xlog2x(total - changed)
    own_bits = np.where(changed > 0, CLASS_BITS, EMPTY_CLASS_BITS)
    costs: NDArray[np.float64] = place_bits + (_xlog2x(changed) - step_bits) + changed + own_bits
    costs[np.tril_indices(len(costs), -1)] = np.inf
    costs[np.diag_indices(len(costs))] = np.inf
    return costs


def _differences(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """(G, G + 1) sum of values i to j (excluded), 0 where i >= j."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    sums: NDArray[np.int64] = np.maximum(ends[None, :] - ends[:-1, None], 0)
    return sums


def _xlog2x(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers times their logarithms to base 2, 0 for 0; of numbers below 2^32, to 4.4e-8 of the logarithm."""
    mantissas, exponents = np.frexp(values.astype(np.float64))
    steps_up = (2 * mantissas - 1) * 2**LOG_STEPS_BITS
    at = np.maximum(steps_up, 0).astype(np.int64)
    fraction = steps_up - at
    logs = (exponents - 1) + (LOGS[at] + fraction * (LOGS[at + 1] - LOGS[at]))
    return np.where(values > 0, values * logs, 0.0)


def _best_cuts(costs: NDArray[np.float64]) -> list[int]:
    """Group indices at which classes begin, at most ``MAX_CLASSES``: the cheapest way to cut the groups."""
    groups = len(costs)
    best = np.full((MAX_CLASSES + 1, groups + 1), np.inf)
    best[0, 0] = 0.0
    origin = np.zeros((MAX_CLASSES + 1, groups + 1), np.int64)
    for c in range(1, MAX_CLASSES + 1):
        totals = best[c - 1, :groups, None] + costs
        origin[c] = np.argmin(totals, axis=0)
        best[c] = totals[origin[c], np.arange(groups + 1)]
    c = int(np.argmin(best[:, groups]))
    end, cuts = groups, list[int]()
    while c:
        end = int(origin[c, end])
        cuts.append(end)
        c -= 1
    return cuts[::-1]
