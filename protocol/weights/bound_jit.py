"""The one hot loop of ``bound``, compiled: how many words there are of each exponent. Same results as in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, types, uint16, uint32
from numpy.typing import NDArray

from protocol.jit import kernel, read_only

_LANES = 4  #: tables in turn, so that equal neighbours do not wait for each other
_EXPONENTS = np.uint32(0xFF)


@kernel(*(types.void(read_only(words), uint32, int64[::1]) for words in (uint16, uint32)))
def count(words_N: NDArray[Any], shift: np.uint32, counts_K: NDArray[np.int64]) -> None:
    """Add the number of words of each key, 8 bits from ``shift`` up, to ``counts_K``."""
    lanes_LK = np.zeros((_LANES, 256), np.int64)
    whole = len(words_N) // _LANES * _LANES
    for i in range(0, whole, _LANES):
        for lane in range(_LANES):
            lanes_LK[lane, (np.uint32(words_N[i + lane]) >> shift) & _EXPONENTS] += 1
    for i in range(whole, len(words_N)):
        lanes_LK[0, (np.uint32(words_N[i]) >> shift) & _EXPONENTS] += 1
    for lane in range(_LANES):
        for key in range(256):
            counts_K[key] += lanes_LK[lane, key]
