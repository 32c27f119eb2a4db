"""The age-aware cap and its controller: how far a ratio is believed at each lag.

C(lag) = 1 + (C0 - 1) gamma^lag t(bucket). Buckets are lags 0, 1, 2-3, 4-7, 8-15, ...; t starts at 1, shrinks when the
effective sample size of the weights used in its bucket falls below the target, and comes back slowly.
ESS = (sum w)^2 / (n sum w^2): the share of the tokens that carry the step (Kong 1992). After VCPO (arXiv 2602.17616)
the learning rate of Adam is scaled by sqrt(min(1, ESS / ESS_base)): the noise of the step grows as 1 / sqrt(ESS).

Everything is a function of sums that add up over ranks, so every rank moves its controller alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

#: Lags from 2^(BUCKETS - 2) on share the last bucket.
BUCKETS: Final = 12
#: Fewer tokens than this say nothing about their bucket.
ENOUGH_TOKENS: Final = 64
#: Factors of one step: tighten quickly, relax slowly (35 steps to undo one tightening).
TIGHTEN: Final = 0.7
RELAX: Final = 1.01
#: t never falls below this: a cap of exactly 1 could not be told from a unit weight.
LEAST: Final = 1e-3


def bucket_of(lag_N: Tensor) -> Tensor:
    """Bucket of each lag (int64): 0, 1, then one per power of two."""
    exponent_N = torch.log2(lag_N.clamp(min=1).to(torch.float64) + 0.5).floor().to(torch.int64)
    return torch.where(lag_N <= 0, 0, (exponent_N + 1).clamp(max=BUCKETS - 1))


def bucket_name(bucket: int) -> str:
    """The lags of a bucket: ``0``, ``1``, ``2-3``, ..., ``1024+``."""
    if bucket <= 1:
        return str(bucket)
    low = 1 << (bucket - 1)
    return f"{low}+" if bucket == BUCKETS - 1 else f"{low}-{2 * low - 1}"


def weight_sums(weight_N: Tensor, lag_N: Tensor) -> Tensor:
    """(BUCKETS, 3) float64: number, sum and sum of squares of the weights in each bucket. Adds up over ranks."""
    weight_N = weight_N.double()
    columns_N3 = torch.stack([torch.ones_like(weight_N), weight_N, weight_N.square()], dim=1)
    sums = torch.zeros(BUCKETS, 3, dtype=torch.float64, device=weight_N.device)
    return sums.index_add_(0, bucket_of(lag_N), columns_N3).cpu()


def ess(sums_3: Tensor) -> float:
    """Effective sample size, 0 to 1, of (number, sum, sum of squares); 1 where there is nothing."""
    number, total, squares = sums_3.tolist()
    return 1.0 if number == 0 else 0.0 if squares == 0 else total * total / (number * squares)


def rate_scale(effective: float, base: float) -> float:
    """Factor of the learning rate, sqrt(min(1, ESS / ESS_base)); 1 with ``base`` 0."""
    return 1.0 if base == 0 else math.sqrt(min(1.0, effective / base))


@dataclass
class CapController:
    """The state of the caps. Two controllers that saw the same sums are the same."""

    target: float  #: ESS to keep; 0 turns the controller off
    tightness: list[float] = field(default_factory=lambda: [1.0] * BUCKETS)  #: t of each bucket

    def caps(self, lag_N: Tensor, cap: float, decay: float) -> Tensor:
        """C(lag) of each token, float32."""
        tightness_B = torch.tensor(self.tightness, dtype=torch.float32, device=lag_N.device)
        aged_N = torch.pow(decay, lag_N.to(torch.float32))
        return 1.0 + (cap - 1.0) * aged_N * tightness_B[bucket_of(lag_N)]

    def observe(self, sums_B3: Tensor) -> None:
        """Move by what a step's weights were (``weight_sums`` over all ranks)."""
        for bucket, sums_3 in enumerate(sums_B3):
            if self.target > 0 and float(sums_3[0]) >= ENOUGH_TOKENS:
                factor = TIGHTEN if ess(sums_3) < self.target else RELAX
                self.tightness[bucket] = min(1.0, max(LEAST, self.tightness[bucket] * factor))

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes."""
        return {"tightness": list(self.tightness)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state; floats survive unchanged."""
        self.tightness = [float(value) for value in state["tightness"]]
