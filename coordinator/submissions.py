"""Submissions: a node commits to its rollouts, the coordinator signs a receipt, and only then draws the audit."""

from __future__ import annotations

import hashlib
from typing import Final

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from coordinator import counters, event_log, scrutiny
from coordinator.epochs import Epochs
from coordinator.models import Checkpoint, Group, Lease, LeaseState, Node, Receipt, ReceiptState, Unit, UnitState
from coordinator.registry import Registry
from coordinator.replicas import Replicas
from coordinator.run import Run
from protocol import audit_draw
from protocol.api import (
    E_COMMITMENT_CHECKPOINT,
    E_COMMITMENT_MISMATCH,
    E_LEASE_CLOSED,
    E_LEASE_EXPIRED,
    E_LEASE_UNKNOWN,
    E_OBJECT_MISSING,
    E_SECOND_COMMITMENT,
    SubmitReply,
)
from protocol.envelope import Envelope
from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.messages import Commitment
from protocol.messages import Receipt as ReceiptMessage

#: Why a node without an open lease may not upload, by the state of its newest one; closed otherwise.
_NO_UPLOAD: Final = {
    "none": E_LEASE_UNKNOWN, LeaseState.SUBMITTED: E_SECOND_COMMITMENT, LeaseState.EXPIRED: E_LEASE_EXPIRED,
}


class Submissions:
    """Takes commitments in."""

    def __init__(self, run: Run, identity: Identity, registry: Registry, epochs: Epochs, replicas: Replicas):
        self._run, self._identity, self._registry, self._epochs = run, identity, registry, epochs
        self._replicas = replicas

    def submit(self, session: Session, envelope: Envelope, stored_bytes: int | None, now_ms: int) -> SubmitReply:
        """A signed receipt for a commitment; the same one again for a repeated commitment.

        Args:
            stored_bytes: size of the named object in the store, None when it is not there.

        Raises:
            PeerFault: ``E_LEASE_UNKNOWN``, ``E_LEASE_EXPIRED``, ``E_LEASE_CLOSED``, ``E_SECOND_COMMITMENT``,
                ``E_COMMITMENT_MISMATCH``, ``E_COMMITMENT_CHECKPOINT``, ``E_OBJECT_MISSING``, and as
                ``Registry.authenticate``.
        """
        commitment, node = self._registry.authenticate(session, envelope, Commitment, now_ms)
        lease = session.get(Lease, commitment.lease_id)
        if lease is None or lease.node_id != node.id:
            raise PeerFault(E_LEASE_UNKNOWN, "this node has no such lease", got=commitment.lease_id)
        earlier = session.scalars(select(Receipt).where(Receipt.lease_id == lease.id)).first()
        if earlier is not None:
            return _same_again(earlier, commitment)
        unit = session.get_one(Unit, lease.unit_id)
        self._check_matches(commitment, lease, node)
        _check_checkpoints(session, commitment, session.get_one(Group, unit.group_id).start_version)
        if stored_bytes is None:
            raise PeerFault(
                E_OBJECT_MISSING, "the bundle is not in the store", got=commitment.object_sha256,
                hint="upload first (POST /v1/uploads), then commit",
            )
        if stored_bytes != commitment.object_bytes:
            raise _mismatch("object_bytes", stored_bytes, commitment.object_bytes)
        # Last: how a lease stands once it ran out tells what it was of, and is told to whoever hands in work.
        self._check_lease_is_open(session, lease, unit, now_ms)
        return self._accept(session, envelope, commitment, lease, unit, node, now_ms)

    def may_upload(self, session: Session, node: Node) -> int:
        """How many leases a node has that it could hand something in for: as many objects it may upload.

        Raises:
            PeerFault: ``E_LEASE_UNKNOWN`` when it never had one; else what its newest one says:
                ``E_SECOND_COMMITMENT``, ``E_LEASE_EXPIRED`` or ``E_LEASE_CLOSED``.
        """
        mine = Lease.node_id == node.id
        count = select(func.count()).select_from(Lease).join(Unit, Unit.id == Lease.unit_id)
        found = session.scalar(count.where(mine, or_(Lease.state == LeaseState.ACTIVE, self._late(session))))
        if found:
            return found
        newest = session.scalar(select(Lease).where(mine).order_by(Lease.issued_ms.desc()).limit(1))
        state = "none" if newest is None else newest.state
        raise PeerFault(
            _NO_UPLOAD.get(state, E_LEASE_CLOSED), "an upload needs a lease that is open", expected="an active lease",
            got=f"newest lease: {state}",
        )

    def _late(self, session: Session) -> ColumnElement[bool]:
        """Whether a lease (joined with its unit) ran out, but nobody else has or has handed in what it was of."""
        alone = and_(Lease.shadow.is_(False), Unit.state == UnitState.OPEN)
        return and_(Lease.state == LeaseState.EXPIRED, or_(alone, self._replicas.alone(session)))

    def _check_lease_is_open(self, session: Session, lease: Lease, unit: Unit, now_ms: int) -> None:
        if lease.state in (LeaseState.RETURNED, LeaseState.CANCELLED):
            raise PeerFault(E_LEASE_CLOSED, "the lease is over", expected="an active lease", got=lease.state)
        if lease.state != LeaseState.EXPIRED:
            return
        if unit.state == UnitState.CANCELLED:
            raise PeerFault(E_LEASE_CLOSED, "the unit was cancelled", expected="an active lease", got=unit.state)
        late = select(Lease.id).join(Unit, Unit.id == Lease.unit_id).where(Lease.id == lease.id, self._late(session))
        if session.scalar(late) is None:
            raise PeerFault(
                E_LEASE_EXPIRED, "the unit went to somebody else", expected=f"a submission by {lease.deadline_ms}",
                got=now_ms,
            )

    def _accept(
        self, session: Session, envelope: Envelope, commitment: Commitment, lease: Lease, unit: Unit, node: Node,
        now_ms: int,
    ) -> SubmitReply:
        epoch = self._epochs.current(session, now_ms)
        message = ReceiptMessage(
            run_id=self._run.id, receipt_id=_receipt_id(lease.id, envelope.digest), node_id=node.id, lease_id=lease.id,
            commitment_sha256=envelope.digest, object_sha256=commitment.object_sha256, epoch=epoch.id,
            epoch_key_sha256=epoch.key_sha256,
            received_at_ms=max(now_ms, lease.issued_ms),  # our clock may have been set back since
        )
        receipt = message.sign(self._identity)
        rate_ppm = scrutiny.next_rate_ppm(self._run, node, now_ms)
        session.add(
            Receipt(
                id=message.receipt_id, sha256=receipt.digest, lease_id=lease.id, unit_id=unit.id, node_id=node.id,
                shadow=lease.shadow, envelope=receipt.to_bytes(), commitment=envelope.to_bytes(),
                commitment_sha256=envelope.digest, bundle_root=commitment.bundle_root,
                object_sha256=commitment.object_sha256, rollouts=commitment.rollouts, tokens=commitment.tokens,
                epoch=epoch.id, rate_ppm=rate_ppm, drawn=audit_draw.is_drawn(epoch.key, envelope.digest, rate_ppm),
                received_ms=now_ms, state=ReceiptState.PENDING, available_ms=now_ms,
            )
        )
        if lease.state == LeaseState.EXPIRED:
            node.dropped -= 1  # late, but nobody else has the unit
        lease.state, node.drop_streak = LeaseState.SUBMITTED, 0
        if not lease.shadow:
            unit.state, unit.receipt_id, unit.lease_id = UnitState.SUBMITTED, message.receipt_id, lease.id
            self._replicas.draw(unit, lease.sha256, epoch)
        node.tokens += commitment.tokens
        counters.add(session, "tokens_generated", commitment.tokens)
        counters.add(session, "rollouts_submitted", commitment.rollouts)
        session.flush()
        event_log.append(
            session, now_ms, "submitted",
            {
                "receipt_id": message.receipt_id, "sha256": receipt.digest, "commitment_sha256": envelope.digest,
                "node_id": node.id, "epoch": epoch.id, "rate_ppm": rate_ppm,
            },
        )
        return SubmitReply(receipt=receipt, duplicate=False)

    def _check_matches(self, commitment: Commitment, lease: Lease, node: Node) -> None:
        if commitment.lease_sha256 != lease.sha256:
            raise _mismatch("lease_sha256", lease.sha256, commitment.lease_sha256)
        if commitment.rollouts != lease.rollouts:
            raise _mismatch("rollouts", lease.rollouts, commitment.rollouts)
        if commitment.profile != node.profile:
            raise _mismatch("profile", node.profile, commitment.profile)
        most = lease.rollouts * self._run.manifest.sampling.max_new_tokens
        if not lease.rollouts <= commitment.tokens <= most:
            raise _mismatch("tokens", f"{lease.rollouts} to {most}", commitment.tokens)


def _same_again(earlier: Receipt, commitment: Commitment) -> SubmitReply:
    if (earlier.bundle_root, earlier.object_sha256) != (commitment.bundle_root, commitment.object_sha256):
        raise PeerFault(
            E_SECOND_COMMITMENT, "this lease has a commitment already", expected=earlier.bundle_root,
            got=commitment.bundle_root,
        )
    return SubmitReply(receipt=Envelope.from_bytes(earlier.envelope), duplicate=True)


def _check_checkpoints(session: Session, commitment: Commitment, start_version: int) -> None:
    """The rollouts begin with the lease's version, and every manifest that is named is one that we showed."""
    named = {used.version: used.manifest_sha256 for used in commitment.checkpoints}
    if min(named) != start_version:
        raise _mismatch("first version", start_version, min(named))
    query = select(Checkpoint.version, Checkpoint.sha256).where(Checkpoint.version.in_(named))
    published = {row.version: row.sha256 for row in session.execute(query)}
    for version, sha256 in named.items():
        if published.get(version) != sha256:
            raise PeerFault(
                E_COMMITMENT_CHECKPOINT, f"no such manifest of version {version} is published",
                expected=published.get(version, "a published version"), got=sha256,
            )


def _receipt_id(lease_id: str, commitment_sha256: str) -> str:
    return hashlib.sha256(f"assay.receipt-id.v1\0{lease_id}{commitment_sha256}".encode()).hexdigest()[:32]


def _mismatch(field: str, expected: object, got: object) -> PeerFault:
    return PeerFault(E_COMMITMENT_MISMATCH, f"the commitment's {field} is wrong", expected=expected, got=got)
