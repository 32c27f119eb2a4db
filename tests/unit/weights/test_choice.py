"""Which classes a segment gets: compiled and in numpy the same, and those that pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.weights import choice, classes, kernels
from protocol.weights.classes import MAX_CLASSES


@pytest.fixture(params=[choice.choose, kernels.choose], ids=["numpy", "compiled"])
def choose(request: pytest.FixtureRequest) -> Any:
    assert kernels.compiled() is not None
    return request.param


def test_chosen_classes_follow_the_exponent(rng: np.random.Generator, choose: Any) -> None:
    """Small weights all change, large ones never: the border is where classes part."""
    old = rng.integers(110 << 7, 130 << 7, 50_000).astype("<u2")
    new = np.where(old >> 7 < 117, old + np.uint16(1), old).astype("<u2")
    firsts = choose([old], [new])
    assert firsts[0] == 0
    assert 117 in firsts.tolist()
    assert len(firsts) <= MAX_CLASSES
    changes = kernels.scan([old], [new], firsts)
    assert all(count in {0, n} for count, n in zip(changes.counts, changes.populations, strict=True))


def test_classes_are_few_where_they_do_not_pay(rng: np.random.Generator, choose: Any) -> None:
    old = rng.integers(0, 2**16, 4000).astype("<u2")
    new = old ^ (rng.random(4000) < 0.001).astype("<u2")
    assert len(choose([old], [new])) == 1
    assert choose([old[:100]], [new[:100]]).tolist() == [0]


def test_large_segments_are_sampled(rng: np.random.Generator, choose: Any) -> None:
    n = choice._SAMPLED_WORDS
    old = rng.integers(110 << 7, 130 << 7, n).astype("<u2")
    new = np.where(old >> 7 < 117, old + np.uint16(1), old).astype("<u2")
    assert 117 in choose([old], [new]).tolist()
    assert 117 in choose([old[: n - 5], old[:5]], [new[: n - 5], new[:5]]).tolist()


def _drifted(rng: np.random.Generator, words: str, lengths: list[int]) -> tuple[list[Any], list[Any]]:
    """Weights of several scales, and the same after steps that matter the more the smaller they are."""
    old, new = [], []
    for length in lengths:
        scale = 10.0 ** rng.uniform(-3, 0)
        weights = (rng.normal(size=length) * scale).astype("<f4")
        moved = (weights + 10.0 ** rng.uniform(-6, -3) * rng.standard_t(2, length)).astype("<f4")
        shift = 32 - 8 * np.dtype(words).itemsize
        old.append((weights.view("<u4") >> np.uint32(shift)).astype(words))
        new.append((moved.view("<u4") >> np.uint32(shift)).astype(words))
    return old, new


@pytest.mark.parametrize("words", ["<u2", "<u4"])
@pytest.mark.parametrize("lengths", [[600], [5000, 0, 3], [2**20 + 77], [70_000, 65_536, 2**20, 1000]])
def test_the_kernel_chooses_as_numpy_does(rng: np.random.Generator, words: str, lengths: list[int]) -> None:
    several = 0
    for _ in range(4):
        old, new = _drifted(rng, words, lengths)
        wanted = choice.choose(old, new)
        several += len(wanted) > 1
        assert kernels.choose(old, new).tolist() == wanted.tolist()
    assert several or lengths == [600]  # too few for more than one


@example(1_048_832)
@example(65_552)
@given(st.integers(0, 2**32 - 1) | st.integers(0, 5000) | st.integers(0, 31).map(lambda bit: 2**bit))
def test_logarithms_agree_to_the_last_bit(value: int) -> None:
    compiled = kernels.compiled()
    assert compiled is not None
    [wanted] = choice._xlog2x(np.array([value]))
    assert compiled.choice.xlog2x(value) == wanted
    exact = value * np.log2(value) if value else 0.0
    assert abs(wanted - exact) <= 4.4e-8 * value


def test_the_cheapest_cuts_are_found(rng: np.random.Generator) -> None:
    """Against all ways to cut six groups."""
    costs: NDArray[np.float64] = np.full((6, 7), np.inf)
    for i in range(6):
        costs[i, i + 1 :] = rng.uniform(1, 9, 6 - i)
    ways = [[0, *(k for k in range(1, 6) if cut >> (k - 1) & 1)] for cut in range(32)]
    prices = [sum(costs[a, b] for a, b in zip(way, [*way[1:], 6], strict=True)) for way in ways]
    assert choice._best_cuts(costs) == ways[int(np.argmin(prices))]


def test_cells_count_every_word_and_change(rng: np.random.Generator) -> None:
    old, new = _drifted(rng, "<u2", [3000])
    keys, cells = choice.count_cells(old[0], new[0])
    assert keys.tolist() == np.bincount(classes.keys_of(old[0]), minlength=256).tolist()
    assert cells.sum() == np.count_nonzero(old[0] != new[0])
