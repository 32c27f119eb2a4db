"""Null distributions from honest rollouts: levels that later honest rollouts exceed no oftener than stated.

Pure. Distribution-free: a level is an order statistic, chosen so that with high confidence the true chance of exceeding
it is at most the nominal one (tolerance limits: Wilks, "Determination of sample sizes for setting tolerance limits",
1941). That needs independent rollouts, and those of one prompt are not: one of each prompt is taken. Derivation:
``docs/statistics.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high
from typing import Final

from protocol.calibration import Stratum
from protocol.statistics import RolloutStatistics

#: Where strata begin, in stochastic tokens: shorter rollouts have wider distributions.
STRATA: Final = (8, 32, 128, 512)
#: Fewest rollouts of a stratum, each of another group; smaller ones are taken together with the next shorter.
MIN_ROLLOUTS: Final = 300
#: Most levels; the last has a chance of 2^-12.
MAX_LEVELS: Final = 12
#: Confidence that every level of every stratum and statistic is met.
CONFIDENCE: Final = 0.99
#: One rollout in so many fixes the centre of the bias and is left out of its levels.
CENTRE_EVERY: Final = 10
_STATISTICS: Final = 3


def strata_of(rollouts: Sequence[RolloutStatistics], *, min_rollouts: int = MIN_ROLLOUTS) -> list[Stratum]:
    """The strata of honest rollouts, ascending; none when there are too few of them.

    Args:
        rollouts: at most one of each group, whichever of its samples, but not chosen for what was measured.
    """
    doubt = (1 - CONFIDENCE) / (_STATISTICS * MAX_LEVELS * len(STRATA))
    strata: list[Stratum] = []
    longest = math.inf
    for least in reversed(STRATA):
        inside = [rollout for rollout in rollouts if least <= rollout.tokens < longest]
        if len(inside) >= max(min_rollouts, 2 * CENTRE_EVERY):
            strata.insert(0, _stratum(least, inside, doubt))
            longest = least
    return strata


def _stratum(least: int, rollouts: Sequence[RolloutStatistics], doubt: float) -> Stratum:
    bias = [_whole(rollout.bias * 1e9) for rollout in rollouts]
    centre = median_high(bias[::CENTRE_EVERY])
    away = [abs(value - centre) for number, value in enumerate(bias) if number % CENTRE_EVERY]
    return Stratum(
        min_tokens=least, rollouts=len(rollouts),
        log_kl_milli=levels_of([_whole(rollout.log_kl * 1e3) for rollout in rollouts], doubt),
        bias_centre_nano=centre, bias_nano=levels_of(away, doubt),
        margin_nano=levels_of([_whole(rollout.margin * 1e9) for rollout in rollouts], doubt),
    )


def _whole(value: float) -> int:
    """Rounded as scores are: up to whole units."""
    return math.ceil(value)


def levels_of(values: Sequence[int], doubt: float) -> list[int]:
    """Thresholds exceeded with a chance of at most 1/2, 1/4 ..., as many as the sample supports.

    Args:
        values: one per honest rollout, independent: no two rollouts of one group.
        doubt: chance, per threshold, that it is exceeded oftener than that.
    """
    ordered = sorted(values)
    levels: list[int] = []
    for number in range(1, MAX_LEVELS + 1):
        above = most_exceedances(len(ordered), 2.0**-number, doubt)
        if above is None:
            break
        levels.append(ordered[len(ordered) - 1 - above])
    return levels


def most_exceedances(n: int, chance: float, doubt: float) -> int | None:
    """Largest k with P(Binomial(n, chance) <= k) <= doubt; None when even k = 0 is too likely."""
    total, k = 0.0, -1
    while k + 1 < n:
        total += math.exp(_log_binomial(n, k + 1, chance))
        if total > doubt:
            break
        k += 1
    return None if k < 0 else k


def _log_binomial(n: int, k: int, chance: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(chance) + (n - k) * math.log1p(-chance)
