"""Advantages of a batch's completions from their rewards, group by group.

r_i is the reward of sample i of a prompt, G the number of samples. With every estimator but ``reinforce``, equal
rewards give advantages that are exactly zero: there is nothing to learn from such a group (DAPO, arXiv 2503.14476,
filters it).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.config import AdvantageConfig

_MICRO = 1e-6


def batch_advantages(rewards_micro: list[list[int]], config: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Advantages of each group for its rewards in 1e-6.

    ``reinforce``: r_i - mean of the whole batch (Williams 1992, with the batch mean as baseline); a group's equal
    rewards then do carry a signal, unless the filter has removed the group. All others: ``group_advantages``.
    """
    if config.estimator != "reinforce":
        return [group_advantages(group, config) for group in rewards_micro]
    everything = [reward for group in rewards_micro for reward in group]
    if not has_signal(everything):
        return [np.zeros(len(group)) for group in rewards_micro]
    mean = float(np.mean(np.asarray(everything, dtype=np.float64))) * _MICRO
    return [np.asarray(group, dtype=np.float64) * _MICRO - mean for group in rewards_micro]


def group_advantages(rewards_micro: list[int], config: AdvantageConfig) -> NDArray[np.float64]:
    """(G,) advantages for (G,) rewards in 1e-6.

    * ``grpo``: (r_i - mean) / (std + floor) with the population standard deviation (DeepSeekMath, arXiv 2402.03300).
    * ``grpo_mean`` and ``dr_grpo``: r_i - mean. Dr. GRPO (arXiv 2503.20783) pairs it with ``aggregation = constant``.
    * ``rloo``: r_i - mean of the others (arXiv 2402.14740); a group of one has nothing to compare with and gets 0.
    """
    if not has_signal(rewards_micro):
        return np.zeros(len(rewards_micro))
    rewards = np.asarray(rewards_micro, dtype=np.float64) * _MICRO
    centred: NDArray[np.float64] = rewards - rewards.mean()
    if config.estimator == "grpo":
        centred /= rewards.std() + config.std_floor
    elif config.estimator == "rloo":
        centred *= len(rewards) / (len(rewards) - 1)
    return centred


def has_signal(rewards_micro: list[int]) -> bool:
    """Whether a group's rewards differ at all."""
    return len(set(rewards_micro)) > 1
