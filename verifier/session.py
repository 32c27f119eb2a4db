"""The rule engine of an audit: bytes in, judgement out. Holds no socket, no disk and no torch.

Order of the tiers and numbers of the steps: ``docs/spec/verification.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, TypeVar

from protocol.api import E_DISAGREE, E_UNCALIBRATED
from protocol.errors import E_INTERNAL, AssayError, LocalFault, code
from protocol.messages import Profile, RolloutScore, RunManifest, SamplingRules
from protocol.statistics import bundle_milli
from verifier.checkpoints import CheckpointBook
from verifier.divergence import Measurement, Residuals, measure
from verifier.findings import Judgement, Report
from verifier.replication import differences, measure_last, shortened
from verifier.scores import T2_PROFILE, confirmed, weigh
from verifier.structure import check_structure, open_submission
from verifier.submission import Opened, Submission
from verifier.tokens import Rewards, check_rewards, check_tokens

E_NO_MODEL = code("E_NO_MODEL", "a submission should be recomputed but no model is at hand")

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Recomputer(Protocol):
    """One configuration of the reference model."""

    def residuals(self, submissions: Sequence[Opened]) -> list[list[Residuals]]:
        """Residuals of every rollout of every submission.

        Raises:
            LocalFault: weights, device or memory fail.
        """


#: Makes the recomputer of a tier when it is first needed; T2 and T3 must differ in configuration.
Recomputers = Callable[[Literal["T2", "T3"]], Recomputer]


@dataclass
class _Audit:
    """One submission on its way through the tiers."""

    submission: Submission
    report: Report = field(default_factory=Report)
    opened: Opened | None = None
    rewards_micro: tuple[int, ...] = ()
    scores: tuple[RolloutScore, ...] = ()
    diverges: bool = False
    checks: Callable[[Sequence[Residuals], Profile, SamplingRules], list[Measurement]] = measure

    def judgement(self) -> Judgement:
        if self.opened is None:
            return self.report.judgement()
        samples = tuple(rollout.sample for rollout in self.opened.bundle.rollouts)
        found = self.report.judgement(samples, self.rewards_micro, self.opened.commitment.tokens)
        passed = found.outcome == "pass"
        return replace(found, scores=self.scores if passed else (), diverges=self.diverges and passed)


class Session:
    """Judges submissions of one run.

    Args:
        run: the run manifest, its signature checked against the root key.
        book: the checkpoint manifests that are known; the caller keeps it up to date.
        rewards: the run's tasks; None leaves prompt and reward unchecked (a pass then carries no rewards).
        recomputers: None makes drawn submissions inconclusive.
    """

    def __init__(
        self, run: RunManifest, book: CheckpointBook, rewards: Rewards | None, recomputers: Recomputers | None
    ):
        self.run, self.book = run, book
        self._rewards, self._recomputers = rewards, recomputers

    def judge(self, submissions: Sequence[Submission]) -> list[Judgement]:
        """One judgement per submission. Submissions that are recomputed share the loading of checkpoints.

        Never raises on what a peer sent; a fault of ours makes the submission inconclusive.
        """
        audits = [_Audit(submission) for submission in submissions]
        for audit in audits:
            _guarded(audit.report, "T0 and T1", partial(self._cheap_tiers, audit))
        clean = [audit for audit in audits if audit.opened and audit.report.clean]
        self._recompute([audit for audit in clean if audit.submission.drawn])
        for audit in clean:
            if audit.submission.replica is not None and audit.report.clean:
                _guarded(audit.report, "T2' replica", partial(self._settle, audit))
        return [audit.judgement() for audit in audits]

    def _cheap_tiers(self, audit: _Audit) -> None:
        """T0 and T1. Each tier runs only when the one before found nothing."""
        report = audit.report
        opened = audit.opened = open_submission(self.run, audit.submission, self.book, report)
        if opened is None:
            return
        check_structure(opened, report)
        if not report.clean:
            return
        check_tokens(opened, report)
        if self._rewards is not None and not report.blamed:
            audit.rewards_micro = check_rewards(opened, self._rewards, report)
        report.tiers.append("T1")

    def _recompute(self, drawn: list[_Audit]) -> None:
        """T2 of all drawn submissions together, then T3 of those that T2 finds wanting."""
        if self._recomputers is None:
            for audit in drawn:
                fault = LocalFault(E_NO_MODEL, "no model to recompute with", expected="the checkpoints it used")
                audit.report.fault("T2 recomputation", fault, blames_node=False)
            return
        for audit, residuals in self._residuals("T2", drawn):
            if _within_limits(audit, "T2", residuals):
                self._weigh(audit, residuals)
            else:
                self._confirm(audit)

    def _weigh(self, audit: _Audit, residuals: list[Residuals]) -> None:
        """A score for each rollout; what speaks against the node is confirmed by T3 when the submission says so."""
        assert audit.opened is not None
        profile = audit.opened.known_profile
        if profile is None or profile.calibration is None or profile.calibration.verifier_profile != T2_PROFILE:
            return
        calibration = profile.calibration
        scores = weigh(residuals, calibration)
        if audit.submission.confirm and any(rollout.llr_milli > 0 for rollout in scores):
            second = self._residuals("T3", [audit])
            if not second:
                return  # ours; the report says why
            scores = confirmed(scores, weigh(second[0][1], calibration))
            audit.report.tiers.append("T3")
        audit.scores = tuple(scores)
        worst = max(scores, key=lambda rollout: rollout.llr_milli)
        total, most = bundle_milli([r.llr_milli for r in scores]) / 1000, worst.llr_milli / 1000
        got = f"{total:.2f} nats together, most {most:.2f} in sample {worst.sample}"
        audit.report.note("T2.9 scores", "summed up per node", got)

    def _settle(self, audit: _Audit) -> None:
        """T2': where another node's replica differs, one prefill up to there says whether this head is right."""
        assert audit.opened is not None
        assert audit.submission.replica is not None
        twin = open_submission(self.run, audit.submission.replica, self.book, Report())
        if twin is None:
            return  # whatever is wrong with it is found by its own audit
        positions = differences(audit.opened.bundle, twin.bundle)
        if not positions:
            audit.report.note("T2'.1 replica", "the tokens of another node", "the same tokens")
            return
        audit.diverges = True
        places = ", ".join(f"{position} of sample {sample}" for sample, position in positions.items())
        audit.report.note("T2'.1 replica", "the tokens of another node", f"first differences: {places}")
        if audit.submission.drawn or self._recomputers is None:
            return  # T2 has looked at these positions among all others, or there is nothing to look with
        short = _Audit(
            audit.submission, report=audit.report, opened=shortened(audit.opened, positions), checks=measure_last
        )
        for _, residuals in self._residuals("T2", [short]):
            if not _within_limits(short, "T2", residuals):
                self._confirm(short)

    def _confirm(self, audit: _Audit) -> None:
        """T3: a failure of T2 counts only when a second configuration comes to the same end."""
        assert audit.opened is not None
        if audit.opened.known_profile is None:
            fault = LocalFault(
                E_UNCALIBRATED, "no limits are known for this profile", expected="a profile of the run",
                got=audit.opened.commitment.profile,
            )
            audit.report.fault("T3 confirms T2", fault, blames_node=False)
            return
        found = self._residuals("T3", [audit])
        if found and _within_limits(audit, "T3", found[0][1]):
            fault = LocalFault(E_DISAGREE, "the second configuration finds nothing wrong", expected="the end of T2")
            audit.report.fault("T3 confirms T2", fault, blames_node=False)

    def _residuals(self, tier: Literal["T2", "T3"], audits: list[_Audit]) -> list[tuple[_Audit, list[Residuals]]]:
        """Residuals of as many audits as can be had; one that cannot does not spoil the others."""
        if not audits:
            return []
        scratch = Report()
        found = _guarded(scratch, f"{tier} recomputation", lambda: self._work(tier, audits))
        if found is not None:
            return list(zip(audits, found, strict=True))
        if len(audits) == 1:
            audits[0].report.absorb(scratch)
            return []
        return [pair for audit in audits for pair in self._residuals(tier, [audit])]

    def _work(self, tier: Literal["T2", "T3"], audits: list[_Audit]) -> list[list[Residuals]]:
        assert self._recomputers is not None
        opened = [audit.opened for audit in audits if audit.opened is not None]
        return self._recomputers(tier).residuals(opened)


def _within_limits(audit: _Audit, tier: Literal["T2", "T3"], residuals: list[Residuals]) -> bool:
    """Write a tier's measurements down; a failure of T3 is the node's, one of T2 is not decided yet."""
    opened, report = audit.opened, audit.report
    assert opened is not None
    measurements = audit.checks(residuals, opened.profile, opened.run.sampling)
    for measurement in measurements:
        check = f"{tier}.{measurement.check}"
        if measurement.fault is None:
            report.note(check, measurement.expected, measurement.got)
        elif tier == "T2":
            report.observe(check, measurement.fault)
        else:
            report.fault(check, measurement.fault, blames_node=True)
    if audit.checks is measure:  # a look at single positions (T2') completes no tier
        report.tiers.append(tier)
    return all(measurement.fault is None for measurement in measurements)


def _guarded(report: Report, check: str, work: Callable[[], _T]) -> _T | None:
    """The boundary of an audit: whatever goes wrong in ``work`` is ours, is logged, and makes it inconclusive."""
    try:
        return work()
    except AssayError as error:
        report.fault(check, error, blames_node=False)
    except Exception as error:  # an unforeseen fault (memory, device, our bug) must never become a verdict
        logger.exception("audit step failed", extra={"check": check})
        fault = LocalFault(E_INTERNAL, "the verifier failed", got=f"{type(error).__name__}: {error}")
        report.fault(check, fault, blames_node=False)
    return None
