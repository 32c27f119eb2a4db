"""The attack zoo: 34 rows, and the fixtures that attack the real pipeline in their name.

A *trial* is one cheat against one run until it is caught, or until it gives up. The *power* against it is how many
cheating rollouts and tokens it could hand in until then, over many trials with other keys, prompts, seeds, weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from tests.adversary.bench import Bench

ROWS: Final[dict[int, str]] = {
    1: "other or smaller model, made-up log-probabilities",
    2: "small model sampled freely, heads by prefill with the right checkpoint",
    3: "small model driven by the right seed, heads by prefill",
    4: "quantised weights or cache while claiming full precision",
    5: "stale checkpoint under a new version",
    6: "other temperature, top-p, penalties",
    7: "best of n",
    8: "dropping losing units",
    9: "seed, identity and lease grinding with many keys",
    10: "prompt or group-index grinding",
    11: "edited prompt, hidden system prompt, answer prefix",
    12: "end of sequence injected early",
    13: "end of sequence suppressed",
    14: "tokens after the end of sequence",
    15: "one token of the answer edited, the rest generated again",
    16: "one rollout of a group curated",
    17: "split view: checked tokens differ from trained tokens",
    18: "false reward",
    19: "log-probabilities skewed to move the importance weight",
    20: "head nudged just enough to make a wanted token win",
    21: "copied or replayed rollout",
    22: "randomness supplied by the node",
    23: "payload swapped after the receipt, two roots for one lease",
    24: "stripped signature, wrong domain, malleable Merkle tree",
    25: "decoder attacks",
    26: "claims that shrink the tested set",
    27: "honest for long, then cheating; cheating just under the threshold",
    28: "guessing the draw",
    29: "lying about the profile to get looser thresholds",
    30: "colluding replicas",
    31: "false segments",
    32: "lying verifier against an honest node",
    33: "hostile tool results or environment state",
    34: "rewards hacked through the checker",
}

#: Who caught it: the coordinator at the door, a tier of the verifier, the learner's screen (then T3), the sum over
#: rollouts, the comparison with peers, anyone who audits, or nobody because nothing was gained.
Where = Literal["door", "T0", "T1", "T1'", "T2'", "T3", "sum", "peers", "audit", "no gain", "reward 0"]
Kind = Literal["caught", "limit"]


@dataclass(frozen=True)
class Catch:
    """One trial. ``rollouts`` and ``tokens`` are those of the cheat that were handed in, the caught ones included."""

    caught: bool
    code: str | None
    where: str
    rollouts: int = 1
    tokens: int = 0
    honest: int = 0  #: rollouts of honest nodes in the same run meanwhile
    alarms: int = 0  #: of them, refused or punished
    note: float | None = None  #: what a limit measures, in the unit that the fixture says


Trial = Callable[["Bench", int], Catch]


@dataclass(frozen=True)
class Fixture:
    """One attack of a row."""

    row: int
    name: str
    where: tuple[str, ...]  #: who may catch it; the first is the usual one
    codes: tuple[str, ...]  #: any of these; empty where there is no error to name
    trial: Trial
    kind: Kind = "caught"
    limit: str = ""  #: what is not seen, and what ``note`` measures

    def holds(self, catch: Catch) -> bool:
        """Whether a trial ended as this fixture says it must."""
        return catch.caught and catch.where in self.where and (not self.codes or catch.code in self.codes)


FIXTURES: Final[list[Fixture]] = []


def fixture(
    row: int, name: str, where: str | Sequence[str], *codes: str, kind: Kind = "caught", limit: str = "",
) -> Callable[[Trial], Trial]:
    """Register a trial under its row."""
    places = (where,) if isinstance(where, str) else tuple(where)

    def register(trial: Trial) -> Trial:
        FIXTURES.append(Fixture(row, name, places, codes, trial, kind, limit))
        return trial

    return register


@dataclass(frozen=True)
class Power:
    """What many trials of one fixture came to."""

    trials: int
    caught: int
    where: dict[str, int]
    codes: dict[str, int]
    rollouts: tuple[int, int]  #: median and 99 % quantile, of the trials that ended in a catch (all, for a limit)
    tokens: tuple[int, int]
    honest: int
    alarms: int
    note: float | None = None  #: mean of the notes


def attempt(fixture: Fixture, bench: Bench, seed: int) -> Catch:
    """One trial.

    Raises:
        AssertionError: it did not end as the fixture says.
    """
    catch = fixture.trial(bench, seed)
    if fixture.kind == "caught" and not fixture.holds(catch):
        raise AssertionError(f"row {fixture.row}, {fixture.name}: trial {seed} ended as {catch}")
    return catch


def power_of(catches: Sequence[Catch]) -> Power:
    """What trials came to."""
    counted = [c for c in catches if c.caught] or list(catches)
    notes = [c.note for c in catches if c.note is not None]
    return Power(
        trials=len(catches), caught=sum(c.caught for c in catches),
        where=dict(Counter(c.where for c in catches)),
        codes=dict(Counter(c.code for c in catches if c.code is not None)),
        rollouts=_quantiles([c.rollouts for c in counted]), tokens=_quantiles([c.tokens for c in counted]),
        honest=sum(c.honest for c in catches), alarms=sum(c.alarms for c in catches),
        note=float(np.mean(notes)) if notes else None,
    )


def _quantiles(values: list[int]) -> tuple[int, int]:
    middle, high = np.quantile(values, (0.5, 0.99), method="higher")
    return int(middle), int(high)
