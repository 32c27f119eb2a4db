"""What a token's age does to it, and what the bound on age costs.

The lag of a token is the learner's version minus the version that sampled it. The run manifest bounds it
(``max_lag_versions``), so the bound is the same after every restart. Dropping what came too late biases the data to
short and easy tasks, because long rollouts take longer: what is dropped is counted by task and by length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from learner.config import StalenessConfig


def lag_weights(lag_T: NDArray[np.int64], config: StalenessConfig) -> NDArray[np.float64]:
    """(T,) factor of each token's signal: decay^lag with policy ``decay``, else 1."""
    if config.policy != "decay":
        return np.ones(len(lag_T))
    weights: NDArray[np.float64] = config.decay ** lag_T.astype(np.float64)
    return weights


def length_bucket(tokens: int) -> str:
    """Lengths by powers of two: ``1``, ``2-3``, ``4-7``, ..."""
    low = 1 << (max(1, tokens).bit_length() - 1)
    return str(low) if low == 1 else f"{low}-{2 * low - 1}"


@dataclass
class DroppedTokens:
    """Tokens that came too late to be trained on, since the process started."""

    by_task: Counter[str] = field(default_factory=Counter)
    by_length: Counter[str] = field(default_factory=Counter)

    def add(self, task: str, lengths: list[int]) -> None:
        """Count the rollouts of one group, given their lengths in tokens."""
        for tokens in lengths:
            self.by_task[task] += tokens
            self.by_length[length_bucket(tokens)] += tokens

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.by_task.total()
