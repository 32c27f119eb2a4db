"""Steps between bit patterns: how far a weight moved, counted in representable numbers.

Patterns of a float format are put in order of value, -0 right below +0 and NaNs at both ends, by a bijection of the
integers below 2^w. The step from one pattern to another is their distance in that order, modulo 2^w; its sign is
turned so that + means away from zero, and it is folded to a small unsigned number. All maps are bijections on *all*
patterns, so -0.0 and NaN payloads survive. Spec: ``docs/spec/weight-diff.md``, "Steps".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def _top(words: NDArray[Any]) -> NDArray[Any]:
    """The sign bit in place, other bits zero."""
    top: NDArray[Any] = words & words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
    return top


def to_order(words: NDArray[Any]) -> NDArray[Any]:
    """Rank of each pattern: negative ``~u``, others ``u | sign bit``."""
    one = words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
    ranks: NDArray[Any] = np.where(_top(words) != 0, ~words, words | one)
    return ranks


def from_order(ranks: NDArray[Any]) -> NDArray[Any]:
    """Inverse of :func:`to_order`."""
    words: NDArray[Any] = np.where(_top(ranks) != 0, ranks ^ _top(ranks), ~ranks)
    return words


def fold(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """Folded steps minus one, of the words' own unsigned type; ``old != new`` everywhere."""
    step = to_order(new) - to_order(old)
    step = np.where(_top(old) != 0, -step, step)
    signed = step.view(_signed(step))
    zigzag = (step << step.dtype.type(1)) ^ (signed >> (8 * step.dtype.itemsize - 1)).view(step.dtype)
    folded: NDArray[Any] = zigzag - step.dtype.type(1)
    return folded


def unfold(old: NDArray[Any], folded: NDArray[Any]) -> NDArray[Any]:
    """The new patterns; inverse of :func:`fold` given ``old``."""
    one = folded.dtype.type(1)
    zigzag = folded + one
    step = (zigzag >> one) ^ (np.zeros_like(zigzag) - (zigzag & one))
    step = np.where(_top(old) != 0, -step, step)
    return from_order(to_order(old) + step)


def rotate_left(words: NDArray[Any]) -> NDArray[Any]:
    """Bits rotated by one, so that the top byte is the exponent and the sign is the lowest bit."""
    one, rest = words.dtype.type(1), words.dtype.type(8 * words.dtype.itemsize - 1)
    rotated: NDArray[Any] = (words << one) | (words >> rest)
    return rotated


def rotate_right(words: NDArray[Any]) -> NDArray[Any]:
    """Inverse of :func:`rotate_left`."""
    one, rest = words.dtype.type(1), words.dtype.type(8 * words.dtype.itemsize - 1)
    rotated: NDArray[Any] = (words >> one) | (words << rest)
    return rotated


def _signed(words: NDArray[Any]) -> np.dtype[Any]:
    return np.dtype(f"<i{words.dtype.itemsize}")
