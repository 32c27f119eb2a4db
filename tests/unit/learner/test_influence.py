from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.influence import share_factors


def kept(shares: dict[str, float], bound: float) -> dict[str, float]:
    factors = share_factors(shares, bound)
    values = {node: shares[node] * factors[node] for node in shares}
    total = sum(values.values())
    return {node: value / total for node, value in values.items()} if total else values


def test_by_hand():
    assert share_factors({"a": 0.8, "b": 0.1, "c": 0.1}, 0.5) == pytest.approx({"a": 0.25, "b": 1, "c": 1})
    assert kept({"a": 0.5, "b": 0.3, "c": 0.1, "d": 0.1}, 0.3) == pytest.approx(
        {"a": 0.3, "b": 0.3, "c": 0.2, "d": 0.2})
    assert share_factors({"a": 0.6, "b": 0.4}, 0.7) == {"a": 1.0, "b": 1.0}


def test_a_lone_node_and_silence_are_left_alone():
    assert share_factors({"a": 1.0}, 0.1) == {"a": 1.0}
    assert share_factors({"a": 0.0, "b": 0.0}, 0.5) == {"a": 1.0, "b": 1.0}
    assert share_factors({}, 0.5) == {}


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_nobody_exceeds_the_bound_nor_gains(values, bound):
    shares = {str(i): v for i, v in enumerate(values)}
    factors = share_factors(shares, bound)
    assert all(0.0 < f <= 1.0 for f in factors.values())
    active = sum(v > 0 for v in values)
    if active:
        assert max(kept(shares, bound).values()) <= max(bound, 1 / active) * (1 + 1e-6)
    ordered = sorted(shares, key=shares.__getitem__)
    assert all(shares[a] * factors[a] <= shares[b] * factors[b] * (1 + 1e-9) for a, b in pairwise(ordered))
