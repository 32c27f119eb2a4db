"""Weights against an independent evaluation with decimals."""

from decimal import Decimal, getcontext

import numpy as np
import pytest

from protocol.rollout import EMPTY_TAIL
from protocol.weight_table import float_weights, log_weights, weight_table


@pytest.mark.parametrize("steps", [16, 1000, 1024, 4096])
def test_weights_are_the_floor_of_the_exponential(steps):
    getcontext().prec = 60
    table = weight_table(steps)
    for code in [*range(5), *range(5, EMPTY_TAIL, 997), EMPTY_TAIL - 1]:
        exact = int(Decimal(2**48) * (-Decimal(code) / steps).exp())
        assert int(table[code]) == max(1, exact), code
    assert table[0] == 2**48
    assert table[EMPTY_TAIL] == 0


@pytest.mark.parametrize("steps", [16, 1024])
def test_weights_fall_and_never_vanish(steps):
    table = weight_table(steps)[:EMPTY_TAIL]
    assert np.all(np.diff(table.astype(np.int64)) <= 0)
    assert table.min() == 1


def test_forms_agree_and_are_read_only():
    table = weight_table(1024)
    assert np.array_equal(float_weights(1024).astype(np.uint64), table)
    assert np.allclose(log_weights(1024)[:1000], np.log(table[:1000].astype(float)))
    assert log_weights(1024)[EMPTY_TAIL] == -np.inf
    for array in (table, float_weights(1024), log_weights(1024)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
