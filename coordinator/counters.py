"""Running totals in the database."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.models import Counter, NodeReason


def add(session: Session, name: str, amount: int) -> None:
    """Add to a total, within the transaction that changes what it counts."""
    row = session.get(Counter, name)
    if row is None:
        session.add(Counter(name=name, value=amount))
        session.flush()
    else:
        row.value += amount


def totals(session: Session) -> dict[str, int]:
    """All totals by name."""
    return {row.name: row.value for row in session.scalars(select(Counter))}


def add_reason(session: Session, node_id: str, code: str) -> None:
    """Count ``code`` once more among a node's reasons: for a bundle that was turned down, or for pinning its leases."""
    row = session.get(NodeReason, (node_id, code))
    if row is None:
        session.add(NodeReason(node_id=node_id, code=code, count=1))
        session.flush()
    else:
        row.count += 1
