"""An offline audit of one evidence file, against a root key and whatever checkpoints are at hand."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.errors import E_WRONG_KEY, AssayError, PeerFault
from protocol.evidence import Evidence, decode
from protocol.identity import key_id
from protocol.messages import Finding, Lease, RunManifest, Verdict
from verifier.checkpoints import CheckpointBook
from verifier.findings import Judgement
from verifier.material import Material
from verifier.model_files import fetch_model_files
from verifier.model_shelf import ModelShelf
from verifier.session import Recomputer, Session
from verifier.submission import Submission
from verifier.tokens import Rewards


@dataclass(frozen=True)
class Audit:
    """The end of an offline audit and what it was about."""

    judgement: Judgement
    run: RunManifest
    root: str  #: root public key, hex
    node_id: str
    lease: Lease
    verdicts: tuple[Verdict, ...]  #: of the run's verifiers, as found in the evidence
    verdicts_ignored: int  #: others in the evidence, which no verifier of the run signed
    recomputed: bool  #: False when no checkpoint was given, so that T2 was left out

    @property
    def first_failure(self) -> Finding | None:
        """The first failed finding that names a place, else the first failed one."""
        failed = [finding for finding in self.judgement.findings if not finding.ok]
        placed = [finding for finding in failed if finding.position is not None]
        return next(iter(placed or failed), None)


def read_evidence(data: bytes, root: bytes | None) -> tuple[Evidence, RunManifest]:
    """Evidence whose run manifest is signed by the root key.

    Raises:
        PeerFault: the file is malformed, or its manifest is not what the root key signed (``E_WRONG_KEY``).
    """
    evidence = decode(data)
    if root is not None and root != evidence.root_public_key:
        raise PeerFault(
            E_WRONG_KEY, "the evidence is from a run of another root key", expected=root.hex(),
            got=evidence.root_public_key.hex(),
        )
    return evidence, RunManifest.open(evidence.run_manifest, evidence.root_public_key)


def audit(evidence: Evidence, run: RunManifest, material: Material) -> Audit:
    """Run every check that the material allows. Without a checkpoint, T2 and what needs the model's files are left out.

    Raises:
        PeerFault: the lease or a checkpoint manifest is not signed by its role: this is no evidence at all.
    """
    lease = Lease.open(evidence.lease, run.roles.coordinator, run_id=run.run_id)
    book = CheckpointBook(run, complete=False)
    book.add(evidence.checkpoints)
    recomputed = bool(material.models or material.stores)
    submission = Submission(
        evidence.lease, evidence.commitment, evidence.receipt, evidence.node_public_key, evidence.bundle, recomputed
    )
    with tempfile.TemporaryDirectory(prefix="assay-audit-") as folder:
        model_dir = Path(folder)
        shelf = _Shelf(run, book, material, model_dir)
        rewards = None
        if recomputed:
            rewards = _Rewards(run, material, model_dir)
        judgement = Session(run, book, rewards, shelf).judge([submission])[0]
    verdicts = tuple(_verdicts(evidence, run))
    return Audit(
        judgement, run, evidence.root_public_key.hex(), key_id(evidence.node_public_key), lease, verdicts,
        len(evidence.verdicts) - len(verdicts), recomputed,
    )


class _Rewards(Rewards):
    """Rewards whose tokenizer files are looked for when they are first needed."""

    def __init__(self, run: RunManifest, material: Material, model_dir: Path):
        super().__init__(run, model_dir, material.fetch)
        self._material = material

    def check_prompt(self, lease: Lease) -> None:
        fetch_model_files(self._run.model, self._model_dir, self._material.fetch)
        super().check_prompt(lease)


class _Shelf:
    """A model shelf whose files and weights are looked for when they are first needed."""

    def __init__(self, run: RunManifest, book: CheckpointBook, material: Material, model_dir: Path):
        self._run, self._book, self._material, self._model_dir = run, book, material, model_dir
        self._shelf: ModelShelf | None = None

    def __call__(self, tier: Literal["T2", "T3"]) -> Recomputer:
        if self._shelf is None:
            fetch_model_files(self._run.model, self._model_dir, self._material.fetch)
            states = self._material.states(self._run, self._book)
            self._shelf = ModelShelf(self._model_dir, self._material.layout(self._run), states)
        return self._shelf(tier)


def _verdicts(evidence: Evidence, run: RunManifest) -> list[Verdict]:
    """Verdicts in the evidence that a verifier of the run signed; others are dropped."""
    found = []
    for envelope in evidence.verdicts:
        for key in run.roles.verifiers:
            if key_id(bytes.fromhex(key)) not in envelope.signatures:
                continue
            try:
                found.append(Verdict.open(envelope, key, run_id=run.run_id))
            except AssayError:
                continue
    return found
