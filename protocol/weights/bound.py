"""How few bytes a diff could have: the entropy of what changed, one table for the whole model.

*Order 0*: which words change, all alike, and by what steps. *Given the exponent*: the same per exponent of the old
word, which both ends hold (``docs/adr/0010-diffs-by-class-of-the-old-exponent.md``). Both are empirical entropies
(Shannon 1948) and count no headers and no tables, so a small diff is always well above them. No coder that uses one
table per exponent for the whole model goes below; ours has tables per segment, so where tensors change unlike each
other it does: .92 of the second on a 135M model whose weights had been quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.weights import steps
from protocol.weights.layout import Layout, State, check_state

#: Words looked at at once, so that what is computed of them stays in the processor's cache.
_BLOCK_WORDS: Final = 2**18
_KEYS: Final = 256
#: Bits below the key, by bytes of a word.
_SHIFT: Final = {2: 7, 4: 23}


@dataclass(frozen=True)
class Bound:
    """What a diff has to say. Sizes in bytes; 0 when nothing changed."""

    changed: int  #: words that differ
    order_0: float
    exponent: float


def diff_bound(layout: Layout, old: State, new: State) -> Bound:
    """Entropy of the change from ``old`` to ``new``.

    Raises:
        LocalFault: ``E_STATE`` when a state does not fit the layout.
    """
    check_state(layout, old)
    check_state(layout, new)
    words, populations = 0, {2: np.zeros(_KEYS, np.int64), 4: np.zeros(_KEYS, np.int64)}
    keys: list[NDArray[Any]] = []
    folded: list[NDArray[Any]] = []
    for entry in layout.entries:
        before, after = old[entry.name].reshape(-1), new[entry.name].reshape(-1)
        size = entry.words.itemsize
        counts = populations[size]
        for at in range(0, len(before), _BLOCK_WORDS):
            block = slice(at, at + _BLOCK_WORDS)
            compiled()(before[block], counts)
            where = np.flatnonzero(before[block] != after[block]) + at
            keys.append(_keys(before[where]) + (0 if size == 2 else _KEYS))
            folded.append(steps.fold(before[where], after[where]).astype(np.uint64))
        words += len(before)
    if not sum(map(len, keys)):
        return Bound(0, 0.0, 0.0)
    key, step = np.concatenate(keys), np.concatenate(folded)
    population = np.concatenate([populations[2], populations[4]])
    return Bound(len(step), _entropy(np.zeros_like(key), step, np.array([words])), _entropy(key, step, population))


@cache
def compiled() -> Callable[[NDArray[Any], NDArray[np.int64]], None]:
    """Adds the number of words of each key; compiled where that is possible."""
    try:
        from protocol.weights import bound_jit
    except (ImportError, RuntimeError):
        return _count

    def count(words: NDArray[Any], counts: NDArray[np.int64]) -> None:
        if not words.flags.aligned:
            words = words.copy()
        bound_jit.count(words, np.uint32(_SHIFT[words.dtype.itemsize]), counts)

    return count


def _count(words: NDArray[Any], counts: NDArray[np.int64]) -> None:
    counts += np.bincount(_keys(words), minlength=_KEYS)


def _keys(words: NDArray[Any]) -> NDArray[np.int64]:
    """The top byte behind the sign bit: the exponent of BF16 and F32 (weight-diff.md, "Exponent classes")."""
    shift = words.dtype.type(_SHIFT[words.dtype.itemsize])
    keys: NDArray[np.int64] = (words >> shift & words.dtype.type(0xFF)).astype(np.int64)
    return keys


def _entropy(key: NDArray[np.int64], step: NDArray[np.uint64], population: NDArray[np.int64]) -> float:
    """Bytes to say which words of each key change, and by what steps; ``population`` counts the words of each key."""
    changed = np.bincount(key, minlength=len(population))
    order = np.lexsort((step, key))
    key, step = key[order], step[order]
    first = np.flatnonzero(np.concatenate([[True], (key[1:] != key[:-1]) | (step[1:] != step[:-1])]))
    counts = np.diff(np.append(first, len(key)))
    bits = -(counts * np.log2(counts / changed[key[first]])).sum()
    for part in (changed, population - changed):
        some = part > 0
        bits -= (part[some] * np.log2(part[some] / population[some])).sum()
    return float(bits) / 8
