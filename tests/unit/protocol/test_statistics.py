"""Scores are e-values, sums have a floor, and the alarm keeps its bound."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import statistics
from protocol.calibration import Calibration, Stratum
from protocol.messages import AuditPolicy
from protocol.statistics import (
    MAX_SCORE,
    MIN_SCORE,
    RolloutStatistics,
    advance,
    alarm_milli,
    bundle_milli,
    length_milli,
    luck_milli,
    score,
    state_scores,
)


def stratum(min_tokens: int = 8, levels: int = 4) -> Stratum:
    return Stratum(
        min_tokens=min_tokens, rollouts=1000, log_kl_milli=[-9000 + 100 * j for j in range(levels)],
        bias_centre_nano=50, bias_nano=[100 * (j + 1) for j in range(levels)],
        margin_nano=[10 * (j + 1) for j in range(levels)],
    )


CALIBRATION = Calibration(verifier_profile="v", confidence_ppm=990_000, strata=[stratum(), stratum(64, 8)])


def rollout(tokens: int = 20, log_kl: float = -20.0, bias: float = 5e-8, margin: float = 0.0) -> RolloutStatistics:
    return RolloutStatistics(3, tokens, log_kl, bias, margin)


@pytest.mark.parametrize("levels", range(13))
def test_scores_ascend_within_their_range_and_have_expectation_one(levels: int) -> None:
    scores, chances = state_scores(levels), statistics.state_chances(levels)
    assert sum(chances) == 1
    assert list(scores) == sorted(scores)
    assert all(MIN_SCORE <= s <= MAX_SCORE for s in scores)
    expectation = sum(p * math.exp(s) for p, s in zip(chances, scores, strict=True))
    assert expectation <= 1
    assert expectation > 0.999  # and nothing is given away


def test_levels_that_are_exceeded_less_often_lower_the_expectation() -> None:
    scores = state_scores(8)
    rng = random.Random(1)
    for _ in range(200):
        tails = [1.0]
        for j in range(8):
            tails.append(min(tails[-1], 2.0 ** -(j + 1)) * rng.random())
        masses = [a - b for a, b in zip(tails, [*tails[1:], 0.0], strict=True)]
        assert sum(m * math.exp(s) for m, s in zip(masses, scores, strict=True)) <= 1


def test_no_levels_say_nothing() -> None:
    assert list(state_scores(0)) == pytest.approx([0.0])


def test_each_statistic_speaks_and_two_sides_of_the_bias_do() -> None:
    quiet = score(rollout(), CALIBRATION).llr_milli
    assert quiet == round(1000 * state_scores(4)[0])
    for loud in (rollout(log_kl=-5.0), rollout(bias=1e-3), rollout(bias=-1e-3), rollout(margin=0.5)):
        assert score(loud, CALIBRATION).llr_milli > max(quiet, 0)
    every = score(rollout(log_kl=-5.0, bias=1e-3, margin=0.5), CALIBRATION).llr_milli
    assert every == math.floor(1000 * state_scores(4)[4])


def test_a_rollout_is_compared_with_honest_ones_of_its_length() -> None:
    assert score(rollout(tokens=7, log_kl=9.0), CALIBRATION).llr_milli == 0
    short, long = (score(rollout(tokens=n, log_kl=-5.0), CALIBRATION).llr_milli for n in (63, 64))
    assert short < long  # the long stratum has more levels


def test_wild_values_fit_into_a_message() -> None:
    found = score(rollout(log_kl=math.inf, bias=-math.inf, margin=math.nan), CALIBRATION)
    assert found.llr_milli > 0


@given(st.lists(st.integers(-500, 3_000), min_size=1, max_size=12))
def test_a_bundle_says_the_mean_of_its_rollouts_ratios(scores: list[int]) -> None:
    mean = sum(math.exp(s / 1000) for s in scores) / len(scores)
    assert math.exp(bundle_milli(scores) / 1000) <= mean * (1 + 1e-12)
    assert min(scores) - 1 <= bundle_milli(scores) <= max(scores)
    assert bundle_milli(scores) >= max(-500, math.floor(1000 * math.log(mean)) - 1)


def test_a_bundle_without_scores_says_nothing_and_its_floor_is_that_of_a_rollout() -> None:
    assert bundle_milli([]) == 0
    assert bundle_milli([-500] * 7) == -500


def honest_bundles(
    rng: np.random.Generator, bundles: int, alike: float, size: int = 8, levels: int = 8
) -> np.ndarray:
    """Scores of honest rollouts, 1e-3 nats, (bundles, size): each is fair, those of a bundle have this correlation.

    The three statistics say the same, which is their worst case.
    """
    common, own = rng.standard_normal((bundles, 1)), rng.standard_normal((bundles, size))
    normal = math.sqrt(alike) * common + math.sqrt(1 - alike) * own
    edges = [NormalDist().inv_cdf(1 - 2.0 ** -(j + 1)) for j in range(levels)]
    scores = np.floor(1000 * np.array(state_scores(levels))).astype(int).clip(-500)
    return np.asarray(scores[np.searchsorted(edges, normal)])


def banned(lives: list[list[list[int]]], alarm: int, combine: Callable[[list[int]], int]) -> float:
    """Share of nodes whose sum reaches the alarm."""
    reached = 0
    for life in lives:
        total = 0
        for scores in life:
            total = advance(total, combine(scores), alarm, confirmed=True)
            if total >= alarm:
                reached += 1
                break
    return reached / len(lives)


@pytest.mark.parametrize("alike", [0.0, 0.14, 0.9])
def test_however_alike_the_rollouts_of_a_bundle_are_honest_nodes_stay_below_the_bound(alike: float) -> None:
    rng = np.random.default_rng(7)
    bundles, bound = 125, 0.1
    alarm = math.ceil(1000 * math.log(bundles / bound))
    lives = [honest_bundles(rng, bundles, alike).tolist() for _ in range(400)]
    assert banned(lives, alarm, bundle_milli) <= bound / 2
    if alike > 0.5:
        assert banned(lives, alarm, sum) > 2 * bound  # what a sum over rollouts would do
    ratios = np.exp([bundle_milli(scores) / 1000 for life in lives for scores in life])
    assert ratios.mean() <= 1 + 4 * ratios.std() / math.sqrt(len(ratios))


def test_the_sum_has_a_floor_and_waits_for_the_second_configuration() -> None:
    assert advance(0, -500, 10_000, confirmed=True) == 0
    assert advance(4_000, 3_000, 10_000, confirmed=False) == 5_000
    assert advance(6_000, 3_000, 10_000, confirmed=False) == 6_000
    assert advance(6_000, -500, 10_000, confirmed=False) == 5_500
    assert advance(6_000, 3_000, 10_000, confirmed=True) == 9_000


def test_the_alarm_is_what_the_bound_asks_for() -> None:
    policy = AuditPolicy(life_rollouts=1_000_000, alpha_ppm=1_000)
    assert alarm_milli(policy) == math.ceil(1000 * math.log(1e9))


def test_honest_sums_reach_a_low_alarm_less_often_than_the_bound_says() -> None:
    """P(alarm within n bundles) <= n exp(-alarm), for honest levels that are met exactly."""
    rng = random.Random(5)
    levels, alarm, n, lives = 8, 6_000, 40, 3_000
    scores = [round(1000 * s) for s in state_scores(levels)]
    chances = statistics.state_chances(levels)
    crossed = 0
    for _ in range(lives):
        total = 0
        for draw in rng.choices(scores, chances, k=n):
            total = advance(total, draw, alarm, confirmed=True)
            if total >= alarm:
                crossed += 1
                break
    assert 0 < crossed / lives <= n * math.exp(-alarm / 1000)


# -- luck ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1_000_000), min_size=2, max_size=7), st.data())
def test_however_a_group_is_dealt_the_bet_on_luck_is_fair(rewards: list[int], data: st.DataObject) -> None:
    """The expectation over all ways to deal the samples is 1, less what rounding down costs (at most 1e-3 nats)."""
    own = data.draw(st.integers(1, len(rewards) - 1))
    bets = [
        math.exp(luck_milli([rewards[i] for i in hand], [r for i, r in enumerate(rewards) if i not in hand]) / 1000)
        for hand in combinations(range(len(rewards)), own)
    ]
    assert 0.998 <= sum(bets) / len(bets) <= 1 + 1e-12


def test_luck_needs_peers_and_differences() -> None:
    assert luck_milli([5], []) == luck_milli([], [5]) == luck_milli([5, 5], [5]) == 0
    assert luck_milli([9], [3]) == math.floor(1000 * math.log(1.5))
    assert luck_milli([3], [9]) == math.floor(1000 * math.log(0.5))
    assert luck_milli([1, 0], [0, 0]) == math.floor(1000 * math.log(1.25))


def test_length_is_weighed_like_luck() -> None:
    assert length_milli((8, 1), (0, 0), 8) == length_milli((0, 0), (8, 1), 8) == length_milli((8, 2), (4, 1), 8) == 0
    assert length_milli((8, 1), (4, 1), 8) == math.floor(1000 * math.log(1.25))
    assert length_milli((4, 1), (16, 2), 8) == math.floor(1000 * math.log(0.75))


def test_honest_luck_reaches_a_low_level_less_often_than_the_bound_says() -> None:
    rng = np.random.default_rng(3)
    level, groups, lives = math.ceil(1000 * math.log(200 / 0.2)), 200, 400
    reached = 0
    for _ in range(lives):
        total = 0
        for rewards in rng.random((groups, 8)) < rng.random((groups, 1)):
            total = max(0, total + luck_milli(rewards[:4].tolist(), rewards[4:].tolist()))
            if total >= level:
                reached += 1
                break
    assert reached <= 0.2 * lives
