"""Evidence files: everything a stranger needs to judge one submission offline."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import event_log
from coordinator.models import Checkpoint, Group, Lease, Node, Receipt, Unit, Verdict
from coordinator.run import Run
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, LocalFault
from protocol.evidence import Evidence
from protocol.identity import Identity
from protocol.messages import Receipt as ReceiptMessage
from protocol.store import Store


def collect(session: Session, run: Run, store: Store, identity: Identity, receipt_id: str) -> Evidence:
    """The evidence of one receipt; ``identity`` signs the head of the log.

    Raises:
        LocalFault: ``E_NOT_FOUND``, or the store's.
        Transient: of the store.
    """
    receipt = require_receipt(session, receipt_id)
    lease = session.get_one(Lease, receipt.lease_id)
    start = session.get_one(Group, session.get_one(Unit, receipt.unit_id).group_id).start_version
    received_at_ms = ReceiptMessage.from_payload(Envelope.from_bytes(receipt.envelope).payload).received_at_ms
    verdicts = session.scalars(select(Verdict.envelope).where(Verdict.receipt_id == receipt.id).order_by(Verdict.id))
    return Evidence(
        root_public_key=bytes.fromhex(run.root_key),
        node_public_key=bytes.fromhex(session.get_one(Node, receipt.node_id).public_key),
        run_manifest=run.envelope,
        lease=Envelope.from_bytes(lease.envelope),
        commitment=Envelope.from_bytes(receipt.commitment),
        receipt=Envelope.from_bytes(receipt.envelope),
        verdicts=tuple(Envelope.from_bytes(data) for data in verdicts),
        checkpoints=_checkpoints(session, start, received_at_ms),
        bundle=store.get(receipt.object_sha256),
        log=event_log.proof_about(session, receipt.id, run.id, identity),
    )


def require_receipt(session: Session, receipt_id: str) -> Receipt:
    """A receipt by its id.

    Raises:
        LocalFault: ``E_NOT_FOUND``.
    """
    receipt = session.get(Receipt, receipt_id)
    if receipt is None:
        raise LocalFault(
            E_NOT_FOUND, "no such receipt", expected="a receipt id, 32 hex digits", got=receipt_id[:80],
            hint="/v1/nodes/NODE_ID lists a node's receipts; a lease id is not a receipt id",
        )
    return receipt


def _checkpoints(session: Session, start_version: int, received_at_ms: int) -> tuple[Envelope, ...]:
    """Manifests from the last anchor before the start version to the newest one the rollouts can have used.

    By the dates that are signed: a receipt's is never before that of a version that was out, whatever the clock did.
    """
    anchor = select(func.max(Checkpoint.version)).where(
        Checkpoint.version <= start_version, Checkpoint.anchor_bytes > 0
    )
    first = session.scalar(anchor) or 0
    newest = session.scalar(select(func.max(Checkpoint.version)).where(Checkpoint.published_ms <= received_at_ms)) or 0
    query = select(Checkpoint.envelope).where(Checkpoint.version.between(first, max(newest, start_version)))
    return tuple(Envelope.from_bytes(data) for data in session.scalars(query.order_by(Checkpoint.version)))
