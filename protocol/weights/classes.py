"""Classes of words by the exponent they had before: how changes are placed within them.

How likely a weight is to change, and how far, depends on how its exponent compares with the optimiser's step. Both ends
hold the old words, so positions are counted among the words of one class, where changes are spread evenly.

A word's *key* is the top byte of its pattern without the sign: the exponent of BF16 and F32, exponent and upper
mantissa of F16. A class is a range of keys; :mod:`choice` says which. Spec: ``docs/spec/weight-diff.md``, "Exponent
classes".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.weights import steps

#: Most classes of a segment: two vectors of eight 64-bit counters.
MAX_CLASSES: Final = 16


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


class Journal:
    """What :func:`apply` did, written down before each change is made: enough to take it back at any time.

    ``where`` (n,) uint32: index of each changed word in its piece; ``old`` (n,) the word before; piece after piece.
    ``ends`` (P,): where those of each piece end; what lies behind the last of them was not done.
    """

    def __init__(self, pieces: Sequence[NDArray[Any]], count: int):
        self.where, self.old = np.empty(count, np.uint32), np.empty(count, pieces[0].dtype)
        self.ends = np.zeros(len(pieces), np.int64)

    def of_pieces(self) -> list[tuple[NDArray[np.uint32], NDArray[Any]]]:
        """Indices and old words of each piece."""
        ends = [0, *np.maximum.accumulate(self.ends).tolist()]
        return [(self.where[lo:hi], self.old[lo:hi]) for lo, hi in pairwise(ends)]


def apply(pieces: Sequence[NDArray[Any]], changes: Changes, journal: Journal) -> bool:
    """Make the changes in ``pieces``, in place, and write them down.

    False when the populations are not those of ``pieces``: the changes are for another state, and what was made of them
    is to be taken back. The ranks that ``gaps`` stand for must lie within the populations.
    """
    before = np.concatenate(pieces)
    classes = table_of(changes.firsts)[keys_of(before)]
    if (np.bincount(classes, minlength=len(changes.firsts)) != changes.populations).any():
        return False
    ends = np.cumsum(changes.counts)
    where = np.empty(len(changes.gaps), np.int64)
    for c in np.flatnonzero(changes.counts):
        part = slice(ends[c] - changes.counts[c], ends[c])
        where[part] = np.flatnonzero(classes == c)[np.cumsum(changes.gaps[part] + np.int64(1)) - 1]
    order = np.argsort(where)
    where, words = where[order], steps.unfold(before[where], changes.folded)[order]
    borders = np.cumsum([0, *map(len, pieces)])
    cuts = np.searchsorted(where, borders)
    for p, piece in enumerate(pieces):
        done = slice(cuts[p], cuts[p + 1])
        at = where[done] - borders[p]
        journal.where[done], journal.old[done] = at, piece[at]
        journal.ends[p] = cuts[p + 1]
        piece[at] = words[done]
    return True


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
