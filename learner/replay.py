"""Making a version again from the record, and comparing it with what was published.

What is needed: the model's first weights or an earlier resume point, the plan of each step since (written before the
step), the settings each plan names, and the bundles in the object store. Nobody is asked and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from learner.admission import Admission
from learner.batch import make_batch
from learner.checkpoint import ResumePoints
from learner.config import LearnerConfig
from learner.journal import Journal, PlannedStep, Publication, plan_sha256
from learner.places import read_model
from learner.trainer import Trainer
from protocol import bundle
from protocol.errors import E_NOT_FOUND, LocalFault, code
from protocol.messages import CheckpointManifest, RunManifest
from protocol.store import Store
from protocol.weights.state_root import hash_named, state_root

E_LEARNER_REPLAY = code("E_LEARNER_REPLAY", "a version made again from the record is not the one that was published")


@dataclass(frozen=True)
class ReplayedStep:
    """One version made again."""

    version: int
    published_root: str
    root: str
    skipped: str | None  #: why the step left the weights alone, if it did

    @property
    def agrees(self) -> bool:
        """Whether the weights are bit for bit what was published."""
        return self.root == self.published_root


class Replay:
    """Makes versions again.

    Args:
        manifest: the run, checked against its root key.
        open_trainer: a trainer with the run's first weights under the settings of a step.
    """

    def __init__(self, journal: Journal, points: ResumePoints, store: Store, manifest: RunManifest,
                 open_trainer: Callable[[LearnerConfig], Trainer]):
        self._journal, self._points, self._store, self._manifest = journal, points, store, manifest
        self._open_trainer = open_trainer
        self._trainer: Trainer | None = None

    def versions(self, version: int) -> Iterator[ReplayedStep]:
        """The versions from the newest resume point before ``version`` (else the first weights) up to ``version``.

        Raises:
            LocalFault: ``E_NOT_FOUND`` when the record lacks a part; ``E_LEARNER_REPLAY`` when it contradicts itself.
            PeerFault: a bundle is not what was admitted.
        """
        self._publication(version)
        point = self._points.newest(at_most=version - 1)
        first = 1 if point is None else point.cursor.version + 1
        if version == 0:
            yield self._first()
        for step in range(first, version + 1):
            planned = self._planned(step)
            trainer = self._trainer_for(planned)
            if step == first and point is not None:
                trainer.load(point.folder)
            yield self._step(planned, trainer)

    def _first(self) -> ReplayedStep:
        trainer = self._open_trainer(LearnerConfig())
        return self._compare(0, trainer, None)

    def _step(self, planned: PlannedStep, trainer: Trainer) -> ReplayedStep:
        parent = planned.plan.parent_version
        admission = Admission(self._manifest, self._beacons(parent), unproved=True)
        groups = []
        for group in planned.groups:
            hashes = sorted({sample.object_sha256 for sample in group.samples})
            objects = {sha256: self._store.get(sha256, bundle.MAX_BYTES) for sha256 in hashes}
            groups.append(admission.admit(group, objects, parent))
        batch = make_batch(groups, parent, self._manifest.sampling, trainer.config)
        return self._compare(planned.plan.version, trainer, trainer.train_step(batch).skipped)

    def _compare(self, version: int, trainer: Trainer, skipped: str | None) -> ReplayedStep:
        published = CheckpointManifest.from_payload(self._publication(version).manifest.payload)
        hash_id = hash_named(published.state_hash)
        replayed = state_root(trainer.layout, trainer.published_state(), hash_id=hash_id)
        return ReplayedStep(version, published.state_root, replayed, skipped)

    def _trainer_for(self, planned: PlannedStep) -> Trainer:
        """The trainer as the step before left it, under the settings of this step."""
        config = self._journal.settings(planned.plan.config_sha256)
        if self._trainer is None:
            self._trainer = self._open_trainer(config)
        elif self._trainer.config.learning_sha256() != planned.plan.config_sha256:
            state = self._trainer.state_dict()
            self._trainer = self._open_trainer(config)
            self._trainer.load_state_dict(state)
        return self._trainer

    def _planned(self, version: int) -> PlannedStep:
        planned, receipt = self._journal.plan(version), self._publication(version).receipt
        if planned is None or receipt is None:
            raise LocalFault(E_NOT_FOUND, f"the journal lacks the plan of version {version}")
        ranks = self._publication(version).metrics.get("ranks", 1)
        if ranks != 1:
            raise LocalFault(
                E_LEARNER_REPLAY, f"version {version} was made by several processes, which add in another order",
                expected="a version made by 1 process", got=f"{ranks} processes",
                hint="a learner of as many processes makes it again when it resumes from an earlier resume point",
            )
        if receipt.batch_sha256 != plan_sha256(planned.plan):
            raise LocalFault(
                E_LEARNER_REPLAY, f"the receipt of version {version} names another batch",
                expected=receipt.batch_sha256, got=plan_sha256(planned.plan),
            )
        return planned

    def _publication(self, version: int) -> Publication:
        publication = self._journal.publication(version)
        if publication is None:
            raise LocalFault(E_NOT_FOUND, f"version {version} is not in the journal", expected="a version made here")
        return publication

    def _beacons(self, version: int) -> dict[int, str]:
        oldest = max(0, version - self._manifest.batch.max_lag_versions)
        manifests = (self._publication(v).manifest for v in range(oldest, version + 1))
        return {(m := CheckpointManifest.from_payload(e.payload)).version: m.beacon for e in manifests}


def first_trainer(model: Path, manifest: RunManifest) -> Callable[[LearnerConfig], Trainer]:
    """Opens trainers with the first weights of ``model``.

    Raises:
        LocalFault: ``E_NOT_FOUND``, ``E_STATE``.
    """
    layout, state = read_model(model)
    return lambda config: Trainer.open(model, layout, state, config, manifest.sampling)
