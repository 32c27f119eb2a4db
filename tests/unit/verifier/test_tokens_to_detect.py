"""The rule of ``benchmarks/detection_power.py``, on rollouts whose answer is known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from benchmarks.tokens_to_detect import FALSE_ALARM, NEVER, POWER, Needed, by_limits, by_sum, fewest


def rollouts(rng: random.Random, chance: float, count: int = 200, length: int = 96) -> list[np.ndarray]:
    return [np.array([rng.random() < chance for _ in range(length)]) for _ in range(count)]


def in_one_place(places: list[int | None], length: int = 96) -> list[np.ndarray]:
    return [np.arange(length) == (-1 if place is None else place) for place in places]


@pytest.mark.parametrize("chance", [0.08, 0.2, 0.6])
def test_a_steady_chance_needs_what_the_geometric_law_says(chance):
    found = by_limits(rollouts(random.Random(1), chance))
    assert not found.extrapolated
    assert found.tokens == pytest.approx(math.log(1 - POWER) / math.log(1 - chance), rel=0.1, abs=1)


def test_a_chance_too_small_for_one_rollout_is_extrapolated():
    found = by_limits(rollouts(random.Random(2), 0.01, count=400))
    assert found.extrapolated
    assert found.tokens == pytest.approx(math.log(1 - POWER) / math.log(1 - 0.01), rel=0.15)


def test_a_cheat_in_one_place_needs_the_rollout_up_to_it():
    assert by_limits(in_one_place([90, 93, 94, 91]), once=True) == Needed(95)
    rare = by_limits(in_one_place([90, None, None, None]), once=True)
    assert rare == Needed(math.ceil(math.log(0.01) / math.log(0.75)) * 96, True)
    assert by_limits(in_one_place([None, None]), once=True) == NEVER


def test_a_chance_that_comes_in_runs_needs_more_than_a_steady_one():
    beyond = [np.arange(96) % 48 < 12 for _ in range(50)]  # a quarter of all units, but 36 in a row without
    assert by_limits(beyond) == Needed(37)
    spared = [np.full(96, number % 2 == 0) for number in range(50)]  # half of the rollouts show nothing at all
    found = by_limits(spared)
    assert found.extrapolated
    assert found.tokens == pytest.approx(96 * math.log(0.01) / math.log(0.5), rel=0.03)


def test_pieces_count_in_tokens():
    assert by_limits([np.ones(3, bool)] * 40, unit=32) == Needed(32)
    assert by_limits(in_one_place([2, 2, 2], length=3), unit=32, once=True) == Needed(96)


@pytest.mark.parametrize("distance", [0.5, 2.0, 20.0])
def test_a_sum_has_the_stated_power_and_false_alarm(distance):
    rng = np.random.default_rng(3)
    honest, cheat = rng.normal(0, 1, 4_000), rng.normal(distance, 1, 4_000)
    found = by_sum(honest.tolist(), cheat.tolist(), 1)
    assert found.tokens is not None
    n = found.tokens
    threshold = 3.719 / math.sqrt(n)  # the mean of n honest ones is above it with a chance of 1e-4
    assert FALSE_ALARM == 1e-4
    means = rng.normal(distance, 1 / math.sqrt(n), 100_000)
    assert (means > threshold).mean() >= 0.985
    if n > 1:
        fewer = rng.normal(distance, 1 / math.sqrt(n - 1), 100_000)
        assert (fewer > 3.719 / math.sqrt(n - 1)).mean() < 0.995


def test_what_chance_explains_is_never_detected():
    rng = np.random.default_rng(4)
    honest, cheat = rng.normal(0, 1, 48).tolist(), rng.normal(0.1, 1, 16).tolist()
    assert by_sum(honest, cheat, 96) == NEVER
    assert by_sum([], cheat, 96) == NEVER


def test_the_fewest_count_and_measured_ones_win_ties():
    assert fewest(NEVER, Needed(40, True), Needed(40), Needed(50)) == Needed(40)
    assert fewest(NEVER, NEVER) == NEVER
    assert Needed(5).not_more_than(NEVER)
    assert not NEVER.not_more_than(Needed(5))
    assert (str(NEVER), str(Needed(5)), str(Needed(5, True))) == ("never", "5", "~5")
