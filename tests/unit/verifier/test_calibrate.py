"""``assay verifier calibrate`` on real bundles, and what a session makes of its record."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from coordinator.calibrations import calibrated
from protocol.api import E_UNCALIBRATED
from protocol.calibration import Calibration, CalibrationRecord, Stratum
from protocol.envelope import Envelope
from protocol.errors import LocalFault, PeerFault, exit_status
from protocol.evidence import encode
from protocol.identity import Identity
from tests.adversary.world import NODE, PROFILE, ROOT, RUN_ID, VERIFIER, World, quantised
from tests.fakes.logged_evidence import logged, verdict_on
from verifier.calibrate import Honest, evidence_below, limits, make_record, measure_files
from verifier.cli import app
from verifier.material import Material
from verifier.scores import T2_PROFILE
from verifier.session import Session


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=24)


@pytest.fixture(scope="module")
def honest(world):
    return [world.submission(lease, world.honest(lease)) for lease in (world.lease(), world.lease(group=1))]


@pytest.fixture
def files(world, honest, tmp_path):
    folder = tmp_path / "honest"
    folder.mkdir()
    for number, submission in enumerate(honest):
        (folder / f"{number}.evidence").write_bytes(encode(world.evidence(submission)))
    return folder


def test_evidence_is_found_by_what_it_is(files):
    (files / "0.evidence").rename(files / ("ab" * 16))  # as it is downloaded
    (files / "notes.evidence").write_text("not evidence")
    (files / "empty").write_text("")
    assert [path.name for path in evidence_below(files)] == ["1.evidence", "ab" * 16]


def test_a_record_takes_the_place_of_nothing_it_is_made_of(world, files, tmp_path):
    key = tmp_path / "verifier.key"
    VERIFIER.save(key)
    for out in (files / "0.evidence", key):
        before = out.read_bytes()
        result = CliRunner().invoke(app, [
            "calibrate", str(files), "--profile", PROFILE.name, "--checkpoint", str(world.store.path),
            "--root", ROOT.public_key.hex(), "--key", str(key), "--out", str(out),
        ])
        assert isinstance(result.exception, LocalFault)
        assert "would overwrite" in result.exception.message
        assert out.read_bytes() == before


def test_a_record_is_measured_signed_and_taken_into_a_run(world, honest, files, tmp_path):
    VERIFIER.save(tmp_path / "verifier.key")
    out = tmp_path / "made.calibration"
    result = CliRunner().invoke(app, [
        "calibrate", str(files), "--profile", PROFILE.name, "--checkpoint", str(world.store.path),
        "--root", ROOT.public_key.hex(), "--key", str(tmp_path / "verifier.key"), "--out", str(out),
    ])
    assert result.exit_code == 0, result.output
    assert "8 rollouts of 2 prompts" in result.output
    envelope = Envelope.from_bytes(out.read_bytes())
    record = CalibrationRecord.open(envelope, VERIFIER.public_key, run_id=RUN_ID)
    assert (record.rollouts, record.versions, len(record.evidence_sha256)) == (8, [1], 2)
    assert record.tokens == sum(len(r) for lease in (0, 1) for r in world.honest(world.lease(group=lease)).rollouts)
    limits = record.profile
    assert 3_814 < limits.max_mean_kl_nano < 2 * PROFILE.max_mean_kl_nano  # twice what quantisation can make
    assert limits.max_margin_micro in (2_203, 2_204)  # half a step and what is left for arithmetic
    assert limits.calibration is not None
    assert limits.calibration.strata == []  # eight rollouts are no distribution

    [profile] = calibrated([PROFILE], [out], world.layout.sha256)
    assert profile.max_mean_kl_nano == limits.max_mean_kl_nano
    assert profile.calibration is not None
    assert profile.calibration.record_sha256 == envelope.digest
    run = world.run.model_copy(update={"profiles": [profile]})
    judged = Session(run, world.book, world.rewards, world.shelf).judge([honest[0]])[0]
    expected = {finding.check: finding.expected for finding in judged.findings}
    assert expected["T2.1 mean divergence"] == f"mean <= {limits.max_mean_kl_nano * 1e-9:.3g} nats"
    assert expected["T2.3 head entries"] == f"each <= {limits.max_margin_micro * 1e-6:.3g} nats"
    assert judged.outcome == "pass"
    for layout, content in (("00" * 32, out.read_bytes()), (world.layout.sha256, out.read_bytes()[:-9] + b"AAAA\"}]}")):
        out.write_bytes(content)
        with pytest.raises(LocalFault) as caught:
            calibrated([PROFILE], [out], layout)
        assert caught.value.code == "E_CONFIG"


def test_dishonest_or_foreign_files_are_refused(world, files, honest, tmp_path):
    material = Material.of([world.store.path])
    with pytest.raises(LocalFault) as caught:
        list(measure_files([files / "0.evidence"], ROOT.public_key, "another", material))
    assert caught.value.code == "E_CALIBRATION"
    with pytest.raises(PeerFault):
        list(measure_files([files / "0.evidence"], VERIFIER.public_key, PROFILE.name, material))
    lease = world.lease(group=2)
    best = world.generate(lease, seeds={s: hashlib.sha256(bytes([s])).digest() for s in lease.samples})
    path = tmp_path / "best.evidence"
    path.write_bytes(encode(world.evidence(world.submission(lease, best))))
    with pytest.raises(LocalFault) as caught:
        list(measure_files([path], ROOT.public_key, PROFILE.name, material))
    assert "T1.1" in str(caught.value.got)


def _calibrate(files: Path, world: World, tmp_path: Path, *words: str, signer: Identity = VERIFIER) -> Result:
    key = tmp_path / "some.key"
    key.unlink(missing_ok=True)
    signer.save(key)
    return CliRunner().invoke(app, [
        "calibrate", str(files), "--profile", PROFILE.name, "--checkpoint", str(world.store.path),
        *([] if "--root" in words else ["--root", ROOT.public_key.hex()]), "--key", str(key),
        "--out", str(tmp_path / "made.calibration"), *words,
    ])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--root zz", "--root is not a public key"), ("--headroom inf", "--headroom"),
        ("--headroom 1e300", "--headroom"), ("--headroom nan", "--headroom"), ("--threads 100000000000", "--threads"),
    ],
)
def test_a_wrong_call_says_what_was_expected(world, files, tmp_path, words, message):
    result = _calibrate(files, world, tmp_path, *words.split())
    if isinstance(result.exception, LocalFault):  # the front door prints it
        assert exit_status(result.exception) == 2
        assert message in result.exception.message
    else:
        assert (result.exit_code, message in result.stderr) == (2, True)
    assert not (tmp_path / "made.calibration").exists()


def _refusal(world: World, *files: Path) -> str:
    with pytest.raises(LocalFault) as caught:
        list(measure_files(files, ROOT.public_key, PROFILE.name, Material.of([world.store.path])))
    assert caught.value.code == "E_CALIBRATION"
    return str(caught.value)


def test_levels_see_one_rollout_of_a_prompt_and_limits_see_all(world, honest, files):
    """Rollouts of one prompt are alike: whatever a group adds, it stays one observation."""
    lease = world.lease(samples=(4, 5, 6, 7))
    (files / "2.evidence").write_bytes(encode(world.evidence(world.submission(lease, world.honest(lease)))))
    *_, measured = measure_files(
        sorted(files.iterdir()), ROOT.public_key, PROFILE.name, Material.of([world.store.path])
    )
    assert len(measured.residuals) == 12
    assert list(measured.groups) == [0, 1]
    assert [pick.sample for pick in measured.groups.values()] == [0, 0]
    crowd = Honest(run=measured.run)
    for group in range(75):  # 300 rollouts and more, but of 75 prompts
        crowd.add(group, measured.residuals[:4])
    assert make_record(crowd, PROFILE.name, VERIFIER, 0).profile.calibration.strata == []
    for group in range(75, 300):
        crowd.add(group, measured.residuals[:1])
    [stratum] = make_record(crowd, PROFILE.name, VERIFIER, 0).profile.calibration.strata
    assert stratum.rollouts == 300


def test_a_submission_counts_once(world, files):
    """A copy, with or without the verdicts that were added to it, is no other evidence."""
    (files / "copy.evidence").write_bytes((files / "0.evidence").read_bytes())
    assert f"lease {world.lease().lease_id}" in _refusal(world, files / "0.evidence", files / "copy.evidence")


def test_what_a_verifier_failed_is_not_honest(world, honest, files):
    evidence, failed = world.evidence(honest[0]), verdict_on(world, honest[0], outcome="fail", code="E_HEAD_KL")
    (files / "0.evidence").write_bytes(encode(replace(evidence, verdicts=(failed,))))
    assert "fail E_HEAD_KL" in _refusal(world, files / "0.evidence")
    (files / "0.evidence").write_bytes(encode(replace(evidence, log=logged(world, honest[0], failed))))
    assert "L.3" in _refusal(world, files / "0.evidence")  # the verdict was taken out, its entry was not
    liars = replace(failed, signatures={NODE.id: b"x"})
    (files / "0.evidence").write_bytes(encode(replace(evidence, verdicts=(liars,))))
    [measured] = measure_files(
        [files / "0.evidence"], ROOT.public_key, PROFILE.name, Material.of([world.store.path])
    )
    assert len(measured.residuals) == 4


def test_a_key_that_is_no_verifiers_is_told(world, files, tmp_path):
    assert "no verifier's key" not in _calibrate(files, world, tmp_path).stderr
    result = _calibrate(files, world, tmp_path, signer=NODE)
    assert (result.exit_code, "no verifier's key" in result.stderr) == (0, True)


def test_limits_that_cannot_be_written_are_refused(world, files):
    *_, measured = measure_files(
        [files / "0.evidence"], ROOT.public_key, PROFILE.name, Material.of([world.store.path])
    )
    [far, *_] = measured.residuals
    with pytest.raises(LocalFault, match="smaller --headroom"):
        limits([replace(far, kl_T=far.kl_T + 1e9)], PROFILE.name, 256)


# -- scores in a session ------------------------------------------------------------------------------------


def _calibration(log_kl: int, verifier_profile: str = T2_PROFILE) -> Calibration:
    """Eight levels for the divergence, all at ``log_kl`` thousandths; the others are never exceeded."""
    stratum = Stratum(
        min_tokens=1, rollouts=3_000, log_kl_milli=[log_kl] * 8, bias_centre_nano=0, bias_nano=[10**12] * 8,
        margin_nano=[10**12] * 8,
    )
    return Calibration(verifier_profile=verifier_profile, confidence_ppm=990_000, strata=[stratum])


def _judge(world, submission, **changes):
    profile = PROFILE.model_copy(update=changes)
    run = world.run.model_copy(update={"profiles": [profile]})
    return Session(run, world.book, world.rewards, world.shelf).judge([submission])[0]


def test_a_pass_carries_the_scores_of_its_rollouts(world, honest):
    quiet = _judge(world, honest[0], calibration=_calibration(-5_000))
    assert quiet.outcome == "pass"
    assert [rollout.sample for rollout in quiet.scores] == [0, 1, 2, 3]
    assert all(rollout.llr_milli < 0 and rollout.tokens > 0 for rollout in quiet.scores)
    assert all(-22_000 < rollout.log_kl_milli < -14_000 for rollout in quiet.scores)
    loud = _judge(world, honest[0], calibration=_calibration(-25_000))
    assert loud.outcome == "pass"  # no single rollout decides
    assert all(rollout.llr_milli > 1_000 for rollout in loud.scores)
    assert loud.tiers == ("T0", "T1", "T2")
    other = _judge(world, honest[0], calibration=_calibration(-25_000, "another-reference"))
    assert (other.outcome, other.scores) == ("pass", ())


def test_a_second_configuration_confirms_when_asked(world, honest):
    asked = replace(honest[0], confirm=True)
    loud = _judge(world, asked, calibration=_calibration(-25_000))
    assert loud.tiers == ("T0", "T1", "T2", "T3")
    assert all(rollout.llr_milli > 1_000 for rollout in loud.scores)
    quiet = _judge(world, asked, calibration=_calibration(-5_000))
    assert quiet.tiers == ("T0", "T1", "T2")  # there was nothing to confirm


def test_a_failure_carries_no_scores(world):
    lease = world.lease(group=3)
    cheap = world.generate(lease, states=lambda version: quantised(world.state(version)))
    found = _judge(world, world.submission(lease, cheap), calibration=_calibration(-25_000))
    assert (found.outcome, found.scores) == ("fail", ())


def test_an_unlisted_profile_is_held_to_the_narrowest_limits_and_never_blamed(world):
    run = world.run.model_copy(update={"audit": world.run.audit.model_copy(update={"unknown_profiles": True})})
    session = Session(run, world.book, world.rewards, world.shelf)
    lease = world.lease(group=3)
    good = world.submission(lease, world.honest(lease), profile="brand-new")
    assert session.judge([good])[0].outcome == "pass"
    cheap = world.generate(lease, states=lambda version: quantised(world.state(version)))
    found = session.judge([world.submission(lease, cheap, profile="brand-new")])[0]
    assert (found.outcome, found.code) == ("inconclusive", E_UNCALIBRATED)
    best = world.generate(lease, seeds={s: hashlib.sha256(bytes([s])).digest() for s in lease.samples})
    drawn_wrong = session.judge([world.submission(lease, best, profile="brand-new")])[0]
    assert (drawn_wrong.outcome, drawn_wrong.code) == ("fail", "E_REPLAY")  # exact checks hold for every profile
    assert world.judge(good).code == "E_UNKNOWN_PROFILE"  # a run that does not take them
