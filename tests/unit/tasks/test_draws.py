from collections import Counter

import pytest

from protocol.tasks.draws import Draws


def test_a_stream_is_named_by_its_strings() -> None:
    def stream(*names: str) -> list[int]:
        draws = Draws(*names)
        return [draws.below(1000) for _ in range(8)]

    assert stream("a", "b") == stream("a", "b")
    assert stream("a", "b") != stream("ab")
    assert stream("a", "b") != stream("b", "a")


def test_the_stream_never_changes() -> None:
    draws = Draws("frozen")
    assert [draws.below(10) for _ in range(6)] == [5, 0, 7, 8, 4, 0]


def test_draws_are_uniform() -> None:
    draws = Draws("uniform")
    counts = Counter(draws.below(7) for _ in range(7000))
    chi2 = sum((counts[k] - 1000) ** 2 / 1000 for k in range(7))
    assert chi2 < 22.5  # 6 degrees of freedom, p = 0.001


def test_samples_have_no_repeats_and_every_order() -> None:
    draws = Draws("orders")
    orders = Counter(tuple(draws.sample("abc", 3)) for _ in range(600))
    assert len(orders) == 6
    assert all(60 < count < 140 for count in orders.values())


@pytest.mark.parametrize("bound", [0, -1, 2**32 + 1])
def test_impossible_bounds_are_our_own_bug(bound: int) -> None:
    with pytest.raises(ValueError, match="bound"):
        Draws("x").below(bound)
