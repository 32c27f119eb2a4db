"""What the learner takes: admitted groups, the batch it is about to train on, the step it finished."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from coordinator import counters, event_log, ledger, steering
from coordinator.config import CoordinatorConfig
from coordinator.groups import Groups, head_version
from coordinator.models import Batch, Checkpoint, Group, GroupState, Lease, Node, Receipt, ReceiptState, Unit, Verdict
from coordinator.replicas import Replicas
from coordinator.run import Run
from protocol.api import (
    E_BATCH,
    Ack,
    AdmittedGroup,
    AdmittedSample,
    BatchReply,
    BundleProof,
    TrainedGroup,
    TrainedSample,
)
from protocol.envelope import Envelope
from protocol.errors import E_CONFLICT, E_NOT_FOUND, LocalFault, PeerFault
from protocol.messages import BatchGroup, BatchPlan, UpdateReceipt


class Batches:
    """The learner's side of the books."""

    def __init__(self, run: Run, groups: Groups, replicas: Replicas, config: CoordinatorConfig):
        self._hold_ms = config.review_hold_ms
        self._run, self._groups, self._replicas, self._rules = run, groups, replicas, run.manifest.batch

    def admitted(self, session: Session, limit: int, now_ms: int) -> list[AdmittedGroup]:
        """Complete, verified, unconsumed groups within the staleness bound, oldest first, but those held back.

        A group is held back while one of its bundles is under review, for ``review_hold_ms`` at most: a review that
        does not come to an end stalls nobody for longer. Each bundle is put under review once.
        """
        oldest = (head_version(session) or 0) - self._rules.max_lag_versions
        query = select(Group).where(
            Group.state == GroupState.ADMITTED, Group.start_version >= oldest, Group.id.not_in(self._held(now_ms))
        )
        groups = session.scalars(query.order_by(Group.id).limit(limit)).all()
        return [_describe(session, group) for group in groups]

    def _held(self, now_ms: int) -> Select[int]:
        """Groups of which a bundle that counts is under review, and not for too long."""
        undecided = (ReceiptState.PENDING, ReceiptState.CLAIMED)
        return select(Unit.group_id).join(Receipt, Receipt.id == Unit.receipt_id).where(
            Receipt.state.in_(undecided), Receipt.review.is_(True), Receipt.review_ms > now_ms - self._hold_ms
        )

    def plan(self, session: Session, envelope: Envelope, now_ms: int) -> Ack:
        """Consume the groups of a batch and pay for them. The same plan again changes nothing.

        Raises:
            PeerFault: ``E_WRONG_KEY``; ``E_CONFLICT`` for a second, different plan of one version; ``E_BATCH`` when
                it does not fit what is admitted (ask for the admitted groups again); what is wrong with the envelope.
        """
        plan = self._run.from_learner(envelope, BatchPlan)
        known = session.get(Batch, plan.version)
        if known is not None:
            if known.sha256 != envelope.digest:
                raise PeerFault(
                    E_CONFLICT, "this version has another batch", expected=known.sha256, got=envelope.digest,
                    hint=f"GET /v1/batches/{plan.version} returns it",
                )
            return Ack(duplicate=True)
        newest = head_version(session)
        if newest is None or (plan.parent_version, plan.version) != (newest, newest + 1):
            raise PeerFault(
                E_BATCH, "the batch does not follow the newest version", expected=f"parent {newest}",
                got=f"{plan.parent_version} -> {plan.version}",
            )
        if not plan.groups or len({entry.group for entry in plan.groups}) != len(plan.groups):
            raise PeerFault(E_BATCH, "a batch names each of its groups once", expected="at least one group")
        receipts = [r for entry in plan.groups for r in self._consume(session, entry, plan, now_ms)]
        ledger.settle(session, [receipt.id for receipt in receipts], now_ms)
        self._record(session, plan, envelope, receipts, now_ms)
        return Ack()

    def update(self, session: Session, envelope: Envelope, now_ms: int) -> Ack:
        """Record a finished step.

        Raises:
            PeerFault: ``E_WRONG_KEY``; ``E_BATCH`` when it contradicts the plan or the checkpoint; ``E_CONFLICT`` for
                a second, different receipt; what is wrong with the envelope.
        """
        receipt = self._run.from_learner(envelope, UpdateReceipt)
        batch = session.get(Batch, receipt.version)
        checkpoint = session.get(Checkpoint, receipt.version)
        if batch is None or batch.sha256 != receipt.batch_sha256:
            raise PeerFault(
                E_BATCH, "no such batch", expected=batch.sha256 if batch else "a batch plan first",
                got=receipt.batch_sha256,
            )
        if checkpoint is None or checkpoint.sha256 != receipt.manifest_sha256:
            raise PeerFault(
                E_BATCH, "no such checkpoint", expected=checkpoint.sha256 if checkpoint else "a checkpoint first",
                got=receipt.manifest_sha256,
            )
        if batch.update is not None:
            earlier = Envelope.from_bytes(batch.update)
            if UpdateReceipt.from_payload(earlier.payload).config_sha256 != receipt.config_sha256:
                raise PeerFault(
                    E_CONFLICT, "this version has another update receipt", expected=earlier.digest, got=envelope.digest
                )
            return Ack(duplicate=True)
        batch.update, batch.metrics = envelope.to_bytes(), dict(receipt.metrics_micro)
        event_log.append(session, now_ms, "update", {"version": receipt.version, "sha256": envelope.digest})
        return Ack()

    def batch(self, session: Session, version: int) -> BatchReply:
        """The plan of a version with the groups it consumed, so that a learner can pick a broken step up again.

        Raises:
            LocalFault: ``E_NOT_FOUND``.
        """
        row = session.get(Batch, version)
        if row is None:
            raise LocalFault(E_NOT_FOUND, "no batch of this version", got=version)
        query = select(Group).where(Group.consumed_version == version).order_by(Group.id)
        groups = [self._shown(session, group) for group in session.scalars(query).all()]
        update = Envelope.from_bytes(row.update) if row.update is not None else None
        return BatchReply(plan=Envelope.from_bytes(row.plan), groups=groups, update=update)

    def _shown(self, session: Session, group: Group) -> TrainedGroup:
        """A consumed group, without the bundles that somebody could still hand in a copy of."""
        withheld = {r.sha256 for _, r in _verified(session, group) if self._replicas.withheld(session, r)}
        whole = _describe(session, group, proofs=False)
        samples = [
            TrainedSample.model_validate(dict(s) | ({"object_sha256": None} if s.receipt_sha256 in withheld else {}))
            for s in whole.samples
        ]
        return TrainedGroup.model_validate(dict(whole) | {"samples": samples})

    def _consume(self, session: Session, entry: BatchGroup, plan: BatchPlan, now_ms: int) -> Sequence[Receipt]:
        group = session.get(Group, entry.group)
        state = "unknown" if group is None else group.state
        if group is None or state != GroupState.ADMITTED:
            raise PeerFault(E_BATCH, f"group {entry.group} cannot be used", expected="an admitted group", got=state)
        if session.scalar(self._held(now_ms).where(Unit.group_id == group.id).limit(1)) is not None:
            raise PeerFault(E_BATCH, f"a bundle of group {entry.group} is under review", expected="an admitted group")
        if group.start_version < plan.parent_version - self._rules.max_lag_versions:
            raise PeerFault(E_BATCH, f"group {entry.group} is too stale", got=group.start_version)
        receipts = [receipt for _, receipt in _verified(session, group)]
        if sorted(entry.receipts) != sorted({receipt.sha256 for receipt in receipts}):
            raise PeerFault(E_BATCH, f"group {entry.group} rests on other receipts", got=len(entry.receipts))
        group.state, group.consumed_version = GroupState.CONSUMED, plan.version
        lag = plan.parent_version - group.start_version
        counters.add(session, f"lag:{lag}", sum(receipt.rollouts for receipt in receipts))
        steering.compare(session, receipts, self._run.manifest.sampling.max_new_tokens, now_ms)
        return receipts

    def _record(
        self, session: Session, plan: BatchPlan, envelope: Envelope, receipts: Sequence[Receipt], now_ms: int
    ) -> None:
        rewards = [int(reward) for receipt in receipts for reward in (receipt.rewards or {}).values()]
        lags = [
            (plan.parent_version - session.get_one(Group, entry.group).start_version) * 1000 for entry in plan.groups
        ]
        tokens = sum(receipt.tokens for receipt in receipts)
        session.add(
            Batch(
                version=plan.version, sha256=envelope.digest, plan=envelope.to_bytes(), posted_ms=now_ms,
                rollouts=len(rewards), tokens=tokens, reward_micro=sum(rewards) // max(1, len(rewards)),
                lag_milli=sum(lags) // len(lags),
            )
        )
        counters.add(session, "tokens_trained", tokens)
        body = {"version": plan.version, "sha256": envelope.digest, "groups": len(plan.groups)}
        event_log.append(session, now_ms, "batch", body)


def _verified(session: Session, group: Group) -> list[tuple[Unit, Receipt]]:
    query = (
        select(Unit, Receipt)
        .join(Receipt, Receipt.id == Unit.receipt_id)
        .where(Unit.group_id == group.id)
        .order_by(Unit.id)
    )
    return [(unit, receipt) for unit, receipt in session.execute(query)]


def _describe(session: Session, group: Group, *, proofs: bool = True) -> AdmittedGroup:
    """A group as the learner gets it; ``proofs`` name the bundles."""
    samples: list[AdmittedSample] = []
    proved: dict[str, BundleProof] = {}
    for unit, receipt in _verified(session, group):
        lease = Envelope.from_bytes(session.get_one(Lease, receipt.lease_id).envelope)
        if proofs:
            proved[receipt.sha256] = _proof(session, receipt)
        samples += [
            AdmittedSample(
                sample=sample, receipt_sha256=receipt.sha256, object_sha256=receipt.object_sha256, lease=lease,
                reward_micro=int((receipt.rewards or {})[str(sample)]), node_id=receipt.node_id,
            )
            for sample in unit.samples
        ]
    return AdmittedGroup(
        group=group.id, environment=group.environment, start_version=group.start_version,
        prompt_tokens=group.prompt_tokens, samples=sorted(samples, key=lambda s: s.sample),
        proofs=list(proved.values()),
    )


def _proof(session: Session, receipt: Receipt) -> BundleProof:
    """What stands behind a bundle; its rewards are those of the first verdict that passed it."""
    passes = select(Verdict).where(Verdict.receipt_id == receipt.id, Verdict.outcome == "pass")
    verdict = session.scalars(passes.order_by(Verdict.id).limit(1)).one()
    return BundleProof(
        node_public_key=session.get_one(Node, receipt.node_id).public_key,
        commitment=Envelope.from_bytes(receipt.commitment), receipt=Envelope.from_bytes(receipt.envelope),
        verdict=Envelope.from_bytes(verdict.envelope),
    )
