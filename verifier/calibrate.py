"""Measure honest rollouts from evidence files and make a calibration record of them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from protocol.calibration import Calibration, CalibrationRecord, Profile
from protocol.errors import LocalFault, code
from protocol.evidence import MAGIC, MAX_FILE_BYTES, Evidence
from protocol.identity import Identity
from protocol.messages import RunManifest
from protocol.model_files import fetch_model_files
from protocol.paths import read_input_file
from protocol.statistics import RolloutStatistics
from verifier.audit import read_evidence, verdicts_in
from verifier.checkpoints import CheckpointBook
from verifier.divergence import Residuals
from verifier.findings import Report
from verifier.log_proofs import check_log
from verifier.material import Material
from verifier.model_shelf import ModelShelf
from verifier.null_distribution import CONFIDENCE, strata_of
from verifier.scores import T2_PROFILE
from verifier.structure import check_structure, open_submission
from verifier.submission import Opened, Submission
from verifier.tokens import check_tokens

E_CALIBRATION = code("E_CALIBRATION", "evidence files do not make a calibration: another run, a failed check, too few")

#: Limits are this many times the largest honest value: a single rollout must be far outside to fail alone.
HEADROOM: Final = 10.0
#: Least that a limit of entries leaves for arithmetic, nats: six times what float32 stacks differ by.
LEAST_ROOM: Final = 2.5e-4
#: Largest number that a limit can be, in its unit.
_MOST: Final = 2.0**47


@dataclass
class Honest:
    """What was measured so far."""

    residuals: list[Residuals] = field(default_factory=list)
    groups: dict[int, RolloutStatistics] = field(default_factory=dict)  #: one rollout of each, for the levels
    versions: set[int] = field(default_factory=set)
    evidence: list[str] = field(default_factory=list)
    run: RunManifest | None = None

    def add(self, group: int, residuals: Sequence[Residuals]) -> None:
        """Take the rollouts of one bundle in, at least one.

        All of them count for the limits. Those of one prompt are alike, so the levels are taken from one rollout of
        each group: the lowest sample of the bundle that came first, which is no choice by what was measured.
        """
        self.residuals += residuals
        self.groups.setdefault(group, min(residuals, key=lambda rollout: rollout.sample).statistics)


def measure_files(
    files: Sequence[Path], root: bytes, profile: str, material: Material, threads: int = 1
) -> Iterator[Honest]:
    """Recompute the rollouts of each file; the same object grows from file to file.

    Raises:
        LocalFault: ``E_CALIBRATION`` for another run, another profile, a submission for the second time, one that a
            verifier of the run failed, or a rollout that fails T0 or T1; what the material raises.
        PeerFault: a file is malformed or not of this root key's run.
    """
    honest, measured = Honest(), dict[str, Path]()
    with tempfile.TemporaryDirectory(prefix="assay-calibrate-") as folder:
        for file in files:
            evidence, run = read_evidence(read_input_file(file, MAX_FILE_BYTES), root)
            if honest.run is not None and honest.run.run_id != run.run_id:
                raise _unfit(file, "the run of the other files", run.run_id)
            honest.run = run
            opened, book = _open(file, evidence, run, profile)
            lease = opened.lease.lease_id
            if lease in measured:
                raise _unfit(file, "each submission once", f"lease {lease}, which {measured[lease]} holds as well")
            measured[lease] = file
            fetch_model_files(run.model.files, Path(folder), material.fetch)
            shelf = ModelShelf(
                Path(folder), material.layout(run), material.states(run, book), threads=threads
            )
            honest.add(opened.lease.group, shelf("T2").residuals([opened])[0])
            honest.versions |= {s.version for rollout in opened.bundle.rollouts for s in rollout.segments}
            honest.evidence.append(evidence.sha256)
            yield honest


def _open(file: Path, evidence: Evidence, run: RunManifest, profile: str) -> tuple[Opened, CheckpointBook]:
    """The submission, once its structure and every draw hold, and the manifests it rests on."""
    report, book = Report(), CheckpointBook(run)
    book.add(evidence.checkpoints)
    submission = Submission(
        evidence.lease, evidence.commitment, evidence.receipt, evidence.node_public_key, evidence.bundle, drawn=True
    )
    opened = open_submission(run, submission, book, report)
    if opened is not None:
        check_structure(opened, report)
        if report.clean:
            check_tokens(opened, report)
    if opened is None or not report.clean:
        failed = next(finding for finding in report.findings if not finding.ok)
        raise _unfit(file, "honest rollouts", f"{failed.check}: {failed.got}")
    _check_verdicts(file, evidence, run, opened)
    if opened.commitment.profile != profile:
        raise _unfit(file, f"rollouts of profile {profile}", opened.commitment.profile)
    return opened, book


def _check_verdicts(file: Path, evidence: Evidence, run: RunManifest, opened: Opened) -> None:
    """No verifier of the run found fault with it; a verdict that was taken out of the file is missed by its log."""
    verdicts, log = verdicts_in(evidence, run, opened.lease)[0], Report()
    for _, verdict in verdicts:
        if verdict.outcome == "fail":
            raise _unfit(file, "honest rollouts", f"a verdict: fail {verdict.code} by {verdict.verifier_id[:16]}")
    check_log(evidence, run, verdicts, log)
    for finding in log.findings:
        if not finding.ok:
            raise _unfit(file, "verdicts and log as they were served", f"{finding.check}: {finding.got}")


def _unfit(file: Path, expected: str, got: str) -> LocalFault:
    return LocalFault(E_CALIBRATION, f"{file} is of no use here", expected=expected, got=got)


def evidence_below(folder: Path) -> list[Path]:
    """Files below ``folder`` that begin as evidence does; downloads have the receipt's id for a name."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    found.append(path)
    return found


def make_record(
    honest: Honest | None, profile: str, identity: Identity, now_ms: int, *, headroom: float = HEADROOM
) -> CalibrationRecord:
    """The record of what was measured.

    Raises:
        LocalFault: ``E_CALIBRATION`` when nothing was measured.
    """
    run = None if honest is None else honest.run
    if honest is None or run is None or not honest.residuals:
        raise LocalFault(E_CALIBRATION, "nothing was measured", expected="at least one evidence file")
    statistics = [rollout.statistics for rollout in honest.residuals]
    strata = strata_of(list(honest.groups.values()))
    calibration = Calibration(
        verifier_profile=T2_PROFILE, confidence_ppm=round(CONFIDENCE * 1e6), strata=strata
    )
    bounds = limits(honest.residuals, profile, run.sampling.steps_per_nat, headroom)
    return CalibrationRecord(
        run_id=run.run_id, verifier_public_key=identity.public_key.hex(),
        profile=bounds.model_copy(update={"calibration": calibration}),
        layout_sha256=run.model.layout_sha256, rollouts=len(statistics),
        tokens=sum(len(rollout.kl_T) for rollout in honest.residuals),
        stochastic_tokens=sum(rollout.tokens for rollout in statistics), versions=sorted(honest.versions),
        evidence_sha256=sorted(honest.evidence), issued_at_ms=now_ms,
    )


def limits(
    residuals: Sequence[Residuals], profile: str, steps_per_nat: int, headroom: float = HEADROOM
) -> Profile:
    """Limits that no single honest value comes near.

    Quantisation alone moves an entry by up to half a step and a head by a divergence of up to 1 / (8 steps^2)
    (docs/spec/verification.md, "Thresholds"). What the largest value has above that is arithmetic: ``headroom`` times
    as much, for divergences at least as much as quantisation, for entries at least :data:`LEAST_ROOM`. An entry that
    could be off by a whole step would let a node settle near ties.
    """
    half_step, tilt = 0.5 / steps_per_nat, 0.125 / steps_per_nat**2
    margins = [
        *(rollout.entry_T for rollout in residuals), *(rollout.omitted_T for rollout in residuals),
        *(rollout.tail_draw_T for rollout in residuals), *(rollout.tail_token_T for rollout in residuals),
        *(rollout.margin_T / 2 for rollout in residuals), *(rollout.tail_mass_T for rollout in residuals),
    ]
    return Profile(
        name=profile,
        max_mean_kl_nano=_limit(
            [np.array([rollout.mean_kl]) for rollout in residuals], tilt, tilt, headroom, 1e9
        ),
        max_token_kl_micro=_limit([rollout.kl_T for rollout in residuals], tilt, tilt, headroom, 1e6),
        max_margin_micro=_limit(margins, half_step, LEAST_ROOM, headroom, 1e6),
    )


def _limit(columns: Sequence[np.ndarray], floor: float, room: float, headroom: float, scale: float) -> int:
    """``floor`` and ``headroom`` times the largest value's part above it, at least ``room``; in 1 / ``scale``."""
    known = [float(values.max()) for column in columns if len(values := column[~np.isnan(column)])]
    largest = max(known, default=0.0)
    if not math.isfinite(largest):
        raise LocalFault(E_CALIBRATION, "a rollout is infinitely far from the reference", expected="honest rollouts")
    limit = (floor + max(room, headroom * (largest - floor))) * scale
    if limit > _MOST:
        raise LocalFault(
            E_CALIBRATION, "a limit is too large to be written", expected=f"at most {_MOST / scale:.3g} nats",
            got=f"{limit / scale:.3g} nats", hint="take a smaller --headroom, or leave the worst rollout out",
        )
    return math.ceil(limit)
