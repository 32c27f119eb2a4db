"""Scores of recomputed rollouts: their statistics next to what the run's calibration says of honest ones.

Pure. What a score is: ``protocol.statistics``. The coordinator sums them up per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.calibration import Calibration, RolloutScore
from protocol.statistics import score
from verifier.divergence import Residuals

#: Configuration of the T2 reference (``verifier.model_shelf``). A calibration made for another one is left alone.
T2_PROFILE: Final = "torch-fp32-sdpa"


def weigh(residuals: Sequence[Residuals], calibration: Calibration) -> list[RolloutScore]:
    """Score of each rollout, in their order."""
    return [score(rollout.statistics, calibration) for rollout in residuals]


def confirmed(first: Sequence[RolloutScore], second: Sequence[RolloutScore]) -> list[RolloutScore]:
    """What two configurations agree on: of each rollout the score that speaks less against the node.

    The smaller of two e-values is an e-value if one of them is, so the second configuration needs no calibration.
    """
    pairs = zip(first, second, strict=True)
    return [min(pair, key=lambda rollout: rollout.llr_milli) for pair in pairs]
