"""Simulates the audit statistics with the project's own code, next to what docs/statistics.md derives.

False bans: honest rollouts whose three statistics exceed their levels exactly as often as the calibration allows (the
worst case), at an alarm low enough to see crossings, and exactly at the default alarm by a Markov chain. Frauds before
detection and audit fractions: the coordinator's rate rule and its HMAC draw. Luck: groups of eight, four samples each
of two nodes, solved with a chance of one half by an honest node and with more by one that chooses what it hands in.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import harness

harness.pin_threads()

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from protocol.audit_draw import audit_rate_ppm, is_drawn  # noqa: E402
from protocol.messages import AuditPolicy  # noqa: E402
from protocol.statistics import (  # noqa: E402
    LUCK_ALARM_MILLI,
    MIN_SCORE,
    alarm_milli,
    luck_milli,
    state_chances,
    state_scores,
)

POLICY: Final = AuditPolicy()
#: Levels that 3,000 honest rollouts support.
LEVELS: Final = 8
#: The simulated alarm: a bound of 0.05 over so many audited rollouts.
LIFE: Final = 1_000
BOUND: Final = 0.05
#: Share of audited frauds that T2 finds, and of all frauds that something else sends back before they are trained on.
POWER: Final = 1.0
SCREEN: Final = 0.9
HORIZONS: Final = (1_000, 10_000, 100_000)
#: Samples of a group that one node makes, how many groups the bound on luck is for, and what a steerer gains.
SHARE: Final = 4
GROUPS: Final = 10_000
LEADS: Final = (0.1, 0.2, 0.4)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Null:
    """Distribution of an honest rollout's evidence, 1e-3 nats."""

    values: NDArray[np.int64]
    chances: Floats

    @classmethod
    def alike(cls) -> Null:
        """The three statistics say the same: the heaviest tail that the mean of three can have."""
        scores = [math.floor(1000 * score) for score in state_scores(LEVELS)]
        return cls(np.array(scores), np.array(state_chances(LEVELS)))

    @classmethod
    def independent(cls) -> Null:
        """The three statistics know nothing of each other."""
        ratios = np.exp(state_scores(LEVELS))
        chances = np.array(state_chances(LEVELS))
        mean = (ratios[:, None, None] + ratios[None, :, None] + ratios) / 3
        weight = chances[:, None, None] * chances[None, :, None] * chances
        milli = np.maximum(np.floor(1000 * np.log(mean)), 1000 * MIN_SCORE).astype(np.int64).ravel()
        values, where = np.unique(milli, return_inverse=True)
        return cls(values, np.bincount(where, weight.ravel()))


def luck_of(solved: float) -> Null:
    """What one group adds to a node that solves each of its samples with this chance; its peer solves half of them."""
    ways = [math.comb(SHARE, k) for k in range(SHARE + 1)]
    chances: dict[int, float] = {}
    for own, other in product(range(SHARE + 1), repeat=2):
        value = luck_milli([1] * own + [0] * (SHARE - own), [1] * other + [0] * (SHARE - other))
        chance = ways[own] * solved**own * (1 - solved) ** (SHARE - own) * ways[other] * 0.5**SHARE
        chances[value] = chances.get(value, 0.0) + chance
    values = sorted(chances)
    weights = np.array([chances[value] for value in values])
    return Null(np.array(values), weights / weights.sum())


def groups_until(luck: Null, alarm: int, trials: int, rng: np.random.Generator) -> float:
    """Median number of groups until the sum reaches ``alarm``."""
    totals, needed = np.zeros(trials, np.int64), np.zeros(trials, np.int64)
    while (running := totals < alarm).any():
        steps = rng.choice(luck.values, trials, p=luck.chances)
        totals = np.where(running, np.maximum(0, totals + steps), totals)
        needed += running
    return float(np.median(needed))


def false_bans(null: Null, alarm: int, life: int, lives: int, rng: np.random.Generator) -> float:
    """Share of honest lives of ``life`` audited rollouts whose sum reaches ``alarm``."""
    totals, banned = np.zeros(lives, np.int64), np.zeros(lives, bool)
    for _ in range(life):
        totals = np.maximum(0, totals + rng.choice(null.values, lives, p=null.chances))
        banned |= totals >= alarm
    return float(banned.mean())


def exact_false_bans(null: Null, alarm: int, life: int, settle: int) -> float:
    """The same without sampling: the sum as a Markov chain over 0 .. alarm.

    After ``settle`` steps the chance per step is constant to many digits; the rest of the life is multiplied out.
    """
    chain, alive, rate = np.zeros(alarm), 1.0, 0.0
    chain[0] = 1.0
    for _ in range(min(settle, life)):
        after = np.zeros(alarm)
        for value, chance in zip(null.values.tolist(), null.chances.tolist(), strict=True):
            if value < 0:
                after[: alarm + value] += chance * chain[-value:]
                after[0] += chance * chain[:-value].sum()
            else:
                after[value:] += chance * chain[: alarm - value]
        rate = 1 - after.sum()
        alive *= after.sum()
        chain = after / after.sum()
    return -math.expm1(math.log(alive) + max(0, life - settle) * math.log1p(-rate))


def frauds_before_detection(chance: float, screen: float, trials: int, rng: random.Random) -> float:
    """Mean number of bundles of a steady cheat at the floor rate that land before the first one is caught."""
    total = 0
    for _ in range(trials):
        key, landed = rng.randbytes(32), 0
        while True:
            digest = hashlib.sha256(key + landed.to_bytes(4, "big")).hexdigest()
            audited = is_drawn(key, digest, POLICY.floor_ppm)
            if (audited and rng.random() < chance) or rng.random() < screen * chance:
                break
            landed += 1
        total += landed
    return total / trials


def audit_fractions(nodes: int, rng: random.Random) -> dict[int, float]:
    """Share of an honest node's first jobs that is audited, by number of jobs, over some nodes."""
    audited = dict.fromkeys(HORIZONS, 0)
    for _ in range(nodes):
        key, passes = rng.randbytes(32), 0
        for job in range(HORIZONS[-1]):
            if job in audited:
                audited[job] += passes
            digest = hashlib.sha256(key + job.to_bytes(4, "big")).hexdigest()
            passes += is_drawn(key, digest, audit_rate_ppm(POLICY, passes))
        audited[HORIZONS[-1]] += passes
    return {horizon: count / nodes / horizon for horizon, count in audited.items()}


def predicted_fraction(jobs: int) -> float:
    """The rate rule as a differential equation: (ramp + p)^2 = 4 ramp^2 + 2 ramp (n - ramp) until the floor."""
    ramp, floor = POLICY.ramp, POLICY.floor_ppm / 1e6
    most = ramp / floor - ramp
    at_floor = ramp + ((ramp + most) ** 2 - 4 * ramp**2) / (2 * ramp)
    if jobs <= at_floor:
        return (math.sqrt(4 * ramp**2 + 2 * ramp * (jobs - ramp)) - ramp) / jobs
    return (most + floor * (jobs - at_floor)) / jobs


def deterrence(gain_ratio: float, trials: int, rng: random.Random) -> float:
    """Mean winnings, in gains of one fraud, of a cheat who loses ``gain_ratio`` times the break-even penalty."""
    q = POLICY.floor_ppm / 1e6 * POWER
    penalty = gain_ratio * (1 - q) / q
    return frauds_before_detection(POWER, 0.0, trials, rng) - penalty


def measure(quick: bool, seed: int) -> tuple[dict[str, Any], str]:
    """All numbers of docs/statistics.md, simulated and predicted."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    lives, trials, nodes = (4_000, 2_000, 1) if quick else (40_000, 20_000, 10)
    q = POLICY.floor_ppm / 1e6
    low_alarm = math.ceil(1000 * math.log(LIFE / BOUND))
    observed = {name: false_bans(null, low_alarm, LIFE, lives, numbers)
                for name, null in (("alike", Null.alike()), ("independent", Null.independent()))}
    exact_low = exact_false_bans(Null.alike(), low_alarm, LIFE, LIFE)
    alarm = alarm_milli(POLICY)
    exact = exact_false_bans(Null.alike(), alarm, POLICY.life_rollouts, 300 if quick else 3_000)
    lucky = 2 * exact_false_bans(luck_of(0.5), LUCK_ALARM_MILLI, GROUPS, 3_000)  # both sides: shares are alike
    pinned = {lead: groups_until(luck_of(0.5 + lead), LUCK_ALARM_MILLI, trials // 10, numbers) for lead in LEADS}
    caught = 1 - (1 - q * POWER) * (1 - SCREEN * POWER)
    fractions = audit_fractions(nodes, rng)
    result = {
        "false_ban_bound": BOUND, "false_ban_observed": max(observed.values()),
        "false_ban_observed_independent": observed["independent"], "false_ban_exact": exact_low,
        "false_ban_bound_default": POLICY.alpha_ppm / 1e6, "false_ban_exact_default": exact,
        "alarm_nats_default": alarm / 1000,
        "expected_frauds_before_detection": frauds_before_detection(POWER, 0.0, trials, rng),
        "expected_frauds_before_detection_predicted": (1 - q * POWER) / (q * POWER),
        "expected_frauds_with_screen": frauds_before_detection(POWER, SCREEN, trials, rng),
        "expected_frauds_with_screen_predicted": (1 - caught) / caught,
        "audit_fraction": {f"{n:.0e}".replace("e+0", "e"): fractions[n] for n in HORIZONS},
        "audit_fraction_predicted": {f"{n:.0e}".replace("e+0", "e"): predicted_fraction(n) for n in HORIZONS},
        "luck_alarm_nats": LUCK_ALARM_MILLI / 1000, "false_pin_bound": 0.01, "false_pin_exact": lucky,
        "groups_until_pinned": {f"{lead:g}": groups for lead, groups in pinned.items()},
        "deterrence_below": deterrence(0.8, trials, rng), "deterrence_above": deterrence(1.25, trials, rng),
    }
    rows = [
        ("false bans, alarm for 0.05, worst case", result["false_ban_observed"], f"<= {BOUND} (exact {exact_low:.4f})"),
        ("false bans, independent statistics", observed["independent"], f"<= {BOUND}"),
        (f"false bans, default alarm {alarm / 1000:.2f}, exact", exact, f"<= {POLICY.alpha_ppm / 1e6:g}"),
        ("frauds before detection", result["expected_frauds_before_detection"],
         result["expected_frauds_before_detection_predicted"]),
        ("the same with a screen of 0.9", result["expected_frauds_with_screen"],
         result["expected_frauds_with_screen_predicted"]),
        *((f"audited share of {n:,} jobs", fractions[n], predicted_fraction(n)) for n in HORIZONS),
        (f"honest leases pinned within {GROUPS:,} groups, exact", lucky, "<= 0.01"),
        *((f"groups until a lead of {lead:g} is pinned", groups, "median") for lead, groups in pinned.items()),
        ("winnings at 0.8 x the break-even penalty", result["deterrence_below"], "> 0"),
        ("winnings at 1.25 x the break-even penalty", result["deterrence_above"], "< 0"),
    ]
    return result, harness.table(("quantity", "simulated", "predicted"), rows)


def main() -> None:
    """Run the benchmark."""
    arguments = harness.parser(__doc__).parse_args()
    result, text = measure(arguments.quick, arguments.seed)
    harness.finish(result, text, only_json=arguments.json)


if __name__ == "__main__":
    main()
