"""Who chooses when to take up new weights so that the completion is a better one.

A node may change weights at any point of the swap grid, so it could try them all and hand in what earns most, or what
is longest, or what earns least, to spoil the training. Then its share of a group does better or worse than those of its
peers, whose samples have the same prompt and start version. Every group that is trained on is one comparison of rewards
and one of lengths; the evidence is summed up per node and side (``protocol.statistics.luck_milli``, ``length_milli``).
At an alarm the node's leases are *pinned*: its rollouts keep the weights they start with, and there is nothing to
choose. Nobody is banned and no credit is taken back. Two nodes that only have each other are pinned together: a
comparison does not say which of them chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy.orm import Session

from coordinator import counters, event_log
from coordinator.models import Node, Receipt
from protocol.errors import code
from protocol.statistics import LUCK_ALARM_MILLI, length_milli, luck_milli

#: Why, in the log and among a node's reasons.
E_STEERING: Final = code(
    "E_STEERING",
    "a node's samples do better or worse than its peers' by more than chance; its leases are pinned to one version",
)


@dataclass
class _Share:
    """What one node, or all others, made of a group."""

    rewards: list[int] = field(default_factory=list)
    tokens: int = 0
    rollouts: int = 0

    def add(self, receipt: Receipt) -> None:
        self.rewards += [int(value) for value in (receipt.rewards or {}).values()]
        self.tokens += receipt.tokens
        self.rollouts += receipt.rollouts


def compare(session: Session, receipts: Sequence[Receipt], max_new_tokens: int, now_ms: int) -> None:
    """Weigh each node's share of a group against the rest; pin the leases of whoever reaches an alarm.

    Args:
        receipts: those of one group, once in its life.
    """
    for node_id in sorted({receipt.node_id for receipt in receipts}):
        own, rest = _Share(), _Share()
        for receipt in receipts:
            (own if receipt.node_id == node_id else rest).add(receipt)
        node = session.get_one(Node, node_id)
        if not rest.rollouts or node.pinned_ms is not None:
            continue
        ours, theirs = (own.tokens, own.rollouts), (rest.tokens, rest.rollouts)
        steps = {
            "luck_milli": luck_milli(own.rewards, rest.rewards),
            "worse_milli": luck_milli(rest.rewards, own.rewards),
            "length_milli": length_milli(ours, theirs, max_new_tokens),
            "shorter_milli": length_milli(theirs, ours, max_new_tokens),
        }
        sums = {name: max(0, getattr(node, name) + step) for name, step in steps.items()}
        for name, total in sums.items():
            setattr(node, name, total)
        if max(sums.values()) >= LUCK_ALARM_MILLI:
            node.pinned_ms = now_ms
            event_log.append(session, now_ms, "leases-pinned", {"node_id": node_id, "code": E_STEERING, **sums})
            counters.add_reason(session, node_id, E_STEERING)
