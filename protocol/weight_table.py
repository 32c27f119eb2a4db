"""Code -> integer weight: the table that turns committed codes into the sampling distribution.

``W[c] = max(1, floor(2^48 exp(-c / steps_per_nat)))`` and ``W[EMPTY_TAIL] = 0``, evaluated with integers only.
Spec: ``docs/spec/sampler.md``, "Weights".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.rollout import EMPTY_TAIL

#: Weight of code 0 (probability one). 256 of them stay below 2^63 and each is exact in float64.
ONE_BITS: Final = 48
_PRECISION: Final = 256  #: fractional bits of the evaluation; its error stays below 2^-230


@lru_cache(maxsize=8)
def weight_table(steps_per_nat: int) -> NDArray[np.uint64]:
    """(65536,) read-only weights of all codes, by fixed-point arithmetic on big integers."""
    table = np.ones(EMPTY_TAIL + 1, dtype=np.uint64)
    ratio = _exp_minus(steps_per_nat)
    value = 1 << _PRECISION
    for code in range(EMPTY_TAIL):
        weight = value >> (_PRECISION - ONE_BITS)
        if weight <= 1:
            break
        table[code] = weight
        value = (value * ratio) >> _PRECISION
    table[EMPTY_TAIL] = 0
    table.flags.writeable = False
    return table


@lru_cache(maxsize=8)
def log_weights(steps_per_nat: int) -> NDArray[np.float64]:
    """(65536,) read-only ln W of all codes in nats; -inf for ``EMPTY_TAIL``."""
    logs = np.full(EMPTY_TAIL + 1, -math.inf)
    logs[:EMPTY_TAIL] = np.log(weight_table(steps_per_nat)[:EMPTY_TAIL].astype(np.float64))
    logs.flags.writeable = False
    return logs


@lru_cache(maxsize=8)
def float_weights(steps_per_nat: int) -> NDArray[np.float64]:
    """(65536,) read-only weights as float64; exact, since every weight is at most 2^48."""
    weights = weight_table(steps_per_nat).astype(np.float64)
    weights.flags.writeable = False
    return weights


def exp_minus_powers(steps_per_nat: int, count: int) -> tuple[int, list[int]]:
    """(one, [exp(-c / steps_per_nat) for c < count]) in fixed point: divide by ``one``."""
    one = value = 1 << _PRECISION
    ratio, powers = _exp_minus(steps_per_nat), []
    for _ in range(count):
        powers.append(value)
        value = (value * ratio) >> _PRECISION
    return one, powers


def _exp_minus(steps_per_nat: int) -> int:
    """exp(-1 / steps_per_nat) as a fixed-point integer: the reciprocal of the series of exp(1 / steps_per_nat)."""
    term = total = 1 << _PRECISION
    n = 1
    while term:
        term //= steps_per_nat * n
        total += term
        n += 1
    return (1 << (2 * _PRECISION)) // total
