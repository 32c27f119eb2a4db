"""Classes of words by the exponent they had before: how changes are placed within them, and how classes are chosen.

How likely a weight is to change, and how far, depends on how its exponent compares with the optimiser's step. Both ends
hold the old words, so positions are counted among the words of one class, where changes are spread evenly.

A word's *key* is the top byte of its pattern without the sign: the exponent of BF16 and F32, exponent and upper
mantissa of F16. A class is a range of keys. Spec: ``docs/spec/weight-diff.md``, "Exponent classes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.weights import steps
from protocol.weights.tokens import tokens_of

#: Most classes of a segment: their counters fit two 64-bit registers, one byte each.
MAX_CLASSES: Final = 16
#: Estimated cost of one more class, in bits: its record, three streams, two tables of an entropy coder.
_CLASS_BITS: Final = 8 * 80
#: Step magnitudes told apart when classes are chosen.
MAGNITUDES: Final = 64
#: Words per block of a sample, and how many blocks one sampled block stands for.
_SAMPLE_BLOCK, _SAMPLE_EVERY = 2048, 32
#: Fewest words for which sampling is exact enough.
_SAMPLED_WORDS: Final = 2**20
#: Words below which more than one class does not pay.
_SMALL_WORDS: Final = 512
#: Groups of keys that may become classes of their own.
_GROUPS: Final = 48


#: See :func:`count_cells`.
Count = Callable[[NDArray[Any], NDArray[Any]], tuple[NDArray[np.int64], NDArray[np.int64]]]


@dataclass(frozen=True)
class Changes:
    """What changed in one segment, by class: class 0 first, ascending positions within each.

    ``gaps`` (n,) uint32: words of the class that stay as they are between a changed word and the one before it.
    ``folded`` (n,) of the words' type: folded steps (:mod:`protocol.weights.steps`).
    """

    firsts: NDArray[np.uint8]  #: (C,) smallest key of each class, ascending from 0
    populations: NDArray[np.int64]  #: (C,) words of each class
    counts: NDArray[np.int64]  #: (C,) changed words of each class
    gaps: NDArray[np.uint32]
    folded: NDArray[Any]


def keys_of(words: NDArray[Any]) -> NDArray[np.uint8]:
    """(n,) key of each word."""
    bits = 8 * words.dtype.itemsize
    keys: NDArray[np.uint8] = (words >> words.dtype.type(bits - 9)).astype(np.uint8)
    return keys


def table_of(firsts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(256,) class of each key."""
    return (np.searchsorted(firsts, np.arange(256), side="right") - 1).astype(np.uint8)


def scan(old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]], firsts: NDArray[np.uint8]) -> Changes:
    """Changes from ``old`` to ``new``, two equal lists of one-dimensional pieces of a segment."""
    before, after = np.concatenate(old), np.concatenate(new)
    classes = table_of(firsts)[keys_of(before)]
    changed = before != after
    populations = np.bincount(classes, minlength=len(firsts))
    counts = np.bincount(classes[changed], minlength=len(firsts))
    gaps, folded = [np.zeros(0, np.uint32)], [np.zeros(0, before.dtype)]
    for c in np.flatnonzero(counts):
        members = np.flatnonzero(classes == c)
        ranks = np.flatnonzero(changed[members])
        gaps.append((np.diff(ranks, prepend=-1) - 1).astype(np.uint32))
        at = members[ranks]
        folded.append(steps.fold(before[at], after[at]))
    return Changes(firsts, populations, counts, np.concatenate(gaps), np.concatenate(folded))


def apply(pieces: Sequence[NDArray[Any]], changes: Changes) -> list[tuple[NDArray[np.uint32], NDArray[Any]]] | None:
    """Make the changes in ``pieces``, in place; for each the indices that changed, in any order, and the old words.

    None, and nothing is changed, when the populations are not those of ``pieces``: the changes are for another state.
    The ranks that ``gaps`` stand for must lie within the populations.
    """
    before = np.concatenate(pieces)
    classes = table_of(changes.firsts)[keys_of(before)]
    if (np.bincount(classes, minlength=len(changes.firsts)) != changes.populations).any():
        return None
    ends = np.cumsum(changes.counts)
    where = np.empty(len(changes.gaps), np.int64)
    for c in np.flatnonzero(changes.counts):
        part = slice(ends[c] - changes.counts[c], ends[c])
        where[part] = np.flatnonzero(classes == c)[np.cumsum(changes.gaps[part] + np.int64(1)) - 1]
    order = np.argsort(where)
    where, words = where[order], steps.unfold(before[where], changes.folded)[order]
    borders = np.cumsum([0, *map(len, pieces)])
    cuts = np.searchsorted(where, borders)
    done: list[tuple[NDArray[np.uint32], NDArray[Any]]] = []
    for piece, start, lo, hi in zip(pieces, borders[:-1], cuts[:-1], cuts[1:], strict=True):
        at = (where[lo:hi] - start).astype(np.uint32)
        done.append((at, piece[at]))
        piece[at] = words[lo:hi]
    return done


def join(
    numbers: NDArray[np.uint32], away: NDArray[np.uint8], counts: NDArray[np.int64], words: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Folded steps of type ``words``, and how many words of each class lie up to and with its last changed one.

    ``numbers`` (2n,) holds all gaps, by class, then all magnitudes; ``away`` (n,) the directions, 0 or 1. None where a
    magnitude stands for a step of zero or of more than half a circle.
    """
    gaps, magnitudes = numbers[: len(away)], numbers[len(away) :]
    last = 2 ** (8 * words.itemsize - 1) - 1
    if (magnitudes.astype(np.int64) + away > last).any():
        return None
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(gaps, dtype=np.int64)])[np.cumsum([0, *counts])]
    return (magnitudes << np.uint32(1) | away).astype(words), np.diff(ends) + counts


# -- choosing classes ------------------------------------------------------------------------------------


def choose(
    old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]], count: Count | None = None
) -> NDArray[np.uint8]:
    """(C,) smallest key of each class; ``count`` stands in for :func:`count_cells`.

    From a sample of the words; exact optimum, under the estimate, over all ways to cut the keys into ranges.
    """
    if sum(map(len, old)) < _SMALL_WORDS:
        return np.zeros(1, np.uint8)
    populations, magnitudes = _histograms(old, new, count or count_cells)
    groups = _groups(populations, magnitudes.sum(1))
    starts = np.append(groups, 256)
    costs = _range_costs(
        np.add.reduceat(populations, groups), np.add.reduceat(magnitudes, groups, axis=0)
    )
    return starts[_best_cuts(costs)].astype(np.uint8)


def _histograms(
    old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]], count: Count
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(256,) words of each key and (256, MAGNITUDES) changed ones by size of the step, both estimated."""
    populations, magnitudes = np.zeros(256), np.zeros((256, MAGNITUDES))
    stride = _SAMPLE_EVERY if sum(map(len, old)) >= _SAMPLED_WORDS else 1
    for before, after in zip(old, new, strict=True):
        scale = 1.0
        if stride > 1 and len(before) >= stride * _SAMPLE_BLOCK:
            whole = len(before) // _SAMPLE_BLOCK * _SAMPLE_BLOCK
            scale = len(before)
            before, after = (x[:whole].reshape(-1, _SAMPLE_BLOCK)[::stride].reshape(-1) for x in (before, after))
            scale /= len(before)
        of_keys, of_cells = count(before, after)
        populations += scale * of_keys
        magnitudes += scale * of_cells
    return populations, magnitudes


def count_cells(before: NDArray[Any], after: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(256,) words of each key; (256, MAGNITUDES) changed ones by token of the step's magnitude, the last for more."""
    keys = keys_of(before)
    at = np.flatnonzero(before != after)
    size = np.minimum(tokens_of((steps.fold(before[at], after[at]) >> 1).astype(np.uint32)), MAGNITUDES - 1)
    cells = np.bincount(keys[at].astype(np.int64) * MAGNITUDES + size, minlength=256 * MAGNITUDES)
    return np.bincount(keys, minlength=256), cells.reshape(256, MAGNITUDES)


def _groups(populations: NDArray[np.float64], changed: NDArray[np.float64]) -> NDArray[np.int64]:
    """First keys of at most about ``_GROUPS`` ranges that hold comparable shares of words and changes."""
    share = np.cumsum(populations) / max(populations.sum(), 1) + np.cumsum(changed) / max(changed.sum(), 1)
    bucket = np.floor(share * _GROUPS / 2)
    return np.concatenate([[0], np.flatnonzero(np.diff(bucket)) + 1])


def _range_costs(populations: NDArray[np.float64], magnitudes: NDArray[np.float64]) -> NDArray[np.float64]:
    """(G, G + 1) bits that one class of groups i to j (excluded) takes; infinite where i >= j."""
    total = _differences(populations)
    changed = _differences(magnitudes.sum(1))
    steps_bits = _xlog2x(changed) - sum(_xlog2x(_differences(column)) for column in magnitudes.T if column.any())
    place_bits = _xlog2x(total) - _xlog2x(changed) - _xlog2x(total - changed)
    costs: NDArray[np.float64] = place_bits + steps_bits + changed + np.where(changed > 0, _CLASS_BITS, 8 * 9)
    costs[np.tril_indices(len(costs), -1)] = np.inf
    costs[np.diag_indices(len(costs))] = np.inf
    return costs


def _differences(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(G, G + 1) sum of values i to j (excluded), 0 where i >= j."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    sums: NDArray[np.float64] = np.maximum(ends[None, :] - ends[:-1, None], 0.0)
    return sums


def _xlog2x(values: NDArray[np.float64]) -> NDArray[np.float64]:
    logs = np.log2(values, out=np.zeros_like(values), where=values > 0)
    product: NDArray[np.float64] = np.maximum(values, 0.0) * logs
    return product


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
