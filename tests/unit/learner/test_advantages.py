from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import group_advantages, has_signal
from learner.config import AdvantageConfig

ESTIMATORS = ["grpo", "grpo_mean", "rloo", "dr_grpo"]


def advantages(rewards: list[float], estimator: str) -> list[float]:
    config = AdvantageConfig(estimator=estimator, std_floor=1e-12)
    return group_advantages([round(r * 1e6) for r in rewards], config).tolist()


def test_hand_computed():
    rewards = [1.0, 0.0, 0.0, 1.0]
    assert advantages(rewards, "grpo") == pytest.approx([1, -1, -1, 1])
    assert advantages(rewards, "grpo_mean") == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert advantages(rewards, "dr_grpo") == advantages(rewards, "grpo_mean")
    assert advantages(rewards, "rloo") == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert advantages([3.0, 0.0], "rloo") == pytest.approx([3, -3])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 8, [-1.0] * 3])
def test_no_signal_is_exactly_zero(estimator, rewards):
    assert advantages(rewards, estimator) == [0.0] * len(rewards)
    assert not has_signal([round(r * 1e6) for r in rewards])


@given(
    st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=20), st.sampled_from(ESTIMATORS)
)
def test_finite_centred_and_in_the_order_of_rewards(rewards, estimator):
    got = group_advantages(rewards, AdvantageConfig(estimator=estimator))
    assert np.isfinite(got).all()
    assert abs(got.sum()) <= 1e-9 * max(1.0, np.abs(got).max()) * len(got)
    best, worst = int(np.argmax(rewards)), int(np.argmin(rewards))
    assert got[best] >= got[worst]
