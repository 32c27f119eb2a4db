"""The learner's loop: wait for verified groups, write the plan down, train, publish, tell.

Crash safety: the plan and its bundles are durable before the step, the publication is durable before anybody is told,
and every message may be sent again. A restart loads the newest resume point, makes the versions after it again from
the journal (checking that the roots agree), tells what was not told, and goes on with a plan that was left open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from learner.admission import Admission
from learner.batch import Batch, make_batch
from learner.checkpoint import Cursor, ResumePoints
from learner.config import LearnerConfig
from learner.crew import Training
from learner.journal import Journal, PlannedStep, Publication, plan_sha256
from learner.metrics import Metrics, as_micro, finite, warnings_of
from learner.office import LearnerClient
from learner.publisher import Publisher
from learner.retelling import E_RESUME, FORGOTTEN, Retelling
from learner.screen import screen_message
from learner.trainer import StepAbandoned, StepResult
from learner.waiting_room import ReadyGroup, WaitingRoom
from protocol.api import E_BATCH, AdmittedGroup
from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.errors import LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import BatchGroup, BatchPlan, CheckpointManifest, RunManifest, UpdateReceipt
from protocol.store import Store
from protocol.weights.chain import PublishedVersion
from protocol.weights.layout import State
from protocol.weights.state_root import hash_named, state_root

logger = logging.getLogger(__name__)

Outcome = Literal["complete", "stopped"]
_R = TypeVar("_R")


@dataclass
class _Newest:
    """The version that was published last."""

    manifest: CheckpointManifest
    envelope: Envelope
    state: State


class Learner:
    """One learner process, everything it touches handed in.

    Args:
        client: the coordinator.
        store: where bundles are read and chunks written.
        identity: the key that the run manifest names as learner.
        manifest: the run, checked.
        trainer: holding the run's first weights.
        journal, points: the work directory.
        should_stop: asked between microbatches and polls.
        show: given the metrics of each version that everybody was told of.
    """

    def __init__(self, *, client: LearnerClient, store: Store, identity: Identity, manifest: RunManifest,
                 trainer: Training, journal: Journal, points: ResumePoints, config: LearnerConfig, clock: Clock,
                 should_stop: Callable[[], bool] = lambda: False, publisher: Publisher | None = None,
                 show: Callable[[Metrics], None] = lambda _: None):
        self.client, self.manifest, self.trainer = client, manifest, trainer
        self.journal, self.points, self.config, self.clock = journal, points, config, clock
        self.should_stop, self.show = should_stop, show
        self.publisher = publisher or Publisher(
            client, store, identity, manifest, trainer.layout, config.publish, clock
        )
        self._beacons: dict[int, str] = {}
        self._room = WaitingRoom(store, Admission(manifest, self._beacons), journal)
        self._retelling = Retelling(client, journal, self.publisher)
        self._newest: _Newest | None = None
        self._trained = 0  #: version that the trainer's weights are, published or not
        self._saved = 0  #: version of the newest resume point; version 0 needs none

    @property
    def version(self) -> int:
        """Version of the newest published weights; -1 before the first."""
        return -1 if self._newest is None else self._newest.manifest.version

    def run(self, max_versions: int | None = None) -> Outcome:
        """Go on until the run (or ``max_versions``) is complete or ``should_stop`` says so.

        Raises:
            LocalFault: ``E_RESUME``, ``E_WORK_DIR``, the store's errors.
            PeerFault, Transient: the coordinator refused, or could not be reached within the client's deadline.
        """
        limits = [limit for limit in (max_versions, self.manifest.batch.max_versions) if limit is not None]
        last = min(limits, default=None)
        try:
            self.resume()
            self.publisher.start()
            while last is None or self.version < last:
                self._next_version()
            if self.version == self.manifest.batch.max_versions:
                self._insist("say that the run is complete", self.publisher.beat_last)
        except StepAbandoned:
            return "stopped"
        finally:
            self.publisher.close()
            self._save(force=True)
        return "complete"

    # -- resuming ----------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Get back to the newest version of the journal (or publish version 0), and tell what was not told.

        Raises:
            LocalFault: ``E_RESUME`` when the journal, the first weights and the settings do not fit together.
        """
        newest = self.journal.newest_publication()
        if newest is None:
            self._publish_first()
        else:
            self._restore(newest)
        publication = self._publication(self.version)
        if not self.journal.told(self.version):
            self._tell(self.version, publication)
        else:
            self._reach("renew the head", lambda: self.publisher.renew(self.version, publication.manifest))

    def _publish_first(self) -> None:
        state = self.trainer.published_state()
        made = self._insist("publish version 0", lambda: self.publisher.make(None, None, state))
        metrics = {"version": 0, "full_bytes": made.full_bytes, "anchor_bytes": made.anchor_bytes}
        self.journal.write_publication(0, Publication(manifest=made.envelope, receipt=None, metrics=metrics))
        self._adopt(made.manifest, made.envelope, state)

    def _restore(self, newest: int) -> None:
        point = self.points.newest(at_most=newest)
        version = 0
        if point is not None:
            self._check_cursor(point.cursor)
            self.trainer.load(point.folder)
            version = self._saved = self._trained = point.cursor.version
        self._check_root(version)
        for step in range(version + 1, newest + 1):
            logger.info("making a version again from the journal", extra={"version": step})
            self._train(self._planned(step))
            self._check_root(step)
        for known in range(max(0, newest - self.manifest.batch.max_lag_versions), newest + 1):
            manifest = CheckpointManifest.from_payload(self._publication(known).manifest.payload)
            self._beacons[known] = manifest.beacon
        envelope = self._publication(newest).manifest
        manifest = CheckpointManifest.from_payload(envelope.payload)
        self.publisher.recall(self.journal.since_anchor(newest))
        self._adopt(manifest, envelope, self.trainer.published_state())

    def _publication(self, version: int) -> Publication:
        publication = self.journal.publication(version)
        if publication is None:
            raise LocalFault(E_RESUME, f"the journal has no publication of version {version}")
        return publication

    def _planned(self, version: int) -> PlannedStep:
        planned = self.journal.plan(version)
        if planned is None:
            raise LocalFault(
                E_RESUME, f"version {version} cannot be made again", expected="its plan in the journal", got="none",
                hint="restore the work directory from a backup",
            )
        return planned

    def _check_cursor(self, cursor: Cursor) -> None:
        """A resume point and the journal must tell of the same step."""
        expected = self._cursor(cursor.version)
        if cursor != expected:
            raise LocalFault(
                E_RESUME, f"the resume point of version {cursor.version} is not of this journal", expected=expected,
                got=cursor, hint="restore checkpoints/ and batches/ from the same backup, or remove checkpoints/",
            )

    def _cursor(self, version: int) -> Cursor:
        manifest = CheckpointManifest.from_payload(self._publication(version).manifest.payload)
        plan = self.journal.plan(version) if version else None
        return Cursor(version, manifest.state_root, None if plan is None else plan_sha256(plan.plan))

    def _check_root(self, version: int) -> None:
        manifest = CheckpointManifest.from_payload(self._publication(version).manifest.payload)
        hash_id, expected = hash_named(manifest.state_hash), manifest.state_root
        got = state_root(self.trainer.layout, self.trainer.published_state(), hash_id=hash_id)
        if got != expected:
            raise LocalFault(
                E_RESUME, f"the weights are not those published as version {version}", expected=expected, got=got,
                hint="were --model, threads or processes changed? start with the ones the run began with",
            )

    # -- one version -------------------------------------------------------------------------------------

    def _next_version(self) -> None:
        """Make the next version, or drop a plan that the coordinator refuses.

        Raises:
            StepAbandoned: told to stop; whatever was begun is taken up again by ``resume``.
        """
        planned = self.journal.plan(self.version + 1) or self._plan()
        try:
            self._insist("post a batch plan", lambda: self.client.post_batch(planned.plan))
        except PeerFault as error:
            if error.code != E_BATCH:
                raise
            logger.warning("the coordinator refused a plan; making another", extra={"detail": str(error)})
            self.journal.drop_plan(planned.plan.version)
            self._pause()
            return
        started = self.clock.monotonic()
        result = self._train(planned)
        self._finish(planned, result, self.clock.monotonic() - started)

    def _insist(self, what: str, call: Callable[[], _R]) -> _R:
        """``call`` until it is no longer ``Transient``; each call has a deadline of its own."""
        while not self.should_stop():
            try:
                return call()
            except Transient as error:
                logger.warning("cannot %s now; trying again", what, extra={"code": error.code, "detail": str(error)})
                self._pause()
        raise StepAbandoned

    def _reach(self, what: str, call: Callable[[], object]) -> None:
        """Insist on ``call``; a coordinator that has forgotten what came before is told of that instead."""
        try:
            self._insist(what, call)
        except PeerFault as error:
            if error.code not in FORGOTTEN:
                raise
            self._insist("tell of versions again", lambda: self._retelling.tell(self.version))

    def _plan(self) -> PlannedStep:
        """Wait for enough groups and write the plan down."""
        wanted = self.manifest.batch.groups_per_batch
        started = said = self.clock.monotonic()
        while not self.should_stop():
            if self.publisher.forgotten():
                self._insist("tell of versions again", lambda: self._retelling.tell(self.version))
            ready = self._listed(wanted + self.journal.quarantined_groups)
            now = self.clock.monotonic()
            if len(ready) >= wanted:
                return self._write_plan(ready[:wanted], now - started)
            if now - said >= self.config.process.say_after_ms / 1000:
                said = now
                have = {"have": len(ready), "need": wanted, "waited_s": round(now - started)}
                logger.info("waiting for verified groups", extra={"version": self.version} | have)
            self._pause()
        raise StepAbandoned

    def _pause(self) -> None:
        """Wait until it is worth asking again; the trainer's other processes are told that this one lives."""
        self.trainer.wait()
        self.clock.sleep(self.config.process.poll_ms / 1000)

    def _listed(self, limit: int) -> list[ReadyGroup]:
        try:
            listed = self.client.admitted(limit)
        except Transient as error:
            logger.warning("the coordinator cannot be asked for groups", extra={"detail": str(error)})
            return []
        return self._room.ready(listed, self.version)

    def _write_plan(self, ready: list[ReadyGroup], wait_s: float) -> PlannedStep:
        plan = BatchPlan(
            run_id=self.manifest.run_id,
            version=self.version + 1,
            parent_version=self.version,
            groups=[BatchGroup(group=r.admitted.group, receipts=_receipts(r.admitted)) for r in ready],
            config_sha256=self.config.learning_sha256(),
            issued_at_ms=self.clock.now_ms(),
        )
        planned = PlannedStep(plan=plan, groups=[r.admitted for r in ready], wait_s=wait_s)
        self.journal.write_plan(planned)
        return planned

    def _train(self, planned: PlannedStep) -> StepResult:
        """Take the step of a plan from what journal and store hold, so that every repetition sees the same bytes."""
        if planned.plan.config_sha256 != self.config.learning_sha256():
            raise LocalFault(
                E_RESUME, f"version {planned.plan.version} was planned under other settings",
                expected=planned.plan.config_sha256, got=self.config.learning_sha256(),
                hint="start once with the earlier settings; change them after that version is out",
            )
        batch = self._insist("read a batch", lambda: self.batch_of(planned))
        result = self.trainer.train_step(batch, self.should_stop)
        self._trained = planned.plan.version
        return result

    def batch_of(self, planned: PlannedStep) -> Batch:
        """The training data of a plan.

        Raises:
            PeerFault: what ``Admission.admit`` finds.
            LocalFault, Transient: a bundle cannot be read from the store.
        """
        version = planned.plan.parent_version
        groups = [self._room.data_of(group, version) for group in planned.groups]
        return make_batch(groups, version, self.manifest.sampling, self.config)

    def _finish(self, planned: PlannedStep, result: StepResult, step_s: float) -> None:
        assert self._newest is not None
        started = self.clock.monotonic()
        state = self.trainer.published_state()
        newest = self._newest
        made = self._insist(
            "publish", lambda: self.publisher.make((newest.manifest, newest.envelope), newest.state, state)
        )
        metrics = finite(result.metrics | self._times(planned, result, step_s, self.clock.monotonic() - started) | {
            "version": planned.plan.version, "parent_version": planned.plan.parent_version,
            "state_root": made.manifest.state_root, "diff_bytes": made.diff_bytes, "anchor_bytes": made.anchor_bytes,
            "full_bytes": made.full_bytes, "diff_ratio_to_bound": made.ratio_to_bound,
            "quarantined_groups": self.journal.quarantined_groups,
            "dropped_tokens": self._room.dropped.tokens, "dropped_by_task": dict(self._room.dropped.by_task),
            "dropped_by_length": dict(self._room.dropped.by_length),
        })
        receipt = self._receipt(planned.plan, made, metrics)
        publication = Publication(manifest=made.envelope, receipt=receipt, metrics=metrics)
        self.journal.write_publication(planned.plan.version, publication)
        self._report(planned, result, metrics)
        self._adopt(made.manifest, made.envelope, state)
        self._tell(self.version, publication)
        self._save()

    def _times(self, planned: PlannedStep, result: StepResult, step_s: float, publish_s: float) -> Metrics:
        return {
            "wait_s": planned.wait_s, "step_s": step_s, "publish_s": publish_s,
            "threads": self.config.process.threads, "ranks": self.trainer.size,
            "tokens_per_s": result.metrics["tokens"] / step_s if step_s > 0 else 0.0,
        }

    def _receipt(self, plan: BatchPlan, made: PublishedVersion, metrics: Metrics) -> UpdateReceipt:
        return UpdateReceipt(
            run_id=plan.run_id,
            version=plan.version,
            parent_version=plan.parent_version,
            batch_sha256=plan_sha256(plan),
            manifest_sha256=made.envelope.digest,
            config_sha256=plan.config_sha256,
            metrics_micro=as_micro(metrics),
            issued_at_ms=self.clock.now_ms(),
        )

    def _report(self, planned: PlannedStep, result: StepResult, metrics: Metrics) -> None:
        if result.skipped not in (None, "no_signal"):
            self.journal.quarantine_batch(planned.plan.version, str(result.skipped))
        for warning in warnings_of(metrics):
            logger.warning(warning, extra={"version": planned.plan.version})

    def _adopt(self, manifest: CheckpointManifest, envelope: Envelope, state: State) -> None:
        self._newest = _Newest(manifest, envelope, state)
        self._beacons[manifest.version] = manifest.beacon
        oldest = manifest.version - self.manifest.batch.max_lag_versions
        for version in [version for version in self._beacons if version < oldest]:
            del self._beacons[version]

    def _tell(self, version: int, publication: Publication) -> None:
        receipt = publication.receipt
        self._reach("announce a version", lambda: self.publisher.tell(version, publication.manifest, receipt))
        if receipt is not None:
            self._tell_screen(receipt, publication.metrics)
            self.journal.write_metrics(publication.metrics)
            self.show(publication.metrics)
        self.journal.set_told(version)
        shown = ("version", "reward_mean", "loss", "kl", "ess", "diff_bytes", "skipped")
        metrics = publication.metrics
        logger.info("published", extra={name: metrics[name] for name in shown if name in metrics})

    def _tell_screen(self, receipt: UpdateReceipt, metrics: Metrics) -> None:
        """Report the step's nodes (T1'); made of what the journal holds, so that it is the same after a restart."""
        planned = self.journal.plan(receipt.version)
        if planned is None or not metrics.get("nodes"):
            return
        report = screen_message(
            self.manifest.run_id, receipt.version, metrics["nodes"], planned.groups, receipt.issued_at_ms
        )
        self._insist("report the nodes of a batch", lambda: self.client.post_screen(report))

    def _save(self, *, force: bool = False) -> None:
        """Write a resume point when one is due."""
        process = self.config.process
        if self._newest is None or self._trained != self.version or self.trainer.lost:
            return
        if self.version - self._saved < (1 if force else process.checkpoint_every_versions):
            return
        self.points.save(self._cursor(self.version), self.trainer.save, process.keep_checkpoints)
        self._saved = self.version


def _receipts(group: AdmittedGroup) -> list[str]:
    """Distinct receipts in the order of the samples."""
    return list(dict.fromkeys(sample.receipt_sha256 for sample in group.samples))
