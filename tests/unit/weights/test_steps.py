"""Steps: bijections on every bit pattern, and the order of the numbers they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.weights.steps import fold, from_order, rotate_left, rotate_right, to_order, unfold

ALL = np.arange(65_536, dtype="<u2")
#: +-0, smallest and largest subnormals and normals, +-1, +-infinity, quiet and signalling NaNs of both signs
SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0,
     0xFFC0, 0x7FFF, 0xFFFF], "<u2",
)


def test_order_is_a_bijection_that_sorts_by_value() -> None:
    ranks = to_order(ALL)
    assert len(np.unique(ranks)) == 65_536
    assert (from_order(ranks) == ALL).all()
    values = (ALL.astype("<u4") << 16).view("<f4")
    finite = np.isfinite(values)
    order = np.argsort(ranks[finite])
    assert (np.diff(values[finite][order].astype(np.float64)) >= 0).all()


def test_zeros_are_neighbours_and_nans_are_at_the_ends() -> None:
    minus, plus = (int(r) for r in to_order(np.array([0x8000, 0x0000], "<u2")))
    assert plus == minus + 1
    assert int(to_order(np.array([0xFFFF], "<u2"))[0]) == 0
    assert int(to_order(np.array([0x7FFF], "<u2"))[0]) == 0xFFFF


@pytest.mark.parametrize("old", SPECIAL.tolist())
def test_fold_inverts_from_special_patterns_to_all(old: int) -> None:
    new = ALL[old != ALL]
    olds = np.full(len(new), old, "<u2")
    folded = fold(olds, new)
    assert len(np.unique(folded)) == len(new)
    assert folded.max() <= 0xFFFE
    assert (unfold(olds, folded) == new).all()


def test_fold_inverts_on_sampled_pairs(rng: np.random.Generator) -> None:
    old, new = rng.integers(0, 65_536, (2, 2_000_000), dtype=np.uint16)
    old, new = old[old != new], new[old != new]
    assert (unfold(old, fold(old, new)) == new).all()


def test_fold_inverts_on_32_bit_patterns(rng: np.random.Generator) -> None:
    special = (SPECIAL.astype("<u4") << 16) | np.uint32(1)
    old = np.concatenate([rng.integers(0, 2**32, 200_000, dtype=np.uint32), np.repeat(special, len(special))])
    new = np.concatenate([rng.integers(0, 2**32, 200_000, dtype=np.uint32), np.tile(special, len(special))])
    old, new = old[old != new], new[old != new]
    assert (unfold(old, fold(old, new)) == new).all()


@pytest.mark.parametrize(("old", "new"), [(0x3F80, 0x3F81), (0xBF80, 0xBF81)])
def test_steps_away_from_zero_look_the_same_on_both_sides(old: int, new: int) -> None:
    away = fold(np.array([old], "<u2"), np.array([new], "<u2"))
    back = fold(np.array([new], "<u2"), np.array([old], "<u2"))
    assert (int(away[0]), int(back[0])) == (1, 0)


def test_rotation_brings_the_exponent_to_the_top_byte() -> None:
    assert int(rotate_left(np.array([0x3F80], "<u2"))[0]) == 0x7F00
    assert (rotate_right(rotate_left(ALL)) == ALL).all()
    wide = np.arange(0, 2**32, 65_537, dtype="<u4")
    assert (rotate_right(rotate_left(wide)) == wide).all()
