"""How many tokens a check needs for a wanted power at a wanted false-alarm chance; one rule for every scheme.

A scheme looks at *units* of a rollout (a token, or a piece of 32) and may say of each that it is beyond a limit. Limits
are deterministic: an honest unit is never beyond one, so the false-alarm chance is 0 however many units are looked at,
and what is asked is how many units of a cheat it takes until one is beyond a limit with chance ``POWER``.

* A cheat that goes on needs the longer of two lengths. A steady chance h per unit, the share of all units beyond a
  limit, needs ln(1 - POWER) / ln(1 - h). And windows of n consecutive units, beginning at every unit of every rollout,
  must hold one with a share of ``POWER``; where no length does of which there are 1 / (1 - POWER) windows, those of the
  longest miss with a share m and longer ones with m to the power of their length over it (*extrapolated*).
* A cheat in one place of a rollout needs the last place at which one stands; where it spares a share r of the rollouts,
  k of them with r^k = 1 - POWER (*extrapolated*).
* *Summed*, extrapolated too, where limits do not decide: a statistic's means and deviations among honest units and
  among the cheat's, taken as normal, give n = ((z(1 - FALSE_ALARM) + z(POWER)) deviation / distance)^2 units. A mean
  that is away by fewer than ``SIGNIFICANT`` standard errors is not called different.

A scheme's number is the smallest of these. Normal tails flatter a statistic whose honest tail is heavier; every scheme
here is flattered alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM: Final = 1e-4
POWER: Final = 0.99
#: Standard errors by which two means must differ.
SIGNIFICANT: Final = 3.0
_FEWEST_WINDOWS: Final = round(1 / (1 - POWER))


@dataclass(frozen=True)
class Needed:
    """Tokens for the wanted power; None: never."""

    tokens: int | None
    extrapolated: bool = False

    def __str__(self) -> str:
        if self.tokens is None:
            return "never"
        return f"~{self.tokens}" if self.extrapolated else str(self.tokens)

    def not_more_than(self, other: Needed) -> bool:
        """Whether it detects with no more tokens than the other one."""
        return other.tokens is None or (self.tokens is not None and self.tokens <= other.tokens)


NEVER: Final = Needed(None)


def by_limits(beyond: Sequence[NDArray[np.bool_]], unit: int = 1, *, once: bool = False) -> Needed:
    """Tokens until a unit is beyond a limit.

    Args:
        beyond: per rollout, which of its units are beyond a limit.
        unit: tokens of a unit.
        once: the cheat is in one place of a rollout and does not go on.
    """
    share = float(np.concatenate(beyond).mean())
    if share == 0:
        return NEVER
    if once:
        return _in_one_place(beyond, unit)
    steady = 1 if share == 1 else math.ceil(math.log(1 - POWER) / math.log(1 - share))
    measured, extrapolated = _by_windows(beyond)
    if measured is None:
        return Needed(unit * max(steady, math.ceil(extrapolated)), True)
    return Needed(unit * max(steady, measured))


def _in_one_place(beyond: Sequence[NDArray[np.bool_]], unit: int) -> Needed:
    first = [int(units.argmax()) for units in beyond if units.any()]
    if len(first) == len(beyond):
        return Needed(unit * (max(first) + 1))
    rollouts = math.ceil(math.log(1 - POWER) / math.log(1 - len(first) / len(beyond)))
    return Needed(unit * math.ceil(rollouts * float(np.mean([len(units) for units in beyond]))), True)


def _by_windows(beyond: Sequence[NDArray[np.bool_]]) -> tuple[int | None, float]:
    """(Units of the shortest window that holds one with chance ``POWER``, if any does; that length extrapolated)."""
    extrapolated = 0.0
    distances = [_distances(units) for units in beyond]
    for length in range(1, 1 + max(map(len, beyond))):
        starts = np.concatenate([found[: max(0, len(found) - length + 1)] for found in distances])
        if length > 1 and len(starts) < _FEWEST_WINDOWS:
            break
        missed = float((starts >= length).mean())
        if missed <= 1 - POWER:
            return length, float(length)
        extrapolated = math.inf if missed == 1 else length * math.log(1 - POWER) / math.log(missed)
    return None, extrapolated


def _distances(beyond: NDArray[np.bool_]) -> NDArray[np.int64]:
    """From each unit to the next one beyond a limit; farther than any window when there is none."""
    places = np.append(np.flatnonzero(beyond), 2 * len(beyond))
    units = np.arange(len(beyond))
    distances: NDArray[np.int64] = places[np.searchsorted(places, units)] - units
    return distances


def by_sum(honest: Sequence[float], cheat: Sequence[float], unit: float) -> Needed:
    """Tokens until the mean of a statistic is beyond what honest ones reach; ``unit`` tokens give one value."""
    if not honest or not cheat:
        return NEVER
    h, c = np.asarray(honest), np.asarray(cheat)
    distance, deviation = float(c.mean() - h.mean()), math.sqrt((h.var() + c.var()) / 2)
    if distance <= SIGNIFICANT * deviation * math.sqrt(1 / len(h) + 1 / len(c)) or distance <= 0:
        return NEVER
    normal = NormalDist()
    reach = normal.inv_cdf(1 - FALSE_ALARM) + normal.inv_cdf(POWER)
    values = max(1, math.ceil((reach * deviation / distance) ** 2))
    return Needed(math.ceil(values * unit), True)


def fewest(*found: Needed) -> Needed:
    """The one that needs fewest tokens; measured ones win ties."""
    return min(found, key=lambda needed: (math.inf if needed.tokens is None else needed.tokens, needed.extrapolated))
