"""T1': a second look at every node's claims, for free.

The learner's forward pass gives p at every token it trains on, under weights it knows. Two numbers per rollout, each
the mean over its tokens: the divergence KL(q || p) of the committed head (its entries, and TAIL as one symbol), which
sees a head that was made up around a wanted token, and k3(r) = r - 1 - log r of the drawn token, which sees a wrong
probability of a token from the tail. Both are taken on a log scale, and neither below what rounding codes, the limit
of the node's profile and the learner's own arithmetic explain (the *floor*): better than honest is honest. Over draws
from q the mean of k3 is KL(q || p), so that a rollout's own divergence is part of its floor for k3.

A rollout that was made with the very weights that are trained is compared with its floor, whatever other nodes do.
Older ones differ by their staleness, too: there each node's rollouts are compared with those of all other nodes *of the
same lag*: the distance of medians in robust standard errors (1.4826 MAD / sqrt(n), n prompts: rollouts of one prompt
are alike). A large distance accuses nobody: it directs the audit (T2).

A low number says nothing, however low: where the policy is sure of itself an honest head rounds to exactly p.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.api import AdmittedGroup
from protocol.messages import NodeScreen, ScreenReport

#: Fewer rollouts than this, of a node or of all others, say nothing where nodes are compared.
ENOUGH_ROLLOUTS: Final = 4
#: Distances from here on are worth an audit: about 1 in 30,000 for a normal distribution.
OUTLIER_Z: Final = 4.0
#: What float32 logits add to the mean divergence of a rollout, nats: a last place of a logit of 30.
_ARITHMETIC: Final = 2e-6
#: How much further k3 may go: of a code half a step off and a sum of weights half a step off it is four times the
#: largest divergence that rounding can make.
_K3_ROOM: Final = 4.0
_MAD_TO_SIGMA: Final = 1.4826
#: Least spread of log10 believed, so that a handful of near-equal rollouts does not make an outlier of the next. A
#: rollout at 2.5 times its floor is OUTLIER_Z of these away from it.
_LEAST_SIGMA: Final = 0.1
#: Receipts a report names for one node (the message's bound).
_MOST_RECEIPTS: Final = 64


@dataclass(frozen=True)
class RolloutNumbers:
    """What the learner saw of one rollout."""

    node_id: str
    group: int
    sample: int
    lag: int  #: of its first token, in versions; 0: all of it was made with the weights that are trained
    tokens: int
    k1_sum: float  #: sum of -log r, nats
    k3_sum: float  #: sum of r - 1 - log r, nats
    kl_sum: float  #: sum of KL(q || p) over head and TAIL, nats
    kl_limit: float = 0.0  #: mean divergence that its profile allows, nats per token


@dataclass(frozen=True)
class NodeReport:
    """What the learner saw of one node in one step."""

    node_id: str
    rollouts: int
    tokens: int
    k1_mean: float  #: nats per token
    k3_mean: float  #: nats per token
    z: float  #: distance from what honest nodes show, standard errors; 0 where too little is known
    outlier_tokens: int = 0  #: tokens of the rollouts that stand out by themselves
    worst: tuple[tuple[int, int], ...] = ()  #: (group, sample) of those rollouts, worst first
    kl_mean: float = 0.0  #: of heads, nats per token

    @property
    def is_outlier(self) -> bool:
        """Whether an audit should look at the node."""
        return self.z >= OUTLIER_Z

    def as_dict(self) -> dict[str, Any]:
        """For metrics and messages."""
        return {
            "rollouts": self.rollouts, "tokens": self.tokens, "k1": self.k1_mean, "k3": self.k3_mean,
            "head_kl": self.kl_mean, "z": self.z, "outlier_tokens": self.outlier_tokens,
            "worst": [list(place) for place in self.worst],
        }


@dataclass(frozen=True)
class _Level:
    """One number of one rollout, log10 of nats per token."""

    rollout: RolloutNumbers
    value: float  #: not below the floor; what is not finite counts as huge
    floor: float


@dataclass(frozen=True)
class _Excess:
    """One rollout over what honest ones show, on the log scale."""

    rollout: RolloutNumbers
    excess: float
    sigma: float = _LEAST_SIGMA  #: spread of what it is compared with
    median_error: float = 0.0  #: of its median

    @property
    def z(self) -> float:
        return self.excess / self.sigma


def screen(rollouts: Iterable[RolloutNumbers], steps_per_nat: int, *, exact: bool = True) -> list[NodeReport]:
    """A report for every node in ``rollouts``, in the order of node ids.

    Args:
        steps_per_nat: of the codes of heads.
        exact: whether this learner computes what a verifier computes (float32, no router that may choose otherwise).
            If not, fresh rollouts are compared with other nodes, as stale ones are.
    """
    seen = [rollout for rollout in rollouts if rollout.tokens > 0]
    by_node: dict[str, list[RolloutNumbers]] = defaultdict(list)
    for rollout in seen:
        by_node[rollout.node_id].append(rollout)
    rounding = 1.0 / (8.0 * steps_per_nat**2)  # Hoeffding: docs/spec/verification.md, "Thresholds"
    floors = [max(rollout.kl_limit, rounding) + _ARITHMETIC for rollout in seen]
    statistics = [
        [_level(r, r.kl_sum, floor) for r, floor in zip(seen, floors, strict=True)],
        [_level(r, r.k3_sum, _K3_ROOM * _explained(r, floor)) for r, floor in zip(seen, floors, strict=True)],
    ]
    return [_report(node, by_node[node], statistics, exact) for node in sorted(by_node)]


def _report(node: str, own: list[RolloutNumbers], statistics: list[list[_Level]], exact: bool) -> NodeReport:
    z, worst = 0.0, dict[tuple[int, int], _Excess]()
    for number, levels in enumerate(statistics):
        fixed, compared = _excesses(node, levels, exact)
        distances = [_distance(compared), *(e.z for e in fixed)]
        z = max(distances) if number == 0 else max(z, *distances)
        for e in fixed + compared:
            place = (e.rollout.group, e.rollout.sample)
            if e.z >= OUTLIER_Z and (place not in worst or worst[place].z < e.z):
                worst[place] = e
    standing_out = sorted(worst.values(), key=lambda e: (-e.z, e.rollout.group))
    tokens = sum(r.tokens for r in own)
    return NodeReport(
        node_id=node,
        rollouts=len(own),
        tokens=tokens,
        k1_mean=sum(r.k1_sum for r in own) / tokens,
        k3_mean=sum(r.k3_sum for r in own) / tokens,
        z=z,
        outlier_tokens=sum(e.rollout.tokens for e in standing_out),
        worst=tuple((e.rollout.group, e.rollout.sample) for e in standing_out),
        kl_mean=sum(r.kl_sum for r in own) / tokens,
    )


def _excesses(node: str, levels: list[_Level], exact: bool) -> tuple[list[_Excess], list[_Excess]]:
    """(over the floor, over the others of the same lag) of a node's rollouts."""
    pools: dict[int, list[_Level]] = defaultdict(list)
    for level in levels:
        if level.rollout.node_id != node:
            pools[level.rollout.lag].append(level)
    fixed, compared = [], []
    for level in levels:
        lag, pool = level.rollout.lag, pools[level.rollout.lag]
        if level.rollout.node_id != node:
            continue
        if exact and lag == 0:
            fixed.append(_Excess(level.rollout, level.value - level.floor))
        elif len(pool) >= ENOUGH_ROLLOUTS:
            values = np.asarray([other.value for other in pool])
            sigma, usual = _sigma(values), max(level.floor, float(np.median(values)))
            error = sigma / math.sqrt(_prompts([other.rollout for other in pool]))
            compared.append(_Excess(level.rollout, level.value - usual, sigma, error))
    return fixed, compared


def _distance(excesses: list[_Excess]) -> float:
    """Median excess of a node's rollouts in robust standard errors."""
    if len(excesses) < ENOUGH_ROLLOUTS:
        return 0.0
    values = np.asarray([e.excess for e in excesses])
    own_error = max(_sigma(values), *(e.sigma for e in excesses)) / math.sqrt(_prompts([e.rollout for e in excesses]))
    return float(np.median(values)) / math.hypot(own_error, max(e.median_error for e in excesses))


def _prompts(rollouts: Sequence[RolloutNumbers]) -> int:
    return len({rollout.group for rollout in rollouts})


def _sigma(values: NDArray[np.float64]) -> float:
    return max(_LEAST_SIGMA, _MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values)))))


def _explained(rollout: RolloutNumbers, floor: float) -> float:
    """Mean k3 that the head explains: over all draws from q it is KL(q || p)."""
    mean = rollout.kl_sum / rollout.tokens
    return max(floor, mean) if math.isfinite(mean) else floor


def _level(rollout: RolloutNumbers, total: float, floor: float) -> _Level:
    mean = total / rollout.tokens
    value = math.log10(max(floor, mean)) if math.isfinite(mean) else 12.0
    return _Level(rollout, value, math.log10(floor))


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
