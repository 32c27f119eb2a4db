"""The grid of ratio corrections: how a token's gradient is weighted when the sampler q was not the learner p.

One row of the grid says, for the importance ratio r = p / q:

========== ==============================================================================================
level      whose ratio: each token's, or one for the whole sequence (sum or mean of its log-ratios)
statistic  what is compared with the band: the ratio, tv = |p_a - q_a|, or an estimate of KL(q || p):
           k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman, "Approximating KL divergence")
band       [low, high] of the statistic
outside    ``clamp``: the weight at the edge of the band; ``drop``: weight 0
inside     ``ratio``: weight r; ``one``: weight 1
sign       for which advantages the band holds: ``both``, ``positive``, ``negative``, or ``ppo``: only where the
           step would lead further out (r above the band for A > 0, below it for A < 0)
========== ==============================================================================================

Weights carry no gradient. Where a paper writes a clipped surrogate, its gradient is the row given here: for PPO
``min(r A, clip(r) A)`` has the gradient ``r A grad log p`` unless r has left the band on the far side, else 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from learner.config import LossConfig

Level = Literal["token", "sequence_sum", "sequence_mean"]
Statistic = Literal["ratio", "tv", "k1", "k2", "k3"]
Outside = Literal["clamp", "drop"]
Inside = Literal["ratio", "one"]
Sign = Literal["both", "positive", "negative", "ppo"]
Centring = Literal["none", "topk", "exact", "draws", "support"]
Band = tuple[float, float]

ANY: Final[Band] = (0.0, math.inf)


@dataclass(frozen=True)
class Correction:
    """One row of the grid, and the score centring that goes with it.

    Raises:
        ValueError: the fields contradict each other.
    """

    level: Level = "token"
    statistic: Statistic = "ratio"
    band: Band = ANY
    outside: Outside = "clamp"
    inside: Inside = "ratio"
    sign: Sign = "both"
    negative_band: Band | None = None  #: the band for A < 0, when it is another one
    aged: bool = False  #: the high end of the band is C(lag) = 1 + (C0 - 1) gamma^lag, tightened by ``learner.ess``
    per_lag: bool = False  #: the band is raised to the power of the token's lag; no band at lag 0
    second_moment: float | None = None  #: the band is as wide as keeps the batch's mean (log r)^2 below this
    unit_at_lag_0: bool = False  #: w = 1 for tokens of the learner's own version
    centring: Centring = "none"

    def __post_init__(self) -> None:
        for low, high in (self.band, self.negative_band or self.band):
            if not low <= high:
                raise ValueError(f"an empty band [{low}, {high}]")
            if self.statistic in ("tv", "k2", "k3") and low > 0:
                raise ValueError(f"{self.statistic} is never negative: its band starts at 0, not at {low}")
            if self.statistic == "ratio" and low < 0:
                raise ValueError(f"a ratio is never negative: its band cannot start at {low}")
        if self.level != "token" and (self.aged or self.per_lag or self.second_moment is not None):
            raise ValueError("a lag and a second moment are of tokens, not of sequences")
        if self.level != "token" and self.statistic != "ratio" and self.outside == "clamp":
            raise ValueError("a sequence outside a band of tv, k1, k2 or k3 can only be dropped")
        if (self.aged or self.per_lag or self.second_moment is not None) and self.statistic != "ratio":
            raise ValueError("a band that moves is a band of the ratio")

    def bands(self) -> tuple[Band, Band]:
        """The bands of the statistic for A > 0 and for A < 0, after ``sign``."""
        negative = self.negative_band or self.band
        if self.sign == "positive":
            return self.band, _everything(self.statistic)
        if self.sign == "negative":
            return _everything(self.statistic), negative
        return self.band, negative


def _everything(statistic: Statistic) -> Band:
    return (-math.inf if statistic == "k1" else 0.0, math.inf)


#: Rows of the literature, with the constants of their authors.
PRESETS: Final[dict[str, Correction]] = {
    # REINFORCE (Williams 1992): behaviour is taken for the learner's own.
    "pg": Correction(inside="one"),
    # Score centring alone (Marek & Ryabinin 2026, arXiv 2609.20807).
    "sc": Correction(inside="one", centring="topk"),
    # StableReinforce: the same with eight further draws in place of the head.
    "stable_reinforce": Correction(inside="one", centring="draws"),
    # Importance sampling, unbiased per token and without a bound.
    "is": Correction(),
    # Truncated importance sampling (Ionides 2008), used so by PipelineRL (2509.19128) and Olmo 3; C0 = 2, ageing.
    "tis": Correction(band=(0.0, 2.0), aged=True),
    # The default: truncated and centred at every lag (docs/learning-experiments.md says why).
    "tis+sc": Correction(band=(0.0, 2.0), aged=True, centring="topk"),
    # As the default, but fresh tokens are only centred: their ratio is taken for 1.
    "fresh_sc": Correction(band=(0.0, 2.0), aged=True, unit_at_lag_0=True, centring="topk"),
    # Masked importance sampling: tokens outside the band say nothing.
    "mis": Correction(band=(0.5, 5.0), outside="drop"),
    "mis+sc": Correction(band=(0.5, 5.0), outside="drop", centring="topk"),
    # IcePop (Ling team 2025, Ring-1T, 2510.18855): mask of training against inference engine, alpha 0.5, beta 5. With
    # one step per batch the proximal policy is p itself, its clip never acts, and the row equals ``mis``.
    "icepop": Correction(band=(0.5, 5.0), outside="drop"),
    # PPO (1707.06347), epsilon 0.2.
    "ppo": Correction(band=(0.8, 1.2), outside="drop", sign="ppo"),
    "ppo+sc": Correction(band=(0.8, 1.2), outside="drop", sign="ppo", centring="topk"),
    # DAPO's clip-higher (2503.14476).
    "dapo": Correction(band=(0.8, 1.28), outside="drop", sign="ppo"),
    # INTELLECT-2 (2505.07291): PPO, and for A < 0 the ratio is bounded by 4 as well.
    "two_sided": Correction(band=(0.8, 1.2), outside="drop", sign="ppo", negative_band=(0.8, 4.0)),
    # CISPO (MiniMax-M1, 2506.13585): clamp the weight, never drop the token; upper end as in ScaleRL (2510.13786).
    "cispo": Correction(band=(0.0, 5.0)),
    # GSPO (2507.18071): one ratio per sequence, the geometric mean of its tokens' ratios.
    "gspo": Correction(level="sequence_mean", band=(1 - 3e-4, 1 + 4e-4), outside="drop", sign="ppo"),
    # TOPR (2503.14286): weight 1 for what was good, min(r, 1) of the whole sequence for what was bad.
    "topr": Correction(level="sequence_sum", band=(1.0, 1.0), negative_band=(0.0, 1.0)),
    # DPPO (2602.04879), binary total variation: |p_a - q_a| within 0.2.
    "dppo": Correction(statistic="tv", band=(0.0, 0.2), outside="drop", sign="ppo"),
    # M2PO (2510.01161): drop the most extreme tokens until the second moment of log r is below 0.04.
    "m2po": Correction(outside="drop", sign="ppo", second_moment=0.04),
    # Decoupled PPO (2505.24298) with the proximal policy interpolated between q and p in log space, weight 1/lag on q
    # (A-3PO, 2512.06547): p/p_prox = r^(1/lag), p_prox/q = r^(1-1/lag), so the weight is r and the clip acts on
    # r^(1/lag), which is a band raised to the power of the lag.
    "decoupled": Correction(band=(0.8, 1.2), outside="drop", sign="ppo", per_lag=True),
}


def correction_of(config: LossConfig) -> Correction:
    """The preset of ``config`` with the fields that ``config`` changes.

    Raises:
        ValueError: the fields contradict each other.
    """
    preset = PRESETS[config.preset]
    changes = {
        field.name: value for field in fields(Correction) if (value := getattr(config, field.name, None)) is not None
    }
    low, high = preset.band
    if config.low is not None or config.high is not None:
        low = low if config.low is None else config.low
        high = high if config.high is None else config.high
        changes |= {"band": (low, high), "negative_band": None, "aged": False}
    elif preset.aged:
        changes["band"] = (low, config.cap)
    return replace(preset, **changes)


def ratio_interval(statistic: Statistic, band: Band) -> tuple[float, float, float]:
    """(low, high, slack): the statistic of a token is in ``band`` exactly when p is in [low q - slack, high q + slack].

    Bands of tv, k2 and k3 start at 0.
    """
    low, high = band
    if high == math.inf and low <= (-math.inf if statistic == "k1" else 0.0):
        return -math.inf, math.inf, 0.0
    if statistic == "ratio":
        return low, high, 0.0
    if statistic == "tv":
        return 1.0, 1.0, high
    if statistic == "k1":
        return math.exp(-high), math.exp(-low) if low > -math.inf else math.inf, 0.0
    if statistic == "k2":
        half_width = math.sqrt(2.0 * high)
        return math.exp(-half_width), math.exp(half_width), 0.0
    return _k3_root(high, below=True), _k3_root(high, below=False), 0.0


def _k3_root(bound: float, *, below: bool) -> float:
    """The r on one side of 1 with r - 1 - log r = bound, by bisection of log r."""
    # r >= 1 gives k3 >= (log r)^2 / 2; r <= 1 gives k3 >= -1 - log r.
    inner, outer = 0.0, -(bound + 1.0) if below else math.sqrt(2.0 * bound)
    for _ in range(200):
        middle = (inner + outer) / 2
        if math.expm1(middle) - middle > bound:
            outer = middle
        else:
            inner = middle
    return math.exp(inner)
