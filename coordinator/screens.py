"""T1': the learner's own forward pass as a second look at every node. It forces audits and punishes nobody."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import event_log, ledger, scrutiny
from coordinator.models import Node, Receipt, ReceiptState
from coordinator.models import Screen as ScreenRow
from coordinator.run import Run
from protocol.api import Ack
from protocol.envelope import Envelope
from protocol.errors import E_CONFLICT, PeerFault
from protocol.messages import NodeScreen, ScreenReport

#: z-score, 1e-3, from which on a node stands out: about 1 honest node in 30,000 batches if the scores were normal.
OUTLIER_MILLI = 4_000


class Screens:
    """Takes the learner's screen reports in."""

    def __init__(self, run: Run):
        self._run = run

    def report(self, session: Session, envelope: Envelope, now_ms: int) -> Ack:
        """Record a report and force audits of the nodes that stand out. The same report again changes nothing.

        Raises:
            PeerFault: ``E_WRONG_KEY``; ``E_CONFLICT`` for a second, different report of one version; what is wrong
                with the envelope.
        """
        report = self._run.from_learner(envelope, ScreenReport)
        known = session.get(ScreenRow, report.version)
        if known is not None:
            if known.sha256 != envelope.digest:
                raise PeerFault(
                    E_CONFLICT, "this version has another screen report", expected=known.sha256, got=envelope.digest
                )
            return Ack(duplicate=True)
        session.add(
            ScreenRow(
                version=report.version, sha256=envelope.digest, envelope=envelope.to_bytes(), received_ms=now_ms
            )
        )
        outliers = [screen for screen in report.nodes if screen.score_milli >= OUTLIER_MILLI]
        for screen in outliers:
            self._look_closer(session, screen, now_ms)
        body = {
            "version": report.version, "sha256": envelope.digest, "nodes": len(report.nodes),
            "outliers": [screen.node_id for screen in outliers],
        }
        event_log.append(session, now_ms, "screened", body)
        return Ack()

    def _look_closer(self, session: Session, screen: NodeScreen, now_ms: int) -> None:
        node = session.get(Node, screen.node_id)
        if node is None:
            return
        scrutiny.force(session, node, self._run.manifest.audit.forced, "screen", now_ms)
        named = select(Receipt).where(Receipt.node_id == node.id, Receipt.sha256.in_(screen.receipts))
        for receipt in session.scalars(named.order_by(Receipt.received_ms, Receipt.id)).all():
            review(session, receipt, "screen", now_ms)


def review(session: Session, receipt: Receipt, why: str, now_ms: int) -> None:
    """Put a bundle that passed without a recomputation back into the queue, to be recomputed once.

    Until that is over its credit is pending, also what was paid, and its group is held back from the learner
    (:meth:`coordinator.batches.Batches.admitted`).
    """
    if receipt.state == ReceiptState.PASS and not receipt.drawn and not receipt.review:
        receipt.state, receipt.review, receipt.available_ms = ReceiptState.PENDING, True, now_ms
        receipt.claims, receipt.inconclusive, receipt.claimed_by, receipt.review_ms = 0, 0, None, now_ms
        ledger.reclaim(session, receipt.id, now_ms)
        body = {"receipt_id": receipt.id, "node_id": receipt.node_id, "why": why}
        event_log.append(session, now_ms, "review", body)
