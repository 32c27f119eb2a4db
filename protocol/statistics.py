"""Scores of calibrated statistics, and the suspicion of a node: their sequential sum.

Pure functions over numbers. A *score* is a log-likelihood ratio in nats, positive when it speaks against honesty.
Rollouts have scores, bundles have the logarithm of the mean of their ratios, and nodes the sum of those of bundles.
Derivations and bounds: ``docs/statistics.md``. Imports no numpy, for the coordinator and an auditor need it as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Final

from protocol.calibration import Calibration, RolloutScore, Stratum
from protocol.messages import AuditPolicy

#: Range of one rollout's score, in nats. The lower end keeps a node from banking credit, the upper one keeps a single
#: rollout from deciding. Another range is another alarm bound: the scores are normalised for this one.
MIN_SCORE: Final = -0.5
MAX_SCORE: Final = 3.0
#: Alternatives that the scores are tuned for: shifts of a statistic, in standard deviations of its normal score.
SHIFTS: Final = (1.0, 3.0)
#: Share of the way to the alarm that suspicion may cover before a second configuration has confirmed it.
UNCONFIRMED_SHARE: Final = 0.5
#: What is bet on a node being luckier than its peers, or less lucky, and the sum of a side, 1e-3 nats, from which on
#: that is not chance: within 10,000 groups of an honest node each side reaches it with a chance of at most 0.5 %, and
#: any of the four that are kept (better, worse, longer, shorter) with one of at most 2 %.
LUCK_STAKE: Final = 0.5
LUCK_ALARM_MILLI: Final = math.ceil(1000 * math.log(10_000 / 0.005))


@dataclass(frozen=True)
class RolloutStatistics:
    """What T2 measured on one rollout, over its stochastic positions. In nats."""

    sample: int
    tokens: int  #: stochastic positions
    log_kl: float  #: mean of ln KL(committed head || reference)
    bias: float  #: mean of ln q(token) - ln p(token)
    margin: float  #: mean of the drawn token's loss in the race under the reference, clipped at 1


@cache
def state_chances(levels: int) -> tuple[float, ...]:
    """Null chance of exceeding exactly 0, 1 .. ``levels`` of the levels 1/2, 1/4 .. 2^-levels."""
    return (*(2.0 ** -(j + 1) for j in range(levels)), 2.0**-levels)


@cache
def state_scores(levels: int) -> tuple[float, ...]:
    """Score of having exceeded 0 .. ``levels`` levels, ascending, within [MIN_SCORE, MAX_SCORE].

    Likelihood ratio of a mixture of normal shifts over the null, clamped, and lowered until the null expectation of
    its exponential is at most 1. Because scores ascend, the bound also holds when levels are exceeded less often.
    """
    chances = state_chances(levels)
    normal = NormalDist()
    edges = [-math.inf, *(normal.inv_cdf(1 - 2.0 ** -(j + 1)) for j in range(levels)), math.inf]
    raw = []
    for low, high, chance in zip(edges[:-1], edges[1:], chances, strict=True):
        shifted = sum(normal.cdf(high - shift) - normal.cdf(low - shift) for shift in SHIFTS) / len(SHIFTS)
        raw.append(math.log(shifted / chance))

    def expectation(offset: float) -> float:
        return sum(p * math.exp(_clamp(r - offset)) for p, r in zip(chances, raw, strict=True))

    too_small, enough = 0.0, MAX_SCORE + max(raw) - MIN_SCORE
    for _ in range(60):
        middle = (too_small + enough) / 2
        too_small, enough = (middle, enough) if expectation(middle) > 1 else (too_small, middle)
    return tuple(_clamp(r - enough) for r in raw)


def _clamp(score: float) -> float:
    return min(max(score, MIN_SCORE), MAX_SCORE)


def stratum_of(calibration: Calibration, tokens: int) -> Stratum | None:
    """The stratum of a rollout with so many stochastic tokens; None for one too short to say anything."""
    fitting = [stratum for stratum in calibration.strata if stratum.min_tokens <= tokens]
    return max(fitting, key=lambda stratum: stratum.min_tokens, default=None)


def score(statistics: RolloutStatistics, calibration: Calibration) -> RolloutScore:
    """The score of one rollout: the mean of three likelihood ratios, whatever their dependence.

    A mean of e-values is an e-value (Vovk and Wang, "E-values: calibration, combination and applications", 2021).
    """
    log_kl = _fixed(statistics.log_kl, 1e3)
    bias, margin = _fixed(statistics.bias, 1e9), _fixed(statistics.margin, 1e9)
    stratum = stratum_of(calibration, statistics.tokens)
    llr_milli = 0
    if stratum is not None:
        parts = (
            _ratio(log_kl, stratum.log_kl_milli), _ratio(abs(bias - stratum.bias_centre_nano), stratum.bias_nano),
            _ratio(margin, stratum.margin_nano),
        )
        llr_milli = max(math.floor(1000 * math.log(sum(parts) / len(parts))), round(1000 * MIN_SCORE))
    return RolloutScore(
        sample=statistics.sample, tokens=statistics.tokens, log_kl_milli=log_kl, bias_nano=bias, margin_nano=margin,
        llr_milli=llr_milli,
    )


def _ratio(value: int, levels: Sequence[int]) -> float:
    """Likelihood ratio of one statistic; 1 where the calibration has no levels."""
    return math.exp(state_scores(len(levels))[bisect_left(levels, value)])


def _fixed(value: float, unit: float) -> int:
    """Rounded up to whole units, far values cut to what a message may hold."""
    if math.isnan(value):
        return 2**52
    return math.ceil(min(max(value * unit, -(2.0**52)), 2.0**52))


def bundle_milli(scores: Sequence[int]) -> int:
    """What the rollouts of one bundle say together, 1e-3 nats: the logarithm of the mean of their likelihood ratios.

    They share prompt and weights, so that nothing is known of how they depend on each other. The mean of e-values is
    an e-value whatever that is; their product (the sum of scores) is one only if they are independent.

    Args:
        scores: of each rollout, ``RolloutScore.llr_milli``; none say nothing.
    """
    if not scores:
        return 0
    mean = math.fsum(math.exp(score / 1000) for score in scores) / len(scores)
    return max(math.floor(1000 * math.log(mean)), round(1000 * MIN_SCORE))


def alarm_milli(policy: AuditPolicy) -> int:
    """Alarm level in 1e-3 nats: ln(audited bundles of the run / alpha).

    ``life_rollouts`` is taken for the number of bundles; there are no more of these than of rollouts.
    """
    return math.ceil(1000 * math.log(policy.life_rollouts * 1e6 / policy.alpha_ppm))


def advance(suspicion_milli: int, bundle: int, alarm: int, *, confirmed: bool) -> int:
    """Suspicion after one more bundle: floored at 0, and held at half the alarm until it is confirmed.

    Args:
        bundle: as ``bundle_milli``.
        alarm: as ``alarm_milli``.
        confirmed: a second configuration of the verifier (T3) looked at this bundle too.
    """
    total = max(0, suspicion_milli + bundle)
    return total if confirmed else min(total, max(suspicion_milli, unconfirmed_limit(alarm)))


def unconfirmed_limit(alarm: int) -> int:
    """Suspicion, 1e-3 nats, from which on only confirmed scores are added."""
    return int(alarm * UNCONFIRMED_SHARE)


def luck_milli(own: Sequence[int], others: Sequence[int]) -> int:
    """How much better a node's samples of a group did than its peers', as evidence of choosing them, 1e-3 nats.

    The logarithm of a bet, 1 + stake * (mean of own - mean of others) / (best - worst of the group). Whoever the
    group's samples are dealt to, the bet's expectation over all ways to deal them is exactly 1. 0 where there is
    nothing to compare: no peers, or all samples alike. With the sides changed it is the evidence of choosing what earns
    least. ``docs/statistics.md``, "A node that is luckier than its peers".

    Args:
        own, others: rewards in one unit, in any order.
    """
    both = [*own, *others]
    if not own or not others or max(both) == min(both):
        return 0
    return _bet((sum(own) / len(own) - sum(others) / len(others)) / (max(both) - min(both)))


def length_milli(own: tuple[int, int], others: tuple[int, int], limit: int) -> int:
    """The same for the length of completions, which credit is paid for, from ``(tokens, rollouts)`` of each side.

    Args:
        limit: most tokens of a rollout.
    """
    if not own[1] or not others[1]:
        return 0
    return _bet((own[0] / own[1] - others[0] / others[1]) / limit)


def _bet(lead: float) -> int:
    return math.floor(1000 * math.log1p(LUCK_STAKE * lead))
