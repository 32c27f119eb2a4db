"""Credit: verified tokens, pending until the batch that holds them is consumed, void when the node is caught.

What is paid is pending again while its bundle is under review.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.models import Credit, CreditState, Receipt, ReceiptState


def pend(session: Session, receipt: Receipt, now_ms: int) -> None:
    """Promise the tokens of a receipt that passed, once per node and unit, however often it handed that in."""
    of_unit = select(Credit.receipt_id).join(Receipt, Receipt.id == Credit.receipt_id).where(
        Receipt.unit_id == receipt.unit_id, Receipt.node_id == receipt.node_id, Credit.state != CreditState.VOID
    )
    if session.get(Credit, receipt.id) is None and session.scalar(of_unit.limit(1)) is None:
        session.add(
            Credit(
                receipt_id=receipt.id, node_id=receipt.node_id, tokens=receipt.tokens, state=CreditState.PENDING,
                at_ms=now_ms,
            )
        )
        session.flush()


def settle(session: Session, receipt_ids: Iterable[str], now_ms: int) -> None:
    """Pay what is pending for those receipts that stand passed: one under review waits for the end of that.

    What is settled or void stays as it is.
    """
    session.flush()
    passed = select(Receipt.id).where(Receipt.id.in_(list(receipt_ids)), Receipt.state == ReceiptState.PASS)
    session.execute(
        update(Credit)
        .where(Credit.receipt_id.in_(passed), Credit.state == CreditState.PENDING)
        .values(state=CreditState.SETTLED, at_ms=now_ms)
    )


def void(session: Session, receipt_id: str, now_ms: int) -> None:
    """Take back what a receipt that failed was promised or paid."""
    session.execute(
        update(Credit).where(Credit.receipt_id == receipt_id).values(state=CreditState.VOID, at_ms=now_ms)
    )


def reclaim(session: Session, receipt_id: str, now_ms: int) -> None:
    """Make what was paid for a receipt pending again: it is in doubt."""
    session.execute(
        update(Credit)
        .where(Credit.receipt_id == receipt_id, Credit.state == CreditState.SETTLED)
        .values(state=CreditState.PENDING, at_ms=now_ms)
    )


def void_node(session: Session, node_id: str, now_ms: int) -> None:
    """Take back all unsettled credit of a node."""
    session.execute(
        update(Credit)
        .where(Credit.node_id == node_id, Credit.state == CreditState.PENDING)
        .values(state=CreditState.VOID, at_ms=now_ms)
    )
