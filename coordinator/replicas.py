"""T2': some units are made by a second node as well, which cannot tell. Where the two differ, both are looked at.

Which units is drawn like audits are, from the lease's digest under the epoch's key. A replica is a shadow lease: it
never counts for its group, and unlike a drill's it is paid.
"""

from __future__ import annotations

from sqlalchemy import and_, exists, or_, select
from sqlalchemy.orm import Session, aliased

from coordinator.epochs import Epochs
from coordinator.groups import LIVE
from coordinator.models import Group, Lease, LeaseState, Node, Receipt, ReceiptState, Unit, UnitState
from coordinator.run import Run
from protocol import audit_draw

_TAKEN = (UnitState.LEASED, UnitState.SUBMITTED, UnitState.VERIFIED)
_COMPARABLE = (ReceiptState.PENDING, ReceiptState.CLAIMED, ReceiptState.PASS)


class Replicas:
    """Which units are made twice, and which receipts belong together."""

    def __init__(self, run: Run, epochs: Epochs):
        self._rate_ppm, self._epochs = run.manifest.audit.replicate_ppm, epochs

    def draw(self, session: Session, unit: Unit, lease_sha256: str, now_ms: int) -> None:
        """Decide whether a unit that was just leased is made by a second node too."""
        if self._rate_ppm:
            key = self._epochs.current(session, now_ms).key
            unit.replicate = audit_draw.is_drawn(key, lease_sha256, self._rate_ppm)

    def wanted(self, session: Session, node: Node) -> list[Unit]:
        """At most one unit that this node may make as the second: another's, and nobody's replica yet."""
        if not self._rate_ppm:
            return []
        under_way = (LeaseState.ACTIVE, LeaseState.SUBMITTED)
        mine_or_made = exists().where(
            Lease.unit_id == Unit.id,
            or_(Lease.node_id == node.id, and_(Lease.replica.is_(True), Lease.state.in_(under_way))),
        )
        query = (
            select(Unit)
            .join(Group, Unit.group_id == Group.id)
            .where(
                Unit.replicate.is_(True), Unit.state.in_(_TAKEN), Group.state.in_(LIVE),
                Group.start_version <= node.version, ~mine_or_made,
            )
            .order_by(Unit.id)
            .limit(1)
        )
        return list(session.scalars(query))

    def twin(self, session: Session, receipt: Receipt) -> Receipt | None:
        """The other node's submission of a unit that two nodes make; None when there is none."""
        ours, theirs = session.get_one(Lease, receipt.lease_id), aliased(Lease)
        query = (
            select(Receipt)
            .join(theirs, theirs.id == Receipt.lease_id)
            .where(
                Receipt.unit_id == receipt.unit_id, Receipt.node_id != receipt.node_id,
                Receipt.state.in_(_COMPARABLE),
                theirs.shadow.is_(False) if ours.replica else theirs.replica.is_(True),
            )
            .order_by(Receipt.received_ms, Receipt.id)
            .limit(1)
        )
        return None if ours.shadow and not ours.replica else session.scalars(query).first()
