"""Folded steps (see ``steps``) inside numba kernels, one word at a time."""

from __future__ import annotations

import numpy as np

from protocol.jit import inlined

_U0, _U1 = np.uint64(0), np.uint64(1)


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
def fold(old: np.uint64, new: np.uint64, top: np.uint64) -> np.uint64:
    """The folded step from one pattern to another."""
    sign = _sign(old, top)
    step = ((_rank(new, top) - _rank(old, top)) ^ sign) - sign
    return ((step << _U1) ^ _sign(step, top)) - _U1


@inlined
def unfold(old: np.uint64, folded: np.uint64, top: np.uint64) -> np.uint64:
    """The pattern that a folded step leads to."""
    sign, zigzag = _sign(old, top), (folded + _U1) & ((top << _U1) - _U1)
    step = (((zigzag >> _U1) ^ (_U0 - (zigzag & _U1))) ^ sign) - sign
    rank = _rank(old, top) + step
    return rank ^ (~_sign(rank, top) | top)
