"""T1': a second look at every node's claims, for free.

The learner's forward pass gives log p of every token it trains on, under weights it knows. What a node committed to
should differ from that by staleness alone, alike for all nodes. For each rollout the screen takes the mean of
k3(r) = r - 1 - log r over its tokens, which is 0 for equal distributions and positive on average otherwise, on a log
scale, and compares each node's rollouts with those of all other nodes *of the same lag*: the distance of medians in
robust standard errors (1.4826 MAD / sqrt(n)). A large distance accuses nobody: it directs the audit (T2).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.api import AdmittedGroup
from protocol.messages import NodeScreen, ScreenReport

#: Fewer rollouts than this, of a node or of all others, say nothing.
ENOUGH_ROLLOUTS: Final = 4
#: Distances from here on are worth an audit: about 1 in 30,000 for a normal distribution.
OUTLIER_Z: Final = 4.0
#: Mean k3 below this is rounding: two fp32 forwards differ by about 1e-10 (docs/learner.md).
_FLOOR: Final = 1e-8
_MAD_TO_SIGMA: Final = 1.4826
#: Least spread of log10 k3 believed, so that a handful of near-equal rollouts does not make an outlier of the next.
_LEAST_SIGMA: Final = 0.1
#: Receipts a report names for one node (the message's bound).
_MOST_RECEIPTS: Final = 64


@dataclass(frozen=True)
class RolloutNumbers:
    """What the learner saw of one rollout."""

    node_id: str
    group: int
    sample: int
    lag: int  #: of its first token, in versions
    tokens: int
    k1_sum: float  #: sum of -log r, nats
    k3_sum: float  #: sum of r - 1 - log r, nats


@dataclass(frozen=True)
class NodeReport:
    """What the learner saw of one node in one step."""

    node_id: str
    rollouts: int
    tokens: int
    k1_mean: float  #: nats per token
    k3_mean: float  #: nats per token
    z: float  #: distance from the other nodes, standard errors; 0 where too little is known
    outlier_tokens: int = 0  #: tokens of the rollouts that stand out by themselves
    worst: tuple[tuple[int, int], ...] = ()  #: (group, sample) of those rollouts, worst first

    @property
    def is_outlier(self) -> bool:
        """Whether an audit should look at the node."""
        return self.z >= OUTLIER_Z

    def as_dict(self) -> dict[str, Any]:
        """For metrics and messages."""
        return {
            "rollouts": self.rollouts, "tokens": self.tokens, "k1": self.k1_mean, "k3": self.k3_mean, "z": self.z,
            "outlier_tokens": self.outlier_tokens, "worst": [list(place) for place in self.worst],
        }


def screen(rollouts: list[RolloutNumbers]) -> list[NodeReport]:
    """A report for every node in ``rollouts``, in the order of node ids. Numbers that are not finite count as huge."""
    by_node: dict[str, list[RolloutNumbers]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.tokens > 0:
            by_node[rollout.node_id].append(rollout)
    levels = {id(r): _level(r) for members in by_node.values() for r in members}
    return [_report(node, by_node[node], by_node, levels) for node in sorted(by_node)]


def _report(node: str, own: list[RolloutNumbers], by_node: dict[str, list[RolloutNumbers]],
            levels: dict[int, float]) -> NodeReport:
    tokens = sum(r.tokens for r in own)
    excesses = _excesses(own, [r for other, members in by_node.items() if other != node for r in members], levels)
    standing_out = sorted((e for e in excesses if e.z >= OUTLIER_Z), key=lambda e: (-e.z, e.rollout.group))
    return NodeReport(
        node_id=node,
        rollouts=len(own),
        tokens=tokens,
        k1_mean=sum(r.k1_sum for r in own) / tokens,
        k3_mean=sum(r.k3_sum for r in own) / tokens,
        z=_distance(excesses),
        outlier_tokens=sum(e.rollout.tokens for e in standing_out),
        worst=tuple((e.rollout.group, e.rollout.sample) for e in standing_out),
    )


@dataclass(frozen=True)
class _Excess:
    """One rollout against those of other nodes at its lag, on the log scale."""

    rollout: RolloutNumbers
    excess: float  #: over their median
    sigma: float  #: their spread
    median_error: float  #: of their median

    @property
    def z(self) -> float:
        return self.excess / self.sigma


def _excesses(own: list[RolloutNumbers], others: list[RolloutNumbers], levels: dict[int, float]) -> list[_Excess]:
    pools: dict[int, list[float]] = defaultdict(list)
    for rollout in others:
        pools[rollout.lag].append(levels[id(rollout)])
    found = []
    for rollout in own:
        pool = np.asarray(pools.get(rollout.lag, []))
        if len(pool) >= ENOUGH_ROLLOUTS:
            sigma = _sigma(pool)
            excess = levels[id(rollout)] - float(np.median(pool))
            found.append(_Excess(rollout, excess, sigma, sigma / math.sqrt(len(pool))))
    return found


def _distance(excesses: list[_Excess]) -> float:
    """Median excess of a node's rollouts in robust standard errors."""
    if len(excesses) < ENOUGH_ROLLOUTS:
        return 0.0
    values = np.asarray([e.excess for e in excesses])
    own_error = max(_sigma(values), *(e.sigma for e in excesses)) / math.sqrt(len(values))
    return float(np.median(values)) / math.hypot(own_error, max(e.median_error for e in excesses))


def _sigma(values: NDArray[np.float64]) -> float:
    return max(_LEAST_SIGMA, _MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values)))))


def _level(rollout: RolloutNumbers) -> float:
    """log10 of the mean k3, floored."""
    mean = rollout.k3_sum / rollout.tokens
    return math.log10(max(_FLOOR, mean)) if math.isfinite(mean) else 12.0


def screen_message(run_id: str, version: int, nodes: Mapping[str, Mapping[str, Any]], groups: Iterable[AdmittedGroup],
                   issued_at_ms: int) -> ScreenReport:
    """What the coordinator is told: every node's score, and the receipts of rollouts that stand out.

    ``nodes`` is ``NodeReport.as_dict`` by node id, as a step's metrics hold it; ``groups`` the batch.
    """
    receipts = {(g.group, s.sample): s.receipt_sha256 for g in groups for s in g.samples}
    return ScreenReport(
        run_id=run_id,
        version=version,
        nodes=[
            NodeScreen(
                node_id=node, tokens=report["tokens"], outliers=report["outlier_tokens"],
                score_milli=round(1000 * (report["z"] or 0.0)),
                receipts=list(dict.fromkeys(receipts[tuple(place)] for place in report["worst"]))[:_MOST_RECEIPTS],
            )
            for node, report in sorted(nodes.items())
        ],
        issued_at_ms=issued_at_ms,
    )
