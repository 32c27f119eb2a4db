"""An offline audit of one evidence file, against a root key and whatever checkpoints are at hand."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.causes import likely_causes
from protocol.envelope import Envelope
from protocol.errors import E_OBJECT_HASH, E_WRONG_KEY, AssayError, PeerFault, code
from protocol.evidence import Evidence, decode
from protocol.identity import key_id
from protocol.messages import Commitment, Finding, Lease, RunManifest, Verdict
from protocol.model_files import fetch_model_files
from verifier.checkpoints import CheckpointBook
from verifier.divergence import Residuals
from verifier.findings import Judgement, Report
from verifier.log_proofs import check_log
from verifier.material import Material
from verifier.model_shelf import ModelShelf
from verifier.session import Recomputer, Session
from verifier.structure import open_commitment
from verifier.submission import Opened, Submission
from verifier.tokens import Rewards

E_OTHER_RECEIPT = code("E_OTHER_RECEIPT", "a verdict is on another submission than the one at hand")


@dataclass(frozen=True)
class IgnoredVerdict:
    """A verdict in the evidence that counts for nothing."""

    signers: tuple[str, ...]  #: key ids that it claims to be signed by
    code: str
    why: str  #: what is wrong with it


@dataclass(frozen=True)
class Audit:
    """The end of an offline audit and what it was about."""

    judgement: Judgement
    run: RunManifest
    root: str  #: root public key, hex
    node_id: str
    lease: Lease
    verdicts: tuple[Verdict, ...]  #: of the run's verifiers, as found in the evidence
    ignored: tuple[IgnoredVerdict, ...]  #: others in the evidence; they had no part in the judgement
    in_log: bool  #: the file shows that receipt and verdicts, and no other verdicts, are in the run's log
    recomputed: bool  #: False when no checkpoint was given, so that T2 was left out
    profile: str | None = None  #: engine profile that the commitment claims; None when it does not open
    bundle: bytes = b""  #: encoded, as in the evidence
    residuals: tuple[Residuals, ...] = ()  #: of T2, one per rollout; empty when it was not run to its end

    @property
    def first_failure(self) -> Finding | None:
        """Of the failed findings the one with the first place (sample, then position), else the first failed one."""
        failed = [finding for finding in self.judgement.findings if not finding.ok]
        placed = [finding for finding in failed if finding.position is not None]
        if placed:
            return min(placed, key=lambda finding: (finding.sample or 0, finding.position or 0))
        return next(iter(failed), None)

    @property
    def causes(self) -> tuple[str, ...]:
        """What usually lies behind the outcome's code, found by that check."""
        code = self.judgement.code
        found = (finding.check for finding in self.judgement.findings if not finding.ok and finding.code == code)
        return likely_causes(code, next(found, ""))

    @property
    def verdicts_ignored(self) -> int:
        """How many verdicts in the evidence count for nothing."""
        return len(self.ignored)


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
        PeerFault: the lease, the commitment or a checkpoint manifest is not signed by whom it must be, the commitment
            is for another lease, or the bundle is not the one that it names (``E_OBJECT_HASH``): no evidence at all.
    """
    lease = Lease.open(evidence.lease, run.roles.coordinator, run_id=run.run_id)
    book = CheckpointBook(run)
    book.add(evidence.checkpoints)
    recomputed = bool(material.models or material.stores)
    submission = Submission(
        evidence.lease, evidence.commitment, evidence.receipt, evidence.node_public_key, evidence.bundle, recomputed
    )
    try:
        commitment = open_commitment(run, submission, lease)
    except PeerFault as error:
        error.step = "T0.1"
        raise
    _check_bundle(evidence, commitment)
    with tempfile.TemporaryDirectory(prefix="assay-audit-") as folder:
        model_dir = Path(folder)
        shelf = _Shelf(run, book, material, model_dir)
        rewards = None
        if recomputed:
            rewards = _Rewards(run, material, model_dir)
        judgement = Session(run, book, rewards, shelf).judge([submission])[0]
        residuals = shelf.residuals
    signed, ignored = verdicts_in(evidence, run, lease)
    verdicts = tuple(verdict for _, verdict in signed)
    log = Report()
    in_log = check_log(evidence, run, signed, log)
    return Audit(
        log.before(judgement), run, evidence.root_public_key.hex(), lease.node_id, lease, verdicts, ignored, in_log,
        recomputed, commitment.profile, evidence.bundle, residuals,
    )


class _Rewards(Rewards):
    """Rewards whose tokenizer files are looked for when they are first needed."""

    def __init__(self, run: RunManifest, material: Material, model_dir: Path):
        super().__init__(run, model_dir, material.fetch)
        self._material = material

    def check_prompt(self, lease: Lease) -> None:
        fetch_model_files(self._run.model.files, self._model_dir, self._material.fetch)
        super().check_prompt(lease)


class _Shelf:
    """A model shelf whose files and weights are looked for when they are first needed."""

    def __init__(self, run: RunManifest, book: CheckpointBook, material: Material, model_dir: Path):
        self._run, self._book, self._material, self._model_dir = run, book, material, model_dir
        self._shelf: ModelShelf | None = None
        self.residuals: tuple[Residuals, ...] = ()  #: what T2 measured

    def __call__(self, tier: Literal["T2", "T3"]) -> Recomputer:
        if self._shelf is None:
            fetch_model_files(self._run.model.files, self._model_dir, self._material.fetch)
            states = self._material.states(self._run, self._book)
            self._shelf = ModelShelf(self._model_dir, self._material.layout(self._run), states)
        recomputer = self._shelf(tier)
        return _Recording(recomputer, self) if tier == "T2" else recomputer


@dataclass(frozen=True)
class _Recording:
    """A recomputer that leaves what it measured with the shelf, for the page of the audit."""

    recomputer: Recomputer
    shelf: _Shelf

    def residuals(self, submissions: Sequence[Opened]) -> list[list[Residuals]]:
        found = self.recomputer.residuals(submissions)
        self.shelf.residuals = tuple(found[0])
        return found


def _check_bundle(evidence: Evidence, commitment: Commitment) -> None:
    """Whoever made the file put another bundle in than the node committed to: nobody can be judged by it."""
    got = hashlib.sha256(evidence.bundle).hexdigest()
    if got != commitment.object_sha256:
        raise PeerFault(
            E_OBJECT_HASH, "the bundle in the file is not the one that was committed to",
            expected=commitment.object_sha256, got=got,
            hint="it was swapped or damaged after the commitment; get the file again from another source",
        )


def verdicts_in(
    evidence: Evidence, run: RunManifest, lease: Lease
) -> tuple[list[tuple[Envelope, Verdict]], tuple[IgnoredVerdict, ...]]:
    """Verdicts in the evidence that a verifier of the run signed on this submission, and why the others are ignored."""
    keys = {key_id(bytes.fromhex(key)): key for key in run.roles.verifiers}
    found, ignored = [], []
    for envelope in evidence.verdicts:
        try:
            verdict = _open_verdict(envelope, keys, run)
            _check_subject(verdict, evidence, lease)
            found.append((envelope, verdict))
        except AssayError as error:
            ignored.append(IgnoredVerdict(tuple(envelope.signatures), error.code, error.message))
    return found, tuple(ignored)


def _open_verdict(envelope: Envelope, keys: dict[str, str], run: RunManifest) -> Verdict:
    """A verdict signed by one of the keys; raises as ``Verdict.open``."""
    fault: AssayError = PeerFault(E_WRONG_KEY, "signed by nobody whom the run names as a verifier")
    for name in keys.keys() & envelope.signatures.keys():
        try:
            return Verdict.open(envelope, keys[name], run_id=run.run_id)
        except AssayError as error:
            fault = error
    raise fault


def _check_subject(verdict: Verdict, evidence: Evidence, lease: Lease) -> None:
    """A verdict says something about one receipt of one lease of one node, and about nothing else."""
    receipt = evidence.receipt
    if receipt is None:
        raise PeerFault(E_OTHER_RECEIPT, "a verdict on a receipt, and the file holds none")
    for name, ours in (
        ("receipt_sha256", receipt.digest), ("lease_id", lease.lease_id), ("node_id", lease.node_id)
    ):
        theirs = getattr(verdict, name)
        if theirs != ours:
            raise PeerFault(
                E_OTHER_RECEIPT, f"a verdict on something else: its {name} is {theirs[:16]}, not {ours[:16]}",
                expected=ours, got=theirs,
            )
