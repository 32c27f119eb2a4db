"""``assay audit``: exit codes, what it prints, and that it needs nothing but its arguments."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from protocol.evidence import encode
from tests.adversary.attacks import ATTACKS
from tests.adversary.world import ROOT, VERIFIER, World, identity
from verifier.audit_cli import app

RUNNER = CliRunner()
BY_NAME = {attack.name: attack.cheat for attack in ATTACKS}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=16)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("an offline audit opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture
def write(world, tmp_path):
    def to_file(submission, **changes):
        path = tmp_path / "one.evidence"
        path.write_bytes(encode(replace(world.evidence(submission), **changes)))
        return str(path)

    return to_file


@pytest.fixture
def honest(world):
    return world.submission(world.lease(), world.honest(world.lease()))


def _json(*arguments: str) -> tuple[int, dict]:
    result = RUNNER.invoke(app, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_honest_work_passes_with_a_store(world, write, honest):
    code, found = _json(write(honest), "--checkpoint", str(world.store.path))
    assert code == 0
    assert (found["outcome"], found["code"], found["tiers"]) == ("pass", None, ["T0", "T1", "T2"])
    assert found["recomputed"] is True
    assert len(found["rewards_micro"]) == 4
    assert all(finding["ok"] for finding in found["findings"])


def test_honest_work_passes_with_a_model_folder(world, write, honest):
    code, found = _json(write(honest), "--checkpoint", str(world.checkpoint_folder(1)))
    assert (code, found["outcome"]) == (0, "pass")


def test_without_a_checkpoint_the_model_is_left_out(write, honest):
    code, found = _json(write(honest))
    assert (code, found["tiers"], found["recomputed"]) == (0, ["T0", "T1"], False)


def test_a_cheat_fails_with_place_causes_and_command(world, write):
    path = write(BY_NAME["int8 weights"](world, world.lease()))
    result = RUNNER.invoke(app, [path, "--checkpoint", str(world.store.path), "--root", ROOT.public_key.hex()])
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "E_HEAD_KL" in result.stdout
    assert "first failing token: sample" in result.stdout
    assert "quantised" in result.stdout
    assert f"assay audit {path} --root {ROOT.public_key.hex()} --checkpoint {world.store.path}" in result.stdout
    assert "as given" in result.stdout


def test_an_edited_token_needs_no_model(world, write):
    code, found = _json(write(BY_NAME["one token edited"](world, world.lease())))
    assert (code, found["code"]) == (1, "E_REPLAY")
    assert found["first_failure"]["position"] is not None
    assert found["likely_causes"]


def test_a_version_that_is_not_there_is_inconclusive(world, write, honest):
    code, found = _json(write(honest), "--checkpoint", str(world.checkpoint_folder(2)))
    assert (code, found["outcome"], found["code"]) == (4, "inconclusive", "E_VERSION_MISSING")


def test_evidence_without_the_manifest_of_a_version_is_inconclusive(world, write):
    from protocol.rollout import Segment

    lease = world.lease()
    swapped = world.submission(lease, world.generate(lease, segments=[Segment(0, 1), Segment(8, 2)]))
    path = write(swapped, checkpoints=tuple(envelope for _, envelope in world.checkpoints[:2]))
    code, found = _json(path, "--checkpoint", str(world.store.path))
    assert (code, found["code"]) == (4, "E_VERSION_MISSING")


def test_another_root_key_is_refused(write, honest):
    code, found = _json(write(honest), "--root", identity("other").public_key.hex())
    assert (code, found["outcome"], found["code"]) == (3, "malformed", "E_WRONG_KEY")


def test_the_root_key_is_named_when_not_given(write, honest):
    result = RUNNER.invoke(app, [write(honest)])
    assert ROOT.public_key.hex() in result.stdout
    assert "NOT pinned" in result.stdout


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda evidence, world: {"root_public_key": identity("x").public_key}, "E_SIGNATURE"),
        (lambda evidence, world: {"run_manifest": world.run.sign(identity("x"))}, "E_SIGNATURE"),
        (lambda evidence, world: {"lease": world.lease().sign(identity("x"))}, "E_SIGNATURE"),
        (lambda evidence, world: {"checkpoints": (world.checkpoints[0][0].sign(identity("x")),)}, "E_SIGNATURE"),
        (lambda evidence, world: {"lease": evidence.commitment}, "E_PAYLOAD_TYPE"),
    ],
)
def test_what_the_roles_did_not_sign_is_no_evidence(world, tmp_path, honest, change, code):
    evidence = world.evidence(honest)
    path = tmp_path / "forged.evidence"
    path.write_bytes(encode(replace(evidence, **change(evidence, world))))
    status, found = _json(str(path))
    assert (status, found["code"]) == (3, code)


def test_garbage_is_malformed(tmp_path):
    path = tmp_path / "garbage"
    path.write_bytes(b"\0" * 100)
    assert _json(str(path))[0] == 3
    result = RUNNER.invoke(app, [str(path)])
    assert result.exit_code == 3
    assert "E_EVIDENCE" in result.stderr


def test_wrong_calls(tmp_path, write, honest):
    path = write(honest)
    assert RUNNER.invoke(app, [str(tmp_path / "missing")]).exit_code == 2
    assert RUNNER.invoke(app, [path, "--checkpoint", str(tmp_path / "missing")]).exit_code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert RUNNER.invoke(app, [path, "--checkpoint", str(empty)]).exit_code == 2
    assert RUNNER.invoke(app, [path, "--root", "abc"]).exit_code == 2


def test_verdicts_of_the_runs_verifiers_are_shown(world, write, honest):
    from protocol.messages import Verdict

    verdict = Verdict(
        run_id=world.run.run_id, verifier_id=VERIFIER.id, node_id=world.lease().node_id,
        lease_id=world.lease().lease_id, receipt_sha256=honest.receipt.digest, outcome="pass", code=None, tiers=["T0"],
        findings=[], samples=[], rewards_micro=[], tokens=0, issued_at_ms=0,
    )
    _, found = _json(write(honest, verdicts=(verdict.sign(VERIFIER), verdict.sign(identity("liar")))))
    assert [shown["outcome"] for shown in found["verdicts"]] == ["pass"]
    assert found["verdicts_ignored"] == 1


def test_a_receipt_is_not_required(write, honest):
    assert _json(write(honest, receipt=None))[0] == 0
