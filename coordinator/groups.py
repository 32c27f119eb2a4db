"""Groups and their units: opened when there is work to hand out, cancelled when they are too stale to train on."""

from __future__ import annotations

from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import counters, event_log, ledger
from coordinator.models import (
    Checkpoint,
    Group,
    GroupState,
    Lease,
    LeaseState,
    Meta,
    Node,
    Receipt,
    ReceiptState,
    Unit,
    UnitState,
)
from coordinator.prompts import Prompts
from coordinator.run import Run
from protocol.rollout import prompt_digest

#: States of a group that still takes work or waits for the learner.
LIVE = (GroupState.OPEN, GroupState.ADMITTED)
#: Cause of a cancellation that somebody answers for.
STALE: Final = "stale"
#: Cause of a cancellation after a restored database was told of versions whose batches it does not know.
RESTORED: Final = "restored"
#: Name of the first group number that no group had that was lost with a restored database.
FIRST_GROUP: Final = "first_group"


def next_number(session: Session) -> int:
    """The number of the next group: one that none ever had, also none that a restored database has forgotten."""
    last, first = session.scalar(select(func.max(Group.id))), session.get(Meta, FIRST_GROUP)
    return max(0 if last is None else last + 1, 0 if first is None else int(first.value))


class Groups:
    """The work of a run."""

    def __init__(self, run: Run, prompts: Prompts, batches_ahead: int):
        self._run, self._batch, self._prompts = run, run.manifest.batch, prompts
        self._batches_ahead = min(batches_ahead, self._batch.max_lag_versions + 1)

    def is_complete(self, session: Session) -> bool:
        """Whether the run has reached its last version."""
        last = self._batch.max_versions
        return last is not None and (head_version(session) or 0) >= last

    def room(self, session: Session) -> int:
        """How many more groups may be opened: the learner's needs within the staleness bound, and no more."""
        version = head_version(session)
        if version is None:
            return 0
        batch = self._batch.groups_per_batch
        most = self._batches_ahead * batch
        if self._batch.max_versions is not None:
            # The spare quarter replaces groups that the learner refuses for reasons of its own.
            most = min(most, (self._batch.max_versions - version) * batch + max(1, batch // 4))
        live = session.scalar(select(func.count()).select_from(Group).where(Group.state.in_(LIVE))) or 0
        return max(0, most - live)

    def open_one(self, session: Session, now_ms: int) -> list[Unit]:
        """Open the next group at the newest version; its units."""
        head = session.get_one(Checkpoint, head_version(session))
        number = next_number(session)
        environment, tokens = self._prompts.prompt(number)
        session.add(
            Group(
                id=number, environment=environment, prompt_tokens=tokens, prompt_sha256=prompt_digest(tokens),
                start_version=head.version, beacon=head.beacon, state=GroupState.OPEN, created_ms=now_ms,
            )
        )
        session.flush()
        size, step = self._batch.group_size, self._batch.samples_per_lease
        units = [
            Unit(group_id=number, samples=list(range(first, min(first + step, size))), state=UnitState.OPEN)
            for first in range(0, size, step)
        ]
        session.add_all(units)
        session.flush()
        return units

    def cancel_stale(self, session: Session, now_ms: int) -> None:
        """Cancel every unconsumed group whose start version has left the staleness bound."""
        oldest = (head_version(session) or 0) - self._batch.max_lag_versions
        stale = select(Group).where(Group.state.in_(LIVE), Group.start_version < oldest)
        for group in session.scalars(stale).all():
            self.cancel(session, group, STALE, now_ms)

    def cancel_live(self, session: Session, cause: str, now_ms: int) -> None:
        """Cancel every unconsumed group."""
        for group in session.scalars(select(Group).where(Group.state.in_(LIVE))).all():
            self.cancel(session, group, cause, now_ms)

    def cancel(self, session: Session, group: Group, cause: str, now_ms: int) -> None:
        """Give a group up; what was verified is paid, and who dropped or still holds a unit answers for it."""
        group.state, group.cause = GroupState.CANCELLED, cause
        held: dict[str, int] = {}
        dropped: dict[str, int] = {}
        lost = 0
        for unit in session.scalars(select(Unit).where(Unit.group_id == group.id)).all():
            if unit.state == UnitState.VERIFIED and unit.receipt_id is not None:
                ledger.settle(session, [unit.receipt_id], now_ms)
            if unit.state in (UnitState.OPEN, UnitState.LEASED):
                lost += len(unit.samples)
                for lease in _unfinished_leases(session, unit):
                    tally = held if lease.state == LeaseState.ACTIVE else dropped
                    tally[lease.node_id] = tally.get(lease.node_id, 0) + len(unit.samples)
                    if lease.state == LeaseState.ACTIVE:
                        lease.state = LeaseState.CANCELLED
            unit.state = UnitState.CANCELLED
        if cause == STALE:
            _count_against(session, held, dropped)
        counters.add(session, "rollouts_cancelled", lost)
        body = {"group": group.id, "cause": cause, "held_by": held, "dropped_by": dropped}
        event_log.append(session, now_ms, "group-cancelled", body)

    def verified(self, session: Session, receipt: Receipt, now_ms: int) -> None:
        """A real unit's submission passed; its group is admitted once all of its units have."""
        unit = session.get_one(Unit, receipt.unit_id)
        group = session.get_one(Group, unit.group_id)
        if group.state == GroupState.CANCELLED:
            ledger.settle(session, [receipt.id], now_ms)
            return
        unit.state, unit.receipt_id = UnitState.VERIFIED, receipt.id
        session.flush()
        waiting = select(Unit.id).where(Unit.group_id == group.id, Unit.state != UnitState.VERIFIED).limit(1)
        if session.scalar(waiting) is None:
            group.state = GroupState.ADMITTED

    def reopen(self, session: Session, unit: Unit) -> None:
        """Offer a unit again, with the same start version and beacon, unless its group is over."""
        group = session.get_one(Group, unit.group_id)
        if group.state not in LIVE:
            return
        unit.state, unit.receipt_id, unit.lease_id = UnitState.OPEN, None, None
        group.state = GroupState.OPEN

    def release_node(self, session: Session, node: Node) -> None:
        """Take everything unconsumed out of a node's hands and offer it to others."""
        for lease in session.scalars(
            select(Lease).where(Lease.node_id == node.id, Lease.state == LeaseState.ACTIVE)
        ).all():
            lease.state = LeaseState.CANCELLED
            if not lease.shadow:
                self.reopen(session, session.get_one(Unit, lease.unit_id))
        mine = (ReceiptState.PENDING, ReceiptState.CLAIMED, ReceiptState.PASS)
        for receipt in session.scalars(
            select(Receipt).where(Receipt.node_id == node.id, Receipt.state.in_(mine))
        ).all():
            self._void(session, receipt)
        session.flush()

    def _void(self, session: Session, receipt: Receipt) -> None:
        unit = session.get_one(Unit, receipt.unit_id)
        counts = not receipt.shadow and unit.receipt_id == receipt.id
        group = session.get_one(Group, unit.group_id)
        if receipt.state == ReceiptState.PASS and not (counts and group.state in LIVE):
            return
        receipt.state = ReceiptState.VOID
        if counts:
            self.reopen(session, unit)


def head_version(session: Session) -> int | None:
    """Version of the newest signed head; None before the first."""
    row = session.get(Meta, "head_version")
    return None if row is None else int(row.value)


def _unfinished_leases(session: Session, unit: Unit) -> list[Lease]:
    """Real leases of a unit that ran out, were handed back or are still held."""
    unfinished = (LeaseState.ACTIVE, LeaseState.EXPIRED, LeaseState.RETURNED)
    query = select(Lease).where(Lease.unit_id == unit.id, Lease.shadow.is_(False), Lease.state.in_(unfinished))
    return list(session.scalars(query))


def _count_against(session: Session, held: dict[str, int], dropped: dict[str, int]) -> None:
    """Rollouts lost to staleness, per node. Only dropping is an incident: trust starts anew."""
    for tally in (held, dropped):
        for node_id, rollouts in tally.items():
            node = session.get_one(Node, node_id)
            node.forfeited += rollouts
            if tally is dropped:
                node.audited_passes = 0
