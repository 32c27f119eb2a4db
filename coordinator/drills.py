"""Drills: keys of the operator's that cheat on purpose, to measure what the live network catches and how soon.

A drill's leases are shadows of real units. Its bundles are checked like any other, and never reach the learner.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import event_log, ledger
from coordinator.groups import Groups
from coordinator.models import Drill, Node, Receipt
from protocol.errors import E_CONFLICT, E_USAGE, LocalFault

#: Ways to cheat that ``assay node run --drill`` knows.
ATTACKS: Final = ("best-of-n", "int8", "stale", "edited-answer")


def enrol(session: Session, groups: Groups, node_id: str, attack: str, now_ms: int, reason: str) -> None:
    """Make a key a drill, before or after it registers. Real work it holds goes to others.

    Raises:
        LocalFault: ``E_USAGE`` for an unknown attack; ``E_CONFLICT`` when it is enrolled for another one.
    """
    if attack not in ATTACKS:
        raise LocalFault(E_USAGE, "unknown attack", expected=f"one of {', '.join(ATTACKS)}", got=attack)
    known = session.get(Drill, node_id)
    if known is not None:
        if known.attack != attack:
            raise LocalFault(E_CONFLICT, "this key is a drill already", expected=known.attack, got=attack)
        return
    session.add(Drill(node_id=node_id, attack=attack, enrolled_ms=now_ms))
    node = session.get(Node, node_id)
    if node is not None:
        ledger.void_node(session, node_id, now_ms)
        groups.release_node(session, node)
    event_log.append(session, now_ms, "drill-enrolled", {"node_id": node_id, "attack": attack, "reason": reason})


def note_failure(session: Session, receipt: Receipt, code: str, now_ms: int) -> None:
    """Note when a drill was caught first, and how many rollouts it had handed in before."""
    drill = session.get(Drill, receipt.node_id)
    if drill is None or drill.caught_ms is not None:
        return
    earlier = select(func.sum(Receipt.rollouts)).where(
        Receipt.node_id == receipt.node_id, Receipt.received_ms <= receipt.received_ms, Receipt.id != receipt.id
    )
    drill.caught_ms, drill.code, drill.receipt_id = now_ms, code, receipt.id
    drill.rollouts_before_caught = int(session.scalar(earlier) or 0)
    event_log.append(
        session, now_ms, "drill-caught",
        {"node_id": drill.node_id, "attack": drill.attack, "code": code, "receipt_id": receipt.id},
    )


def describe(session: Session) -> list[dict[str, Any]]:
    """All drills, oldest first."""
    return [
        {
            "node": row.node_id, "attack": row.attack, "caught": row.caught_ms is not None, "code": row.code,
            "rollouts_before_caught": row.rollouts_before_caught, "receipt_id": row.receipt_id,
            "enrolled_ms": row.enrolled_ms, "caught_ms": row.caught_ms,
        }
        for row in session.scalars(select(Drill).order_by(Drill.enrolled_ms, Drill.node_id))
    ]
