"""T2 in numbers: how far the committed heads are from the reference, and the limits of the node's profile.

Legend: T completion tokens. All residuals are in nats, of natural-log probabilities at the run's temperature.
Spec: ``docs/spec/verification.md``, "Recomputation".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import code
from protocol.messages import Profile, SamplingRules
from protocol.statistics import RolloutStatistics
from verifier.findings import RolloutFault, counted

E_HEAD_KL = code("E_HEAD_KL", "a rollout's committed heads are on average too far from what the checkpoint computes")
E_TOKEN_KL = code("E_TOKEN_KL", "one committed head is too far from what the checkpoint computes")
E_HEAD_ENTRY = code("E_HEAD_ENTRY", "one entry of a committed head is too far from what the checkpoint computes")
E_HEAD_MEMBERSHIP = code("E_HEAD_MEMBERSHIP", "a head leaves out a token that the checkpoint finds likely enough")
E_TAIL_DRAW = code("E_TAIL_DRAW", "a tail draw is not the token that the checkpoint's tail and the seed select")
E_TAIL_TOKEN = code("E_TAIL_TOKEN", "the recorded probability of a tail draw is not what the checkpoint computes")

E_TOKEN_MARGIN = code("E_TOKEN_MARGIN", "a drawn token loses the race under what the checkpoint computes")
E_ROUTE_MARGIN = code("E_ROUTE_MARGIN", "a recorded choice of experts is not one that the checkpoint's router makes")
E_TAIL_MASS = code("E_TAIL_MASS", "the committed mass outside a head is not what the checkpoint computes")

#: A position is stochastic when the likeliest token has less than this probability under the reference or the head.
STOCHASTIC_BELOW: Final = 0.99
#: Ends of the scale on which divergences, biases and margins are averaged, in nats. They keep one position from
#: deciding a mean; a calibration holds for these values and no others.
LEAST_KL: Final = 1e-12
MOST_KL: Final = 1e2
MOST_BIAS: Final = 10.0
MOST_MARGIN: Final = 1.0


@dataclass(frozen=True, eq=False)
class Residuals:
    """One rollout against the reference, per position. NaN where a quantity does not apply."""

    sample: int
    kl_T: NDArray[np.float64]  #: KL(committed head || reference) over head entries and TAIL
    peak_T: NDArray[np.float64]  #: the smaller of the largest probabilities under reference and head
    entry_T: NDArray[np.float64]  #: largest |committed - reference log-probability| of a head entry
    omitted_T: NDArray[np.float64]  #: by how much the likeliest token outside the head should be inside
    tail_draw_T: NDArray[np.float64]  #: how far a tail-drawn token loses its race under the reference
    tail_token_T: NDArray[np.float64]  #: |recorded - reference log-probability| of a tail-drawn token

    bias_T: NDArray[np.float64]  #: ln q - ln p of the drawn token
    margin_T: NDArray[np.float64]  #: how far the drawn symbol (token or TAIL) loses the race under the reference
    tail_mass_T: NDArray[np.float64]  #: |committed - reference log-mass| outside the head, both at least ``LEAST_MASS``
    route_T: NDArray[np.float64] | None = None  #: largest margin of a layer's experts, router logits; None without any

    @property
    def stochastic(self) -> NDArray[np.bool_]:
        """Positions that the mean is taken over."""
        return self.peak_T < STOCHASTIC_BELOW

    @property
    def mean_kl(self) -> float:
        """Mean KL at stochastic positions, 0 when there is none."""
        kl = self.kl_T[self.stochastic]
        return float(kl.mean()) if len(kl) else 0.0

    @property
    def statistics(self) -> RolloutStatistics:
        """Means over the stochastic positions; all zero when there is none."""
        where = self.stochastic
        tokens = int(np.count_nonzero(where))
        if tokens == 0:
            return RolloutStatistics(self.sample, 0, 0.0, 0.0, 0.0)
        log_kl = np.log(np.clip(self.kl_T[where], LEAST_KL, MOST_KL))
        bias = np.clip(self.bias_T[where], -MOST_BIAS, MOST_BIAS)
        margin = np.clip(self.margin_T[where], 0.0, MOST_MARGIN)
        return RolloutStatistics(
            self.sample, tokens, float(log_kl.mean()), float(bias.mean()), float(margin.mean())
        )


@dataclass(frozen=True)
class Measurement:
    """One check of T2 over all rollouts of a bundle."""

    check: str
    expected: str
    got: str
    fault: RolloutFault | None  #: None when it holds


def token_limits(profile: Profile, steps_per_nat: int) -> tuple[float, ...]:
    """Limits of T2.2 to T2.8, in nats, in the order of :data:`TOKEN_CHECKS`.

    Two entries that are each off by the limit can change places by twice as much. Where no code is compared (T2.4,
    T2.5) nothing is rounded, so that of the limit only what is left for arithmetic counts, twice for two values.
    """
    margin = profile.max_margin_micro * 1e-6
    unrounded = min(margin, 2 * max(0.0, margin - 0.5 / steps_per_nat))
    return (profile.max_token_kl_micro * 1e-6, margin, unrounded, unrounded, margin, 2 * margin, margin)


def measure(residuals: Sequence[Residuals], profile: Profile, rules: SamplingRules) -> list[Measurement]:
    """Steps 1 to 8 of the recomputation, and 10 with routes, each over all rollouts.

    What was got names the worst place; a fault is placed at the first one that is beyond the limit, in the bundle's
    order of rollouts, and says so in words where the two differ.
    """
    found = [_mean_check(residuals, profile.max_mean_kl_nano * 1e-9)]
    for (name, code_, values), limit in zip(TOKEN_CHECKS, token_limits(profile, rules.steps_per_nat), strict=True):
        found.append(_worst_check(name, code_, [(r.sample, values(r)) for r in residuals], limit))
    if rules.routes is not None:
        margins = [(r.sample, r.route_T) for r in residuals if r.route_T is not None]
        limit = rules.routes.max_margin_micro * 1e-6
        found.append(_worst_check("10 choice of experts", E_ROUTE_MARGIN, margins, limit, "router logits"))
    return found


def _mean_check(residuals: Sequence[Residuals], limit: float) -> Measurement:
    worst = max(residuals, key=lambda r: r.mean_kl)
    expected = f"mean <= {limit:.3g} nats"
    tokens = counted(int(np.count_nonzero(worst.stochastic)), "stochastic token")
    got = f"worst {worst.mean_kl:.3g} over {tokens} of sample {worst.sample}"
    beyond = [r for r in residuals if not r.mean_kl <= limit]
    if not beyond:
        return Measurement("1 mean divergence", expected, got, None)
    first = beyond[0]
    position = int(np.flatnonzero(~(first.kl_T <= limit) & first.stochastic)[0])
    return _failed("1 mean divergence", E_HEAD_KL, expected, got, first.sample, position)


def _worst_check(
    name: str, code_: str, values: list[tuple[int, NDArray[np.float64]]], limit: float, unit: str = "nats"
) -> Measurement:
    """No single position above ``limit``; NaN means that there is nothing to check."""
    expected = f"each <= {limit:.3g} {unit}"
    sample, worst_T = max(values, key=lambda pair: _largest(pair[1]))
    worst = _largest(worst_T)
    if worst == -np.inf:
        return Measurement(name, expected, "nothing to check", None)
    got = f"worst {worst:.3g} at position {int(np.nanargmax(worst_T))} of sample {sample}"
    beyond = [(number, np.flatnonzero(found_T > limit)) for number, found_T in values]
    first = next(((number, int(found[0])) for number, found in beyond if len(found)), None)
    if first is None:
        return Measurement(name, expected, got, None)
    return _failed(name, code_, expected, got, *first)


def _failed(name: str, code_: str, expected: str, worst: str, sample: int, position: int) -> Measurement:
    """A check that does not hold, placed at the first token beyond its limit."""
    got = f"{worst}; first beyond it: position {position} of sample {sample}"
    fault = RolloutFault(code_, name.partition(" ")[2], sample=sample, position=position, expected=expected, got=got)
    return Measurement(name, expected, got, fault)


def _largest(values_T: NDArray[np.float64]) -> float:
    known = values_T[~np.isnan(values_T)]
    return float(known.max()) if len(known) else -np.inf


#: Steps 2 to 8: name, code, residual per position.
TOKEN_CHECKS: Final[tuple[tuple[str, str, Callable[[Residuals], NDArray[np.float64]]], ...]] = (
    ("2 divergence of a token", E_TOKEN_KL, lambda r: r.kl_T),
    ("3 head entries", E_HEAD_ENTRY, lambda r: r.entry_T),
    ("4 head membership", E_HEAD_MEMBERSHIP, lambda r: r.omitted_T),
    ("5 tail draws", E_TAIL_DRAW, lambda r: r.tail_draw_T),
    ("6 tail token codes", E_TAIL_TOKEN, lambda r: r.tail_token_T),
    ("7 margin of the draw", E_TOKEN_MARGIN, lambda r: r.margin_T),
    ("8 tail mass", E_TAIL_MASS, lambda r: r.tail_mass_T),
)
