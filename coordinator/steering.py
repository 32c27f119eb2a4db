"""Who chooses when to take up new weights so that the completion is a better one.

A node may change weights at any point of the swap grid, so it could try them all. Such a node's share of a group earns
more than the shares of its peers, whose samples have the same prompt, start version and seeds' distribution. Every
group that is trained on is one comparison; the evidence is summed up per node (``protocol.statistics.luck_milli``).
At the alarm the node's leases are *pinned*: its rollouts keep the weights they start with, and there is nothing to
choose. Nobody is punished: an honest node whose leases are pinned loses freshness, no work and no credit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy.orm import Session

from coordinator import counters, event_log
from coordinator.models import Node, Receipt
from protocol.errors import code
from protocol.statistics import LUCK_ALARM_MILLI, luck_milli

#: Why, in the log and among a node's reasons.
E_STEERING: Final = code(
    "E_STEERING", "a node's samples do better than its peers' by more than chance; its leases are pinned to one version"
)


def compare(session: Session, group: int, receipts: Sequence[Receipt], now_ms: int) -> None:
    """Weigh each node's rewards of a group against those of the others; pin the leases of whoever reaches the alarm."""
    shares: dict[str, list[int]] = {}
    for receipt in receipts:
        shares.setdefault(receipt.node_id, []).extend(int(value) for value in (receipt.rewards or {}).values())
    for node_id, own in shares.items():
        others = [reward for other, rewards in shares.items() if other != node_id for reward in rewards]
        step = luck_milli(own, others)
        node = session.get_one(Node, node_id)
        if step == 0 or node.pinned_ms is not None:
            continue
        node.luck_milli = max(0, node.luck_milli + step)
        if node.luck_milli >= LUCK_ALARM_MILLI:
            node.pinned_ms = now_ms
            body = {"node_id": node_id, "code": E_STEERING, "group": group, "luck_milli": node.luck_milli}
            event_log.append(session, now_ms, "leases-pinned", body)
            counters.add_reason(session, node_id, E_STEERING)
