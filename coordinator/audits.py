"""The audit queue: verifiers claim submissions, and their verdicts decide what happens to them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from coordinator import counters, drills, event_log, ledger, scrutiny
from coordinator.config import CoordinatorConfig
from coordinator.discipline import Discipline
from coordinator.groups import LIVE, Groups
from coordinator.models import Group, Lease, Meta, Node, Receipt, ReceiptState, Unit
from coordinator.models import Verdict as VerdictRow
from coordinator.replicas import Replicas
from coordinator.run import Run
from coordinator.screens import review
from coordinator.verdict_rules import check_verdict
from protocol import statistics
from protocol.api import E_DISAGREE, E_SUSPICION, E_UNCALIBRATED, Ack, AuditJob, ClaimReply, ReplicaRef
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, LocalFault, code
from protocol.messages import AuditClaim, Commitment, Verdict
from protocol.messages import Lease as LeaseMessage

#: When a verifier that found nothing asks again.
RETRY_MS: Final = 250
#: Code of a bundle that was claimed again and again without a verdict.
ABANDONED: Final = code("E_AUDIT_ABANDONED", "a bundle was claimed again and again, but no verdict came")
#: Ends without a verdict that may lie in the bundle: another node's may fare better.
_OFFERED_ON: Final = (E_UNCALIBRATED, E_DISAGREE, ABANDONED)


class Audits:
    """Checks in progress and their outcomes."""

    def __init__(
        self, run: Run, groups: Groups, discipline: Discipline, replicas: Replicas, config: CoordinatorConfig
    ):
        self._run, self._groups, self._discipline, self._config = run, groups, discipline, config
        self._replicas = replicas
        self._alarm = statistics.alarm_milli(run.manifest.audit)

    def claim(self, session: Session, envelope: Envelope, now_ms: int) -> ClaimReply:
        """The next job of a verifier, which holds one at a time: whatever it claimed before goes back.

        What goes back unanswered may have ended its verifier: it waits before the same one gets it again, and counts
        as a claim that lapsed (:meth:`_lapse`). Others may have it at once.

        Raises:
            PeerFault: ``E_WRONG_KEY`` and what is wrong with the envelope.
        """
        claim, verifier_id = self._run.from_verifier(envelope, AuditClaim)
        held = select(Receipt).where(Receipt.state == ReceiptState.CLAIMED, Receipt.claimed_by == verifier_id)
        for row in session.scalars(held).all():
            if row.claim_nonce == claim.nonce and now_ms < row.available_ms:
                return ClaimReply(job=self._job(session, row), retry_after_ms=0)
            if now_ms < row.available_ms:
                self._lapse(session, row)
                row.available_ms = now_ms
        session.flush()
        receipt = self._next(session, verifier_id, now_ms)
        if receipt is None:
            return ClaimReply(job=None, retry_after_ms=RETRY_MS)
        receipt.state, receipt.claimed_by, receipt.claim_nonce = ReceiptState.CLAIMED, verifier_id, claim.nonce
        receipt.available_ms = now_ms + self._config.claim_ms
        return ClaimReply(job=self._job(session, receipt), retry_after_ms=0)

    def verdict(self, session: Session, envelope: Envelope, now_ms: int) -> Ack:
        """Record a verdict and act on it. One on a decided bundle is kept in the log and changes nothing.

        Raises:
            PeerFault: ``E_WRONG_KEY``, ``E_VERDICT``, and what is wrong with the envelope.
            LocalFault: ``E_NOT_FOUND`` when there is no such receipt.
        """
        verdict, verifier_id = self._run.from_verifier(envelope, Verdict)
        receipt = session.scalars(select(Receipt).where(Receipt.sha256 == verdict.receipt_sha256)).first()
        if receipt is None:
            raise LocalFault(E_NOT_FOUND, "no such receipt", got=verdict.receipt_sha256)
        known = session.scalars(select(VerdictRow).where(VerdictRow.sha256 == envelope.digest)).first()
        if known is not None:
            return Ack(duplicate=True)
        lease = session.get_one(Lease, receipt.lease_id)
        check_verdict(verdict, verifier_id, receipt, _samples(lease))
        session.add(
            VerdictRow(
                sha256=envelope.digest, receipt_id=receipt.id, verifier_id=verifier_id, outcome=verdict.outcome,
                code=verdict.code, envelope=envelope.to_bytes(), received_ms=now_ms,
            )
        )
        body = {
            "receipt_id": receipt.id, "sha256": envelope.digest, "verifier_id": verifier_id,
            "outcome": verdict.outcome, "code": verdict.code, "tiers": list(verdict.tiers),
            "counted": receipt.state in (ReceiptState.PENDING, ReceiptState.CLAIMED),
        }
        event_log.append(session, now_ms, "verdict", body)
        if not body["counted"]:
            return Ack(duplicate=True)
        if verdict.outcome == "pass":
            self._passed(session, receipt, verdict, now_ms)
        elif verdict.outcome == "fail":
            self._failed(session, receipt, verdict, now_ms)
        else:
            self._inconclusive(session, receipt, verdict.code or "", now_ms)
        return Ack(duplicate=False)

    def _next(self, session: Session, verifier_id: str, now_ms: int) -> Receipt | None:
        ready = or_(
            and_(Receipt.state == ReceiptState.CLAIMED, Receipt.available_ms <= now_ms),
            and_(
                Receipt.state == ReceiptState.PENDING, Receipt.available_ms <= now_ms,
                or_(Receipt.claimed_by.is_(None), Receipt.claimed_by != verifier_id, self._rested(now_ms)),
            ),
        )
        while True:
            # A review holds work back, so it goes first.
            order = (Receipt.review.desc(), Receipt.available_ms, Receipt.received_ms, Receipt.id)
            query = select(Receipt).where(ready).order_by(*order)
            receipt = session.scalars(query.limit(1)).first()
            if receipt is None:
                return None
            if receipt.state == ReceiptState.CLAIMED:
                self._lapse(session, receipt)
            if receipt.claims < self._config.max_claims:
                return receipt
            self._set_aside(session, receipt, ABANDONED, now_ms)
            session.flush()

    def _lapse(self, session: Session, receipt: Receipt) -> None:
        """A claim is over without an answer: it ran out, or its verifier asks for work again.

        A verifier adds one lapse per time of a claim at most, whatever it claims and gives back meanwhile: one that
        never answers voids no more of others' work than by holding it.
        """
        receipt.state = ReceiptState.PENDING
        deadline_ms, name = receipt.available_ms, f"lapsed:{receipt.claimed_by}"
        last = session.get(Meta, name)
        if last is None or int(last.value) <= deadline_ms - self._config.claim_ms:
            receipt.claims += 1
            session.merge(Meta(name=name, value=str(deadline_ms).encode()))
        session.flush()

    def _rested(self, now_ms: int) -> ColumnElement[bool]:
        """Whether a bundle may go to the verifier again that gave it back: after as long as it had waited by then."""
        idle = now_ms - Receipt.available_ms
        waited = Receipt.available_ms - Receipt.received_ms
        return or_(idle >= self._config.claim_ms, and_(idle >= waited, idle >= self._config.requeue_ms))

    def _job(self, session: Session, receipt: Receipt) -> AuditJob:
        lease, node = session.get_one(Lease, receipt.lease_id), session.get_one(Node, receipt.node_id)
        doubtful = node.suspicion_milli >= statistics.unconfirmed_limit(self._alarm)
        return AuditJob(
            receipt=Envelope.from_bytes(receipt.envelope), commitment=Envelope.from_bytes(receipt.commitment),
            lease=Envelope.from_bytes(lease.envelope), drawn=receipt.drawn or receipt.review, node_profile=node.profile,
            node_public_key=node.public_key, replica=self._replica(session, receipt), confirm=doubtful,
            attempt=1 + receipt.claims + receipt.inconclusive, deadline_ms=receipt.available_ms,
        )

    def _replica(self, session: Session, receipt: Receipt) -> ReplicaRef | None:
        twin = self._replicas.twin(session, receipt)
        if twin is None:
            return None
        lease, node = session.get_one(Lease, twin.lease_id), session.get_one(Node, twin.node_id)
        return ReplicaRef(
            receipt=Envelope.from_bytes(twin.envelope), commitment=Envelope.from_bytes(twin.commitment),
            lease=Envelope.from_bytes(lease.envelope), node_public_key=node.public_key,
        )

    def _passed(self, session: Session, receipt: Receipt, verdict: Verdict, now_ms: int) -> None:
        node = session.get_one(Node, receipt.node_id)
        receipt.state, receipt.decided_ms = ReceiptState.PASS, now_ms
        node.audited_passes += 1 if "T2" in verdict.tiers else 0
        if receipt.review:
            self._stands(session, receipt, now_ms)
        else:
            self._accept(session, receipt, verdict, node, now_ms)
        twin = self._replicas.twin(session, receipt) if verdict.diverges else None
        if twin is not None:
            # Two nodes differ and this one is right where they first do. The other is recomputed whole. If that is done
            # already, this one is: what follows the difference was compared with nothing.
            review(session, twin, "replica", now_ms)
            if twin.state == ReceiptState.PASS:
                review(session, receipt, "replica", now_ms)
        self._weigh(session, receipt, verdict, node, now_ms)

    def _stands(self, session: Session, receipt: Receipt, now_ms: int) -> None:
        """A review is over and changes nothing: what waited for that is paid, unless the learner is still to use it."""
        group = session.get_one(Group, session.get_one(Unit, receipt.unit_id).group_id)
        if receipt.shadow or group.state not in LIVE:
            ledger.settle(session, [receipt.id], now_ms)

    def _accept(self, session: Session, receipt: Receipt, verdict: Verdict, node: Node, now_ms: int) -> None:
        receipt.rewards = {str(s): r for s, r in zip(verdict.samples, verdict.rewards_micro, strict=True)}
        node.accepted += receipt.rollouts
        node.uncalibrated = max(0, node.uncalibrated - 1)
        counters.add(session, "rollouts_accepted", receipt.rollouts)
        scrutiny.note_rewards(session, self._run.manifest.audit, receipt, node, now_ms)
        if not receipt.shadow or session.get_one(Lease, receipt.lease_id).replica:
            ledger.pend(session, receipt, now_ms)
        if receipt.shadow:
            ledger.settle(session, [receipt.id], now_ms)  # a replica never waits for a batch
            return
        self._groups.verified(session, receipt, now_ms)

    def _weigh(self, session: Session, receipt: Receipt, verdict: Verdict, node: Node, now_ms: int) -> None:
        """Add what a bundle's scores say to the suspicion of the node; at the alarm it is banned.

        A bundle under review was chosen for what it looks like itself (a screen, a replica): its scores are no fair
        sample of the node's, and are left out. What stands out there is judged by the limits. Bundles of one group
        share their prompt: the first one that is recomputed counts, whatever it says, and none after a review.

        A profile that the run does not list has no honest distribution to be compared with: its scores count nothing.
        It is the one that the bundle was committed under; the node may have registered another since.
        """
        if receipt.review or not verdict.scores or _profile(receipt) not in self._run.profile_names:
            return
        if self._has_weighed(session, receipt):
            return
        before = node.suspicion_milli
        evidence = statistics.bundle_milli([rollout.llr_milli for rollout in verdict.scores])
        after = statistics.advance(before, evidence, self._alarm, confirmed="T3" in verdict.tiers)
        node.suspicion_milli = after
        node.suspicion_rollouts += len(verdict.scores)
        body = {"receipt_id": receipt.id, "node_id": node.id, "before_milli": before, "after_milli": after}
        event_log.append(session, now_ms, "suspicion", body)
        if after < self._alarm:
            return
        drills.note_failure(session, receipt, E_SUSPICION, now_ms)
        counters.add_reason(session, node.id, E_SUSPICION)
        reason = (
            f"suspicion of {after / 1000:.2f} nats over {node.suspicion_rollouts} audited rollouts, "
            f"alarm at {self._alarm / 1000:.2f}"
        )
        self._discipline.ban(session, node, now_ms, code=E_SUSPICION, reason=reason, receipt_id=receipt.id)

    def _has_weighed(self, session: Session, receipt: Receipt) -> bool:
        """Whether another bundle of the same node and group passed a recomputation, or was chosen for one."""
        group = session.get_one(Unit, receipt.unit_id).group_id
        query = (
            select(Receipt.id)
            .join(Lease, Lease.id == Receipt.lease_id)
            .join(Unit, Unit.id == Lease.unit_id)
            .where(
                Unit.group_id == group, Receipt.node_id == receipt.node_id, Receipt.id != receipt.id,
                or_(Receipt.review, and_(Receipt.drawn, Receipt.state == ReceiptState.PASS)),
            )
        )
        return session.scalar(query.limit(1)) is not None

    def _failed(self, session: Session, receipt: Receipt, verdict: Verdict, now_ms: int) -> None:
        node, found = session.get_one(Node, receipt.node_id), verdict.code or ""
        receipt.state, receipt.decided_ms, receipt.code = ReceiptState.FAIL, now_ms, found
        node.rejected += receipt.rollouts
        counters.add(session, "rollouts_rejected", receipt.rollouts)
        counters.add_reason(session, node.id, found)
        drills.note_failure(session, receipt, found, now_ms)
        ledger.void(session, receipt.id, now_ms)  # a review may come after the pay, and after a ban for something else
        if not receipt.shadow:
            self._groups.reopen(session, session.get_one(Unit, receipt.unit_id))
        reason = next((f"{f.check}: expected {f.expected}, got {f.got}" for f in verdict.findings if not f.ok), found)
        self._discipline.ban(session, node, now_ms, code=found, reason=reason, receipt_id=receipt.id)

    def _inconclusive(self, session: Session, receipt: Receipt, found: str, now_ms: int) -> None:
        receipt.inconclusive += 1
        receipt.code = found
        if receipt.inconclusive >= self._config.max_inconclusive or (found == E_UNCALIBRATED and not receipt.review):
            self._set_aside(session, receipt, found, now_ms)
            return
        receipt.state, receipt.claimed_by = ReceiptState.PENDING, None
        receipt.available_ms = now_ms + self._config.requeue_ms * 2 ** (receipt.inconclusive - 1)

    def _set_aside(self, session: Session, receipt: Receipt, found: str, now_ms: int) -> None:
        """Not used and not punished. A bundle under review stays passed.

        Where it may lie in what the node handed in, the unit is offered to others, so that no node has a veto over its
        groups; where it does not, nobody else would fare better, and the group is given up.
        """
        if receipt.review:
            receipt.state, receipt.decided_ms = ReceiptState.PASS, now_ms
            self._stands(session, receipt, now_ms)
            return
        node, unit = session.get_one(Node, receipt.node_id), session.get_one(Unit, receipt.unit_id)
        receipt.state, receipt.decided_ms, receipt.code = ReceiptState.ASIDE, now_ms, found
        node.inconclusive += receipt.rollouts
        counters.add(session, "rollouts_inconclusive", receipt.rollouts)
        counters.add_reason(session, node.id, found)
        event_log.append(session, now_ms, "set-aside", {"receipt_id": receipt.id, "code": found})
        if found == E_UNCALIBRATED:
            # It is given less work, so that it holds nobody up, until bundles of it pass.
            node.uncalibrated = min(node.uncalibrated + 1, self._config.max_active_leases.bit_length())
        if found == E_DISAGREE:
            scrutiny.note_disagreement(session, self._run.manifest.audit, node, now_ms)
        if receipt.shadow:
            return
        group = session.get_one(Group, unit.group_id)
        if found in _OFFERED_ON:
            self._groups.reopen(session, unit)
        elif group.state in LIVE:
            self._groups.cancel(session, group, "inconclusive", now_ms)


def _samples(lease: Lease) -> list[int]:
    return LeaseMessage.from_payload(Envelope.from_bytes(lease.envelope).payload).samples


def _profile(receipt: Receipt) -> str:
    return Commitment.from_payload(Envelope.from_bytes(receipt.commitment).payload).profile
