"""What a sweep came to: each method at its best rate, paired bootstrap intervals, the order, the default's place.

The best rate of a method is the one with the highest mean final reward over the seeds; it is chosen on the same seeds
that are then reported, for every method alike. Intervals of 95 % resample the paired seeds: of a mean, of the
difference of two methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.arms import Run

Floats = NDArray[np.float64]
_RESAMPLES: Final = 10_000


def interval(values_S: Floats) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of S paired values."""
    picks = np.random.default_rng(0).integers(0, len(values_S), (_RESAMPLES, len(values_S)))
    low, high = np.quantile(values_S[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def at_rate(runs: Sequence[Run], rate: float) -> list[Run]:
    """The runs of one rate, in the order of their seeds."""
    return sorted((run for run in runs if run.rate == rate), key=lambda run: run.seed)


def finals(runs: Sequence[Run], rate: float) -> Floats:
    """(S,) final rewards of one rate."""
    return np.array([run.final for run in at_rate(runs, rate)])


def best_rate(runs: Sequence[Run]) -> float:
    """The rate with the highest mean final reward; the smaller one of two equal ones."""
    return max(sorted({run.rate for run in runs}), key=lambda rate: float(finals(runs, rate).mean()))


def judge(found: dict[str, list[Run]], registered: Sequence[Sequence[str]], default: str = "default") -> dict[str, Any]:
    """Per method: final reward and interval, collapse rate, best rate; the default's rank; pairs of the order.

    Args:
        found: runs by method, the same rates and seeds for all.
        registered: the order expected before the run, best first; methods in one entry were expected to be alike.
        default: the method that is the default preset.
    """
    best = {method: finals(runs, best_rate(runs)) for method, runs in found.items()}
    methods = {method: _of_method(runs, best[default] - best[method]) for method, runs in found.items()}
    order = sorted(best, key=lambda method: -best[method].mean())
    top = interval(best[order[0]] - best[default])
    return {
        "methods": methods,
        "order": order,
        "default_preset_rank": 1 + sum(bool(values.mean() > best[default].mean()) for values in best.values()),
        "default_within_noise": top[0] <= 0.0,
        "best_minus_default": [float((best[order[0]] - best[default]).mean()), *top],
        "registered": [list(alike) for alike in registered],
        "pairs": _pairs(best, registered),
    }


def _of_method(runs: Sequence[Run], behind_S: Floats) -> dict[str, Any]:
    rate = best_rate(runs)
    own, rates = at_rate(runs, rate), sorted({run.rate for run in runs})
    low, high = interval(finals(runs, rate))
    behind = interval(behind_S)
    return {
        "final": float(finals(runs, rate).mean()), "final_low": low, "final_high": high,
        "best_rate": rate, "collapse_rate": float(np.mean([run.collapsed for run in own])),
        "collapse_rate_all_rates": float(np.mean([run.collapsed for run in runs])),
        "default_minus_this": [float(behind_S.mean()), *behind],
        "by_rate": {f"{rate:g}": float(finals(runs, rate).mean()) for rate in rates},
        "kl": float(np.mean([run.kl for run in own])), "ess": float(np.mean([run.ess for run in own])),
        "cut": float(np.mean([run.cut for run in own])),
    }


def _pairs(best: dict[str, Floats], registered: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Neighbours of the registered order: what was expected, what was seen, whether the interval speaks against it."""
    found = []
    for place, alike in enumerate(registered):
        found += [_pair(best, first, "~", second) for first, second in pairwise(alike)]
        below = registered[place + 1] if place + 1 < len(registered) else ()
        found += [_pair(best, first, ">=", second) for first in alike for second in below]
    return found


def _pair(best: dict[str, Floats], first: str, relation: str, second: str) -> dict[str, Any]:
    difference_S = best[first] - best[second]
    low, high = interval(difference_S)
    return {
        "expected": f"{first} {relation} {second}", "difference": float(difference_S.mean()), "interval": [low, high],
        "holds": high >= 0.0 and (relation == ">=" or low <= 0.0),
    }
