"""Simulates the audit statistics with the project's own code, next to what docs/statistics.md derives.

False bans: honest rollouts whose three statistics exceed their levels exactly as often as the calibration allows (the
worst case), at an alarm low enough to see crossings, and exactly at the default alarm by a Markov chain; and bundles of
eight rollouts that are more or less alike. Power: bundles until a shift of the statistics is banned. Frauds before
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

from statistics import NormalDist  # noqa: E402

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from protocol.audit_draw import audit_rate_ppm, is_drawn  # noqa: E402
from protocol.messages import AuditPolicy  # noqa: E402
from protocol.statistics import (  # noqa: E402
    LUCK_ALARM_MILLI,
    MIN_SCORE,
    alarm_milli,
    bundle_milli,
    luck_milli,
    state_chances,
    state_scores,
)

POLICY: Final = AuditPolicy()
#: Levels that honest rollouts of 3,000 and of 300 prompts support.
LEVELS: Final = 8
FEW_LEVELS: Final = 5
#: Rollouts of a bundle, and how alike those of one bundle are in log-divergence, bias and margin (correlation of normal
#: scores). 0.14 is what log-divergences of a tiny model in bf16 show.
BUNDLE: Final = 8
ALIKE: Final = {
    "0": (0.0, 0.0, 0.0), "0.14": (0.14, 0.0, 0.0), "0.9": (0.9, 0.0, 0.0), "0.9 in all three": (0.9, 0.9, 0.9),
}
#: Shifts of the log-divergence of a cheat, in standard deviations.
SHIFTED: Final = (1.0, 2.0, 3.0)
#: The simulated alarm: a bound of 0.05 over so many audited bundles.
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
    """Distribution of an honest bundle's evidence, 1e-3 nats."""

    values: NDArray[np.int64]
    chances: Floats

    @classmethod
    def alike(cls) -> Null:
        """The three statistics of all its rollouts say the same: the heaviest tail that their mean can have."""
        scores = [math.floor(1000 * score) for score in state_scores(LEVELS)]
        return cls(np.array(scores), np.array(state_chances(LEVELS)))

    @classmethod
    def independent(cls) -> Null:
        """One rollout, whose three statistics know nothing of each other."""
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
    """Share of honest lives of ``life`` audited bundles whose sum reaches ``alarm``."""
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


class Bundles:
    """Evidence of bundles whose rollouts are alike, one per node and call.

    Args:
        alike: correlation within a bundle, of each statistic.
        shift: of the log-divergence, in standard deviations; 0 for an honest node.
        of_a_group: bundles in succession that share their prompt as the rollouts of one do.
    """

    def __init__(
        self, rng: np.random.Generator, nodes: int, alike: tuple[float, ...], *, shift: float = 0.0,
        size: int = BUNDLE, levels: int = LEVELS, of_a_group: int = 1,
    ):
        self._rng, self._nodes, self._alike, self._shift, self._size = rng, nodes, alike, shift, size
        self._edges = [NormalDist().inv_cdf(1 - 2.0 ** -(j + 1)) for j in range(levels)]
        self._ratios, self._of_a_group, self._made = np.exp(state_scores(levels)), of_a_group, 0
        self._prompts: list[Floats] = []

    def __call__(self) -> NDArray[np.int64]:
        """(nodes,) 1e-3 nats."""
        if self._made % self._of_a_group == 0:
            self._prompts = [self._rng.standard_normal((self._nodes, 1)) for _ in self._alike]
        self._made += 1
        ratios: Any = 0.0
        for number, (alike, prompt) in enumerate(zip(self._alike, self._prompts, strict=True)):
            own = self._rng.standard_normal((self._nodes, self._size))
            normal = math.sqrt(alike) * prompt + math.sqrt(1 - alike) * own + (0 if number else self._shift)
            ratios = ratios + self._ratios[np.searchsorted(self._edges, normal)]
        scores = np.maximum(np.floor(1000 * np.log(ratios / len(self._alike))), 1000 * MIN_SCORE)
        mean = np.exp(scores / 1000).mean(axis=1)
        found = np.maximum(np.floor(1000 * np.log(mean)), 1000 * MIN_SCORE).astype(np.int64)
        assert abs(int(found[0]) - bundle_milli(scores[0].astype(int).tolist())) <= 1
        return found


def clustered_false_bans(bundles: Bundles, alarm: int, life: int, lives: int) -> tuple[float, float]:
    """Share of honest lives whose sum reaches ``alarm``, and the mean ratio of a bundle."""
    totals, banned, ratio = np.zeros(lives, np.int64), np.zeros(lives, bool), 0.0
    for _ in range(life):
        found = bundles()
        totals = np.maximum(0, totals + found)
        banned |= totals >= alarm
        ratio += float(np.exp(found / 1000).mean())
    return float(banned.mean()), ratio / life


def bundles_until(bundles: Bundles, alarm: int, nodes: int) -> list[float]:
    """Bundles until the sum of a cheat reaches ``alarm``: median and 99 % quantile."""
    totals, needed = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    while (running := totals < alarm).any():
        totals = np.where(running, np.maximum(0, totals + bundles()), totals)
        needed += running
    return [float(np.quantile(needed, share)) for share in (0.5, 0.99)]


def clusters(alarm: int, low_alarm: int, lives: int, rng: np.random.Generator) -> dict[str, Any]:
    """What is measured over bundles of several rollouts."""
    bans, ratios, pairs, needed = {}, {}, {}, {}
    for name, alike in ALIKE.items():
        bans[name], ratios[name] = clustered_false_bans(Bundles(rng, lives, alike), low_alarm, LIFE, lives)
        pairs[name] = clustered_false_bans(Bundles(rng, lives, alike, of_a_group=2), low_alarm, LIFE, lives)[0]
    for size, levels in ((BUNDLE, LEVELS), (BUNDLE, FEW_LEVELS), (1, LEVELS), (1, FEW_LEVELS)):
        needed[f"bundles of {size}, {levels} levels"] = {
            f"{shift:g}": bundles_until(
                Bundles(rng, 400, ALIKE["0.14"], shift=shift, size=size, levels=levels), alarm, 400
            ) for shift in SHIFTED
        }
    return {
        "false_ban_clustered": bans, "false_ban_clustered_most": max(bans.values()), "bundle_ratio": ratios,
        "false_ban_pairs_of_a_group": pairs, "bundles_until_banned": needed,
    }


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
    clustered = clusters(alarm, low_alarm, lives // 20, numbers)
    lucky = 2 * exact_false_bans(luck_of(0.5), LUCK_ALARM_MILLI, GROUPS, 3_000)  # both sides: shares are alike
    pinned = {lead: groups_until(luck_of(0.5 + lead), LUCK_ALARM_MILLI, trials // 10, numbers) for lead in LEADS}
    caught = 1 - (1 - q * POWER) * (1 - SCREEN * POWER)
    fractions = audit_fractions(nodes, rng)
    result = {
        "false_ban_bound": BOUND, "false_ban_observed": max(observed.values()),
        "false_ban_observed_independent": observed["independent"], "false_ban_exact": exact_low,
        "false_ban_bound_default": POLICY.alpha_ppm / 1e6, "false_ban_exact_default": exact,
        "alarm_nats_default": alarm / 1000, **clustered,
        "expected_frauds_before_detection": frauds_before_detection(POWER, 0.0, trials, rng),
        "expected_frauds_before_detection_predicted": (1 - q * POWER) / (q * POWER),
        "expected_frauds_with_screen": frauds_before_detection(POWER, SCREEN, trials, rng),
        "expected_frauds_with_screen_predicted": (1 - caught) / caught,
        "audit_fraction": {f"{n:.0e}".replace("e+0", "e"): fractions[n] for n in HORIZONS},
        "audit_fraction_predicted": {f"{n:.0e}".replace("e+0", "e"): predicted_fraction(n) for n in HORIZONS},
        "luck_alarm_nats": LUCK_ALARM_MILLI / 1000, "false_pin_bound": 0.02, "false_pin_bound_rewards": 0.01,
        "false_pin_exact": lucky,
        "groups_until_pinned": {f"{lead:g}": groups for lead, groups in pinned.items()},
        "deterrence_below": deterrence(0.8, trials, rng), "deterrence_above": deterrence(1.25, trials, rng),
    }
    rows = [
        ("false bans, alarm for 0.05, worst case", result["false_ban_observed"], f"<= {BOUND} (exact {exact_low:.4f})"),
        ("false bans, independent statistics", observed["independent"], f"<= {BOUND}"),
        (f"false bans, default alarm {alarm / 1000:.2f}, exact", exact, f"<= {POLICY.alpha_ppm / 1e6:g}"),
        *((f"false bans, bundles of {BUNDLE} alike by {name}", share, f"<= {BOUND}")
          for name, share in clustered["false_ban_clustered"].items()),
        *((f"the same, pairs of one group in the same hands, {name}", share, "no bound")
          for name, share in clustered["false_ban_pairs_of_a_group"].items()),
        *((f"mean ratio of a bundle alike by {name}", ratio, "<= 1")
          for name, ratio in clustered["bundle_ratio"].items()),
        *((f"{name} until a shift of {shift} s.d. is banned", bundles[0], "median")
          for name, found in clustered["bundles_until_banned"].items() for shift, bundles in found.items()),
        ("frauds before detection", result["expected_frauds_before_detection"],
         result["expected_frauds_before_detection_predicted"]),
        ("the same with a screen of 0.9", result["expected_frauds_with_screen"],
         result["expected_frauds_with_screen_predicted"]),
        *((f"audited share of {n:,} jobs", fractions[n], predicted_fraction(n)) for n in HORIZONS),
        (f"honest leases pinned by rewards within {GROUPS:,} groups, exact", lucky, "<= 0.01"),
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
