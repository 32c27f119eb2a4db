"""Credit: verified tokens, pending until the batch that holds them is consumed, void when the node is caught."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import update
from sqlalchemy.orm import Session

from coordinator.models import Credit, CreditState, Receipt


def pend(session: Session, receipt: Receipt, now_ms: int) -> None:
    """Promise the tokens of a receipt that passed. A second promise for the same receipt changes nothing."""
    if session.get(Credit, receipt.id) is None:
        session.add(
            Credit(
                receipt_id=receipt.id, node_id=receipt.node_id, tokens=receipt.tokens, state=CreditState.PENDING,
                at_ms=now_ms,
            )
        )
        session.flush()


def settle(session: Session, receipt_ids: Iterable[str], now_ms: int) -> None:
    """Pay what is pending for these receipts; what is settled or void stays as it is."""
    session.execute(
        update(Credit)
        .where(Credit.receipt_id.in_(list(receipt_ids)), Credit.state == CreditState.PENDING)
        .values(state=CreditState.SETTLED, at_ms=now_ms)
    )


def void_node(session: Session, node_id: str, now_ms: int) -> None:
    """Take back all unsettled credit of a node."""
    session.execute(
        update(Credit)
        .where(Credit.node_id == node_id, Credit.state == CreditState.PENDING)
        .values(state=CreditState.VOID, at_ms=now_ms)
    )
