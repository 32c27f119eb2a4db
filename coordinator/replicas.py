"""T2': some units are made by a second node as well. Where the two differ, both are looked at.

Which units is drawn when the first node has committed to its rollouts, from the lease's digest under the epoch's key
(in a domain of its own): that is secret while the lease is open, and nothing that a node could see before it hands in
depends on the outcome.
A replica is a shadow lease: it never counts for its group, and unlike a drill's it is paid.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import ColumnElement, and_, exists, or_, select
from sqlalchemy.orm import Session, aliased

from coordinator.groups import head_version
from coordinator.models import Epoch, Group, GroupState, Lease, LeaseState, Node, Receipt, ReceiptState, Unit, UnitState
from coordinator.run import Run
from protocol import audit_draw
from protocol.api import E_WITHHELD
from protocol.errors import LocalFault

_MADE = (UnitState.SUBMITTED, UnitState.VERIFIED)
#: What to do about a receipt that is withheld.
WITHHELD_HINT: Final = "ask again later: it is shown once nobody could hand in a copy; state and verdicts are shown now"
_COMPARABLE = (ReceiptState.PENDING, ReceiptState.CLAIMED, ReceiptState.PASS)


class Replicas:
    """Which units are made twice, which receipts belong together, and what must not be copied meanwhile."""

    def __init__(self, run: Run):
        self._rate_ppm, self._batch = run.manifest.audit.replicate_ppm, run.manifest.batch

    def draw(self, unit: Unit, lease_sha256: str, epoch: Epoch) -> None:
        """Decide whether a unit that was just handed in is made by a second node too."""
        unit.replicate = audit_draw.is_replicated(epoch.key, lease_sha256, self._rate_ppm)

    def wanted(self, session: Session, node: Node) -> list[Unit]:
        """At most one unit that this node may make as the second: another's, and nobody's replica yet.

        What the learner has trained on already is made again too, while it is fresh: a cheat that hands in last is no
        safer than others.
        """
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
                Unit.replicate.is_(True), Unit.state.in_(_MADE), Group.state != GroupState.CANCELLED,
                Group.start_version <= node.version, Group.start_version >= self._oldest(session), ~mine_or_made,
            )
            .order_by(Unit.id)
            .limit(1)
        )
        return list(session.scalars(query))

    def alone(self, session: Session) -> ColumnElement[bool]:
        """Whether a replica's lease (joined with its unit) that ran out could still be of use.

        Nobody else holds a replica of the unit or has handed one in, nor does its node the unit itself. So what comes
        late is taken as it is for any lease, and being refused tells nobody that it was a replica's.
        """
        other = aliased(Lease)
        taken = exists().where(
            other.unit_id == Lease.unit_id, other.id != Lease.id,
            other.state.in_((LeaseState.ACTIVE, LeaseState.SUBMITTED)),
            or_(other.replica.is_(True), other.node_id == Lease.node_id),
        )
        fresh = select(Group.id).where(
            Group.state != GroupState.CANCELLED, Group.start_version >= self._oldest(session)
        )
        return and_(
            Lease.replica.is_(True), Unit.replicate.is_(True), Unit.state.in_(_MADE), Unit.group_id.in_(fresh), ~taken
        )

    def hides(self, session: Session, units: Iterable[Unit]) -> bool:
        """Whether how a group stands would tell, of one of these units, that its lease is a replica's."""
        return self._rate_ppm > 0 and any(self.may_be_made(session, unit) for unit in units)

    def may_be_made(self, session: Session, unit: Unit, besides: str = "") -> bool:
        """Whether a node other than ``besides`` holds a unit or may yet be given it, so that it could hand in a copy.

        In a run with replicas that is every unit of a fresh group: whoever asks does not learn which ones are drawn.
        """
        held = select(Lease.id).where(
            Lease.unit_id == unit.id, Lease.node_id != besides, Lease.state == LeaseState.ACTIVE
        )
        if session.scalar(held.limit(1)) is not None:
            return True
        last, head = self._batch.max_versions, head_version(session) or 0
        if last is not None and head >= last:
            return False  # nothing is leased any more
        group = session.get_one(Group, unit.group_id)
        fresh = group.state != GroupState.CANCELLED and group.start_version >= self._oldest(session)
        return unit.state == UnitState.OPEN or (self._rate_ppm > 0 and fresh)

    def withheld(self, session: Session, receipt: Receipt) -> bool:
        """Whether nobody but verifiers and learner is to see what a receipt is for: somebody could hand in a copy.

        A bundle that failed is shown: its node must see why, and a copy fails as well.
        """
        unit = session.get_one(Unit, receipt.unit_id)
        return receipt.state != ReceiptState.FAIL and self.may_be_made(session, unit, receipt.node_id)

    def check_shown(self, session: Session, receipt: Receipt) -> None:
        """Whether what a receipt is for may be shown to anybody.

        Raises:
            LocalFault: ``E_WITHHELD``.
        """
        if self.withheld(session, receipt):
            raise LocalFault(
                E_WITHHELD, "another node may still be making the same rollouts", expected="a unit that is over",
                got=f"receipt {receipt.id}, {receipt.state}", hint=WITHHELD_HINT,
            )

    def _oldest(self, session: Session) -> int:
        return (head_version(session) or 0) - self._batch.max_lag_versions

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
