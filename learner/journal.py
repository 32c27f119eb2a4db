"""The learner's record of its steps: what it was about to train on, what came out, what it may not use.

::

    run.json                           the run manifest, as its root key signed it
    settings/DIGEST.json               the learner's settings, by the digest that plans name
    batches/00000012/plan.json         write-ahead: the plan, and the admitted groups as the coordinator gave them
    batches/00000012/publication.json  what the step made, before anybody is told
    batches/00000012/told              empty: everybody was told
    quarantine.jsonl                   groups and batches that must not be trained on, with the reason
    metrics.jsonl                      one line per version
    metrics.prom                       the newest of them for Prometheus

With the model's first weights and the bundles, which the object store keeps, this is enough to make every later
version again, byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from learner.config import LearnerConfig
from learner.disk import E_WORK_DIR, append_line, disk_faults, write_file
from learner.metrics import Metrics
from protocol.api import AdmittedGroup, WireEnvelope
from protocol.disk import json_lines
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, LocalFault
from protocol.messages import BatchPlan, CheckpointManifest, UpdateReceipt

_R = TypeVar("_R", bound=BaseModel)


class PlannedStep(BaseModel):
    """The write-ahead record of one step."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    plan: BatchPlan
    groups: list[AdmittedGroup]
    wait_s: float  #: seconds spent waiting for these groups


class Publication(BaseModel):
    """What a step made. Version 0 has no receipt: no batch made it."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    manifest: WireEnvelope
    receipt: UpdateReceipt | None
    metrics: dict[str, Any]


@dataclass
class Journal:
    """The record under one work directory. All files are written whole and durably."""

    work: Path
    _quarantined: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        with disk_faults(f"open {self.work}"):
            (self.work / "batches").mkdir(parents=True, exist_ok=True)
        self._quarantined = {line["group"] for line in _lines(self.work / "quarantine.jsonl") if "group" in line}

    # -- the run -----------------------------------------------------------------------------------------

    def write_run(self, manifest: Envelope) -> None:
        """Keep the signed run manifest, so that the record can be read without the coordinator."""
        write_file(self.work / "run.json", json.dumps(manifest.to_dict()).encode())

    def run(self) -> Envelope:
        """The run manifest that was kept; whoever uses it checks the signature.

        Raises:
            LocalFault: ``E_NOT_FOUND``.
            PeerFault: it is not an envelope.
        """
        path = self.work / "run.json"
        try:
            return Envelope.from_dict(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise LocalFault(
                E_NOT_FOUND, f"{path} cannot be read", got=str(error), hint="is this a learner's work directory?"
            ) from None

    def write_settings(self, config: LearnerConfig) -> None:
        """Keep the settings under the digest that plans name."""
        path = self.work / "settings" / f"{config.learning_sha256()}.json"
        if not path.exists():
            write_file(path, config.model_dump_json(indent=2).encode())

    def settings(self, config_sha256: str) -> LearnerConfig:
        """The settings with this digest.

        Raises:
            LocalFault: ``E_NOT_FOUND``; ``E_WORK_DIR`` when they are damaged.
        """
        path = self.work / "settings" / f"{config_sha256}.json"
        if not path.is_file():
            raise LocalFault(E_NOT_FOUND, "the settings of a step are not in the journal", expected=path, got="no file")
        with disk_faults(f"read {path}"):
            data = path.read_bytes()
        try:
            config = LearnerConfig.model_validate_json(data)
        except ValidationError as error:
            raise LocalFault(E_WORK_DIR, f"{path} is damaged", got=str(error.errors(include_url=False)[0])) from None
        if config.learning_sha256() != config_sha256:
            raise LocalFault(E_WORK_DIR, f"{path} is damaged", expected=config_sha256, got=config.learning_sha256())
        return config

    # -- one step ----------------------------------------------------------------------------------------

    def write_plan(self, step: PlannedStep) -> None:
        """Write down a step before it is taken."""
        write_file(self._batch(step.plan.version) / "plan.json", step.model_dump_json().encode())

    def plan(self, version: int) -> PlannedStep | None:
        """The plan of the step that makes ``version``, or None."""
        return self._read(PlannedStep, version, "plan.json")

    def drop_plan(self, version: int) -> None:
        """Forget a plan that the coordinator refused; nothing was trained on it."""
        with disk_faults(f"remove the plan of version {version}"):
            shutil.rmtree(self._batch(version))

    def write_publication(self, version: int, publication: Publication) -> None:
        """Write down what the step made."""
        write_file(self._batch(version) / "publication.json", publication.model_dump_json().encode())

    def publication(self, version: int) -> Publication | None:
        """What the step made, or None when it is not done."""
        return self._read(Publication, version, "publication.json")

    def since_anchor(self, newest: int) -> list[CheckpointManifest]:
        """Manifests of the publications from the last anchor to ``newest``, as far as there is no gap; ascending."""
        found: list[CheckpointManifest] = []
        for version in range(newest, -1, -1):
            publication = self.publication(version)
            if publication is None:
                break
            found.insert(0, CheckpointManifest.from_payload(publication.manifest.payload))
            if found[0].anchor:
                break
        return found

    def set_told(self, version: int) -> None:
        """Everybody knows of ``version``."""
        write_file(self._batch(version) / "told", b"")

    def told(self, version: int) -> bool:
        """Whether everybody knows of ``version``."""
        return (self._batch(version) / "told").exists()

    def newest_publication(self) -> int | None:
        """Newest version that was made, or None."""
        made = [int(path.parent.name) for path in (self.work / "batches").glob("[0-9]*/publication.json")]
        return max(made, default=None)

    # -- what must not be used ---------------------------------------------------------------------------

    def quarantined(self, group: int) -> bool:
        """Whether the group may not be trained on."""
        return group in self._quarantined

    def quarantine_group(self, group: int, code: str, reason: str) -> None:
        """Never train on this group."""
        self._quarantined.add(group)
        append_line(self.work / "quarantine.jsonl", json.dumps({"group": group, "code": code, "reason": reason}))

    def quarantine_batch(self, version: int, reason: str) -> None:
        """Note that the batch of the step to ``version`` was not learned from."""
        append_line(self.work / "quarantine.jsonl", json.dumps({"batch": version, "reason": reason}))

    @property
    def quarantined_groups(self) -> int:
        """How many groups may not be used."""
        return len(self._quarantined)

    # -- metrics -----------------------------------------------------------------------------------------

    def write_metrics(self, metrics: Metrics) -> None:
        """Add the line of a version unless it is there."""
        path = self.work / "metrics.jsonl"
        last = max((int(line["version"]) for line in _lines(path)), default=-1)
        if metrics["version"] > last:
            append_line(path, json.dumps(metrics, allow_nan=False))

    def metrics(self) -> list[Metrics]:
        """The lines of all versions, oldest first."""
        return _lines(self.work / "metrics.jsonl")

    # -- files -------------------------------------------------------------------------------------------

    def _batch(self, version: int) -> Path:
        return self.work / "batches" / f"{version:08d}"

    def _read(self, cls: type[_R], version: int, name: str) -> _R | None:
        path = self._batch(version) / name
        if not path.is_file():
            return None
        with disk_faults(f"read {path}"):
            data = path.read_bytes()
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise LocalFault(E_WORK_DIR, f"{path} is damaged", got=str(error.errors(include_url=False)[0])) from None


def plan_sha256(plan: BatchPlan) -> str:
    """Hex SHA-256 of a plan's payload: what update receipts and resume points name it by."""
    return hashlib.sha256(plan.to_payload()).hexdigest()


def _lines(path: Path) -> list[dict[str, Any]]:
    with disk_faults(f"read {path}"):
        return list(json_lines(path))
