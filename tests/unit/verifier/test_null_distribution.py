"""Levels are tolerance limits: later honest values exceed them no oftener than stated."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import numpy as np
import pytest

from protocol.calibration import Calibration
from protocol.statistics import RolloutStatistics, score, state_scores
from verifier.null_distribution import levels_of, most_exceedances, strata_of


def test_exceedances_are_the_binomial_quantile():
    assert most_exceedances(10, 0.5, 1 / 1024) == 0  # P(no success) is exactly that
    assert most_exceedances(10, 0.5, 0.9 / 1024) is None
    assert most_exceedances(10, 0.5, 11.5 / 1024) == 1
    assert most_exceedances(100_000, 0.5, 1e-4) in range(49_300, 49_500)


def test_levels_are_held_by_fresh_honest_values_in_nearly_every_calibration():
    rng = random.Random(3)
    broken = 0
    for _ in range(200):
        levels = levels_of([round(1e6 * rng.expovariate(1)) for _ in range(400)], doubt=0.01)
        assert levels == sorted(levels)
        # the true chance of exceeding x is exp(-x)
        broken += any(2.718281828459045 ** (-level / 1e6) > 2.0 ** -(j + 1) for j, level in enumerate(levels))
    assert broken <= 200 * 0.01 * len(levels) + 6


def test_levels_of_alike_rollouts_are_broken_and_those_of_one_per_prompt_hold():
    """Why a calibration takes one rollout of each prompt: clustered ones only look like many."""
    rng = np.random.default_rng(6)
    broken = {"all": 0, "one": 0}
    for _ in range(100):
        prompt, own = rng.standard_normal((300, 1)), rng.standard_normal((300, 8))
        values = np.round(1e6 * (math.sqrt(0.9) * prompt + math.sqrt(0.1) * own)).astype(int)
        for name, taken in (("all", values.ravel()), ("one", values[:, 0])):
            levels = levels_of(taken.tolist(), doubt=1e-3)
            tails = [1 - NormalDist().cdf(level / 1e6) for level in levels]
            broken[name] += any(tail > 2.0 ** -(j + 1) for j, tail in enumerate(tails))
    assert broken["one"] <= 2
    assert broken["all"] > 10


@pytest.mark.parametrize(("n", "most"), [(5, 0), (40, 3), (3_000, 9)])
def test_a_small_sample_supports_few_levels(n, most):
    assert len(levels_of(list(range(n)), doubt=1e-3)) <= most


def test_ties_never_make_a_level_too_low():
    levels = levels_of([7] * 1000, doubt=1e-3)
    assert set(levels) == {7}  # exceeded by nobody


def _rollout(rng: random.Random, tokens: int, shift: float = 0.0) -> RolloutStatistics:
    spread = tokens**-0.5
    return RolloutStatistics(
        0, tokens, rng.gauss(-15 + shift, spread), rng.gauss(1e-6, 1e-6 * spread), abs(rng.gauss(0, 1e-7))
    )


def test_rollouts_fall_into_strata_of_their_length():
    rng = random.Random(4)
    rollouts = [_rollout(rng, tokens) for tokens in [20] * 400 + [90] * 350 + [200] * 100]
    strata = strata_of(rollouts)
    assert [(stratum.min_tokens, stratum.rollouts) for stratum in strata] == [(8, 400), (32, 450)]
    assert strata[0].log_kl_milli[-1] > strata[1].log_kl_milli[-1]  # short rollouts scatter more
    assert strata_of(rollouts[:200]) == []


def test_honest_evidence_has_no_trend_and_a_shift_is_found():
    rng = random.Random(5)
    strata = strata_of([_rollout(rng, 64) for _ in range(3_000)])
    calibration = Calibration(verifier_profile="v", confidence_ppm=990_000, strata=strata)
    honest = [score(_rollout(rng, 64), calibration).llr_milli for _ in range(4_000)]
    assert sum(2.718281828459045 ** (llr / 1000) for llr in honest) / len(honest) <= 1
    shifted = [score(_rollout(rng, 64, shift=0.3), calibration).llr_milli for _ in range(200)]
    assert sum(shifted) / len(shifted) > 500
    assert max(honest) <= 1000 * max(state_scores(len(strata[0].log_kl_milli)))
