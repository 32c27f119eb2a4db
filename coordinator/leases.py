"""Leases: who makes which samples until when."""

from __future__ import annotations

import hashlib
from typing import Final

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.orm import Session

from coordinator import event_log, scrutiny
from coordinator.config import CoordinatorConfig
from coordinator.groups import LIVE, Groups, head_version
from coordinator.models import (
    Drill,
    Group,
    GroupState,
    Lease,
    LeaseState,
    Node,
    NodeState,
    Receipt,
    ReceiptState,
    Unit,
    UnitState,
)
from coordinator.registry import Registry
from coordinator.replicas import Replicas
from coordinator.run import Run
from protocol.api import Ack, LeaseReply
from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import Lease as LeaseMessage
from protocol.messages import LeaseRequest, LeaseReturn

#: When to ask again: work may appear any moment, after the next version, or never.
RETRY_SOON_MS: Final = 250
RETRY_LATER_MS: Final = 1000
#: How long the rest of a group is kept for others at least.
KEPT_FOR_OTHERS_MS: Final = 5_000
#: How often a node may give back all leases that it may hold, within the time of a lease.
RETURNS_SPARED: Final = 4
#: Time that a lease has at least after the coordinator was away.
RESUME_MS: Final = 30_000
#: ``why`` of a finished run; nodes exit when they read it.
RUN_COMPLETE: Final = "run complete"


class Leases:
    """Hands out units and takes them back."""

    def __init__(
        self, run: Run, identity: Identity, registry: Registry, groups: Groups, replicas: Replicas,
        config: CoordinatorConfig,
    ):
        self._run, self._identity, self._registry, self._groups = run, identity, registry, groups
        self._replicas, self._config = replicas, config

    def request(self, session: Session, envelope: Envelope, now_ms: int) -> LeaseReply:
        """Leases for a node, the same ones again for the same nonce.

        Raises:
            PeerFault: as :meth:`coordinator.registry.Registry.authenticate`; ``E_NODE_VERSION``.
        """
        request, node = self._registry.authenticate(session, envelope, LeaseRequest, now_ms)
        before = session.scalars(select(Lease).where(Lease.node_id == node.id, Lease.nonce == request.nonce)).all()
        if before:
            return LeaseReply(leases=[Envelope.from_bytes(row.envelope) for row in before], retry_after_ms=0, why="")
        self._registry.see_version(session, node, request.newest_version)
        self.expire(session, now_ms)
        if self._groups.is_complete(session):
            return LeaseReply(leases=[], retry_after_ms=RETRY_LATER_MS, why=RUN_COMPLETE)
        allowance = self._allowance(session, node, now_ms)
        wanted = min(request.max_leases, allowance)
        if wanted < 1:
            held, returned = self._held(session, node), self._returned(session, node, now_ms)
            why = f"you hold {held} leases already and gave {returned} back lately; finish some"
            return LeaseReply(leases=[], retry_after_ms=RETRY_LATER_MS, why=why)
        shadow = session.get(Drill, node.id) is not None
        twins = [] if shadow else self._replicas.wanted(session, node)
        choose = self._shadow_units if shadow else self._units
        units = choose(session, node, wanted - len(twins), now_ms)
        for twin in twins:  # among the others: its place must not tell it from them
            units.insert(next((at for at, unit in enumerate(units) if unit.id > twin.id), len(units)), twin)
        leases = [
            self._grant(session, node, unit, request.nonce, shadow or unit in twins, now_ms, replica=unit in twins)
            for unit in units
        ]
        why = "" if len(leases) == request.max_leases else self._why(session, node, allowance)
        return LeaseReply(leases=leases, retry_after_ms=0 if leases else RETRY_SOON_MS, why=why)

    def hand_back(self, session: Session, envelope: Envelope, now_ms: int) -> Ack:
        """Take leases back unfinished. Ones that are over already are left alone.

        Raises:
            PeerFault: as :meth:`coordinator.registry.Registry.authenticate`.
        """
        message, node = self._registry.authenticate(session, envelope, LeaseReturn, now_ms)
        returned: list[str] = []
        for lease_id in message.lease_ids:
            lease = session.get(Lease, lease_id)
            if lease is None or lease.node_id != node.id or lease.state != LeaseState.ACTIVE:
                continue
            lease.state = LeaseState.RETURNED
            self._free(session, lease)
            returned.append(lease_id)
        if returned:
            body = {"node_id": node.id, "leases": returned, "reason": message.reason}
            event_log.append(session, now_ms, "leases-returned", body)
        return Ack(duplicate=not returned)

    def expire(self, session: Session, now_ms: int) -> int:
        """Offer the units of leases past their deadline again; how many there were."""
        late = select(Lease).where(Lease.state == LeaseState.ACTIVE, Lease.deadline_ms < now_ms)
        rows = session.scalars(late).all()
        for lease in rows:
            lease.state = LeaseState.EXPIRED
            node = session.get_one(Node, lease.node_id)
            node.dropped += 1
            node.drop_streak += 1
            self._free(session, lease)
        if rows:
            event_log.append(session, now_ms, "leases-expired", {"leases": [lease.id for lease in rows]})
        return len(rows)

    def resume(self, session: Session, served_ms: int | None, now_ms: int) -> int:
        """Give leases that were open when the coordinator last served back the time that it was away; how many.

        What was left of them then is left now, and a moment at least: their nodes have to notice that it is back.
        """
        if served_ms is None or now_ms <= served_ms:
            return 0
        most = self._run.manifest.batch.lease_ms
        still_open = select(Lease).where(Lease.state == LeaseState.ACTIVE, Lease.deadline_ms >= served_ms)
        rows = session.scalars(still_open).all()
        for lease in rows:
            left_ms = max(lease.deadline_ms - served_ms, RESUME_MS)
            lease.deadline_ms = max(lease.deadline_ms, now_ms + min(left_ms, most))
        if rows:
            body = {"leases": [lease.id for lease in rows], "served_ms": served_ms}
            event_log.append(session, now_ms, "leases-resumed", body)
        return len(rows)

    def _free(self, session: Session, lease: Lease) -> None:
        unit = session.get_one(Unit, lease.unit_id)
        if not lease.shadow and unit.lease_id == lease.id and unit.state == UnitState.LEASED:
            unit.state = UnitState.OPEN
        session.flush()

    def _held(self, session: Session, node: Node) -> int:
        held = select(func.count()).select_from(Lease)
        return session.scalar(held.where(Lease.node_id == node.id, Lease.state == LeaseState.ACTIVE)) or 0

    def _allowance(self, session: Session, node: Node, now_ms: int) -> int:
        """How many more leases a node may hold; it shrinks while the node drops them or is doubtful again and again."""
        halvings = node.drop_streak + node.uncalibrated + scrutiny.disagreements(session, node)
        most = max(1, self._config.max_active_leases >> min(halvings, 16))
        spared = RETURNS_SPARED * self._config.max_active_leases - self._returned(session, node, now_ms)
        return min(most, spared) - self._held(session, node)

    def _returned(self, session: Session, node: Node, now_ms: int) -> int:
        """Leases that a node gave back and that would still be open: each cost us a signature and rows for good."""
        given = select(func.count()).select_from(Lease).where(
            Lease.node_id == node.id, Lease.state == LeaseState.RETURNED, Lease.deadline_ms > now_ms
        )
        return session.scalar(given) or 0

    def _units(self, session: Session, node: Node, wanted: int, now_ms: int) -> list[Unit]:
        """Open units the node has the weights for, oldest first, then new groups.

        While it has peers, a node is compared with them in every group (``coordinator.steering``): units of groups in
        which it has a part come last, after a moment in which others may take them, or after twice the time of a lease
        once it gave one of them back. So no node holds whole groups that it could do as it likes with. A unit whose
        bundle could not be judged is kept for others for as long, and so is one that it makes or made a replica of:
        the two would be compared with nothing, and are paid once.
        """
        peers, patience = self._has_peers(session, node, now_ms), 2 * self._run.manifest.batch.lease_ms
        query = (
            select(Unit)
            .join(Group, Unit.group_id == Group.id)
            .where(Unit.state == UnitState.OPEN, Group.start_version <= node.version)
            .order_by(Unit.id)
        )
        if peers:
            query = query.where(
                Unit.id.not_in(_unjudged(node, since_ms=now_ms - patience)),
                Unit.id.not_in(_shadowed(node, since_ms=now_ms - patience)),
            )
        if not (self._config.share_groups and peers):
            units = list(session.scalars(query.limit(wanted)))
            return units + self._new_units(session, node, wanted - len(units), now_ms, shared=False)
        begun, given_back = self._begun(session, node)
        units = list(session.scalars(query.where(Unit.group_id.not_in(begun)).limit(wanted)))
        units += self._new_units(session, node, wanted - len(units), now_ms, shared=True)
        own = or_(
            and_(Unit.group_id.in_(begun - given_back), Group.created_ms <= now_ms - KEPT_FOR_OTHERS_MS),
            and_(Unit.group_id.in_(given_back), Group.created_ms <= now_ms - patience),
        )
        return units + list(session.scalars(query.where(own).limit(wanted - len(units))))

    def _begun(self, session: Session, node: Node) -> tuple[set[int], set[int]]:
        """Open groups of which the node has or had a part, and those of which it gave one back or let it expire."""
        opened = session.scalars(select(Group.id).where(Group.state == GroupState.OPEN)).all()
        leased = select(Unit.group_id, Lease.state).join(Lease, Lease.unit_id == Unit.id)
        rows = session.execute(leased.where(Lease.node_id == node.id, Unit.group_id.in_(opened))).all()
        unfinished = (LeaseState.RETURNED, LeaseState.EXPIRED)
        return {group for group, _ in rows}, {group for group, state in rows if state in unfinished}

    def _shadow_units(self, session: Session, node: Node, wanted: int, now_ms: int) -> list[Unit]:
        """Units that others make too, newest first; a drill's copies never reach the learner."""
        seen = select(Lease.unit_id).where(Lease.node_id == node.id)
        query = (
            select(Unit)
            .join(Group, Unit.group_id == Group.id)
            .where(Group.state.in_(LIVE), Group.start_version <= node.version, Unit.id.not_in(seen))
            .order_by(Unit.id.desc())
            .limit(wanted)
        )
        units = list(session.scalars(query))
        return units or self._new_units(session, node, wanted, now_ms, shared=False)

    def _has_peers(self, session: Session, node: Node, now_ms: int) -> bool:
        """Whether another node works on what the learner trains on: it was heard of within the time of a lease."""
        since = now_ms - self._run.manifest.batch.lease_ms
        others = select(Node.id).where(
            Node.id != node.id, Node.state == NodeState.ACTIVE, Node.last_seen_ms > since,
            Node.id.not_in(select(Drill.node_id)),
        )
        return session.scalar(others.limit(1)) is not None

    def _new_units(self, session: Session, node: Node, wanted: int, now_ms: int, *, shared: bool) -> list[Unit]:
        """Units of new groups; not more than half of each where groups are ``shared``."""
        units: list[Unit] = []
        head = head_version(session)
        if head is None or head > node.version:
            return units
        room = self._groups.room(session)
        while len(units) < wanted and room > 0:
            opened = self._groups.open_one(session, now_ms)
            units += opened[: max(1, len(opened) // 2)] if shared else opened
            room -= 1
        return units[: max(0, wanted)]

    def _grant(
        self, session: Session, node: Node, unit: Unit, nonce: str, shadow: bool, now_ms: int, *, replica: bool = False
    ) -> Envelope:
        group = session.get_one(Group, unit.group_id)
        # Derived, so that nobody can pick it and a retry cannot make a second one.
        name = f"{self._run.id}|{node.id}|{nonce}|{unit.id}".encode()
        message = LeaseMessage(
            run_id=self._run.id, lease_id=hashlib.sha256(b"assay.lease-id.v1\0" + name).hexdigest()[:32],
            node_id=node.id, environment=group.environment, group=group.id, samples=unit.samples,
            prompt_tokens=group.prompt_tokens, prompt_sha256=group.prompt_sha256, start_version=group.start_version,
            beacon=group.beacon, pinned=node.pinned_ms is not None, issued_at_ms=now_ms,
            deadline_ms=now_ms + self._run.manifest.batch.lease_ms,
        )
        envelope = message.sign(self._identity)
        session.add(
            Lease(
                id=message.lease_id, unit_id=unit.id, node_id=node.id, nonce=nonce, shadow=shadow, replica=replica,
                state=LeaseState.ACTIVE, issued_ms=now_ms, deadline_ms=message.deadline_ms,
                rollouts=len(unit.samples), envelope=envelope.to_bytes(), sha256=envelope.digest,
            )
        )
        if not shadow:
            unit.state, unit.lease_id, unit.replicate = UnitState.LEASED, message.lease_id, False
        session.flush()
        event_log.append(
            session, now_ms, "leased",
            {"lease_id": message.lease_id, "sha256": envelope.digest, "node_id": node.id, "group": group.id},
        )
        return envelope

    def _why(self, session: Session, node: Node, allowance: int) -> str:
        head = head_version(session)
        if head is None:
            return "no checkpoint is published yet"
        if head > node.version:
            return f"you hold version {node.version}, new work starts at version {head}; fetch it first"
        if allowance <= 0:
            return "you hold as many leases as you may"
        return "all work of this version is handed out; waiting for the learner"


def _unjudged(node: Node, *, since_ms: int) -> Select[int]:
    """Units of which a node's bundle was set aside lately."""
    aside = (Receipt.node_id == node.id, Receipt.state == ReceiptState.ASIDE, Receipt.decided_ms > since_ms)
    return select(Receipt.unit_id).where(*aside)


def _shadowed(node: Node, *, since_ms: int) -> Select[int]:
    """Units of which a node was leased a replica lately, and holds it or has handed it in."""
    made = (LeaseState.ACTIVE, LeaseState.SUBMITTED)
    mine = (Lease.node_id == node.id, Lease.shadow.is_(True), Lease.state.in_(made), Lease.issued_ms > since_ms)
    return select(Lease.unit_id).where(*mine)
