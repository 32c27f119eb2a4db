"""``assay audit`` on files that somebody edited: what they can say, and what they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from protocol.errors import E_USAGE, PeerFault
from protocol.evidence import MAGIC
from protocol.rollout import NO_CODE
from tests.adversary.world import World, identity, replaced
from tests.fakes.logged_evidence import audit_json, logged, verdict_on
from verifier.audit_cli import app
from verifier.findings import Report

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=16)


# -- the page ------------------------------------------------------------------------------------------------


def outside_its_head(world: World):
    """A submission with a token that its head does not hold, and that is no draw from the tail."""
    lease = world.lease()
    bundle = world.honest(lease)
    rollout = bundle.rollouts[1]
    tokens, codes = rollout.tokens.copy(), rollout.token_codes.copy()
    head = rollout.head_ids[: int(rollout.head_lengths[0])]
    tokens[0] = next(token for token in range(2, world.rules.vocab_size) if token not in head)
    codes[0] = NO_CODE
    return world.submission(lease, replaced(bundle, 1, tokens=tokens, token_codes=codes))


def test_a_page_that_cannot_draw_a_rollout_changes_no_outcome(world, write, tmp_path):
    path, page = write(outside_its_head(world)), tmp_path / "page.html"
    plain, drawn = audit_json(path), audit_json(path, "--html", str(page))
    assert plain == drawn
    assert (drawn[0], drawn[1]["outcome"], drawn[1]["code"]) == (1, "fail", "E_TOKEN_CODE")
    text = page.read_text(encoding="utf-8")
    assert "E_TOKEN_CODE" in text
    assert text.count("<h2>Sample ") == 3
    assert "1 rollout not drawn" in text


def test_a_page_that_cannot_be_written_changes_no_outcome(write, honest):
    result = RUNNER.invoke(app, [write(honest), "--html", "/dev/full", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["outcome"]) == (0, "pass")
    assert "the page was not written: E_FILE" in result.stderr


# -- verdicts, and what the log tells of them ------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"receipt_sha256": "0" * 64}, {"lease_id": "0" * 32}, {"node_id": "0" * 64}])
def test_a_verdict_on_somebody_else_is_not_shown_as_one_on_this(world, write, honest, change):
    """A cheater's genuine ``fail`` with its place in the log says nothing about an honest node's file."""
    verdict = verdict_on(world, honest, outcome="fail", code="E_REPLAY", **change)
    status, found = audit_json(write(honest, verdicts=(verdict,)))
    assert (status, found["outcome"], found["verdicts"]) == (0, "pass", [])
    assert [one["code"] for one in found["ignored"]] == ["E_OTHER_RECEIPT"]
    assert f"its {next(iter(change))} is 0000" in found["ignored"][0]["why"]
    own = audit_json(write(honest, verdicts=(verdict_on(world, honest),), receipt=None))[1]
    assert [one["code"] for one in own["ignored"]] == ["E_OTHER_RECEIPT"]


def test_a_log_that_tells_of_a_verdict_needs_the_verdict(world, write, honest):
    """A coordinator cannot make up a verdict: every entry needs the signature of a verifier of the run."""
    verdict, made_up = verdict_on(world, honest), {"sha256": "0" * 64, "tiers": ["T0", "T1", "T2"]}
    log = logged(world, honest, verdict, more=[made_up])
    status, found = audit_json(write(honest, verdicts=(verdict,), log=log))
    assert (status, found["outcome"], found["code"], found["in_log"]) == (4, "inconclusive", "E_LOG_VERDICT", False)
    assert found["likely_causes"]
    forged = verdict_on(world, honest, tokens=1)
    forged = replace(forged, signatures={identity("liar").id: next(iter(forged.signatures.values()))})
    log = logged(world, honest, verdict, more=[{"sha256": forged.digest}])
    assert audit_json(write(honest, verdicts=(verdict, forged), log=log))[1]["code"] == "E_LOG_VERDICT"


def test_a_verdict_that_was_told_twice_was_told_the_same_twice(world, write, honest):
    verdict = verdict_on(world, honest)
    again = logged(world, honest, verdict, more=[{"counted": False}])
    assert audit_json(write(honest, verdicts=(verdict,), log=again))[1]["in_log"] is True
    otherwise = logged(world, honest, verdict, more=[{"outcome": "fail", "code": "E_REPLAY"}])
    status, found = audit_json(write(honest, verdicts=(verdict,), log=otherwise))
    assert (status, found["code"]) == (4, "E_LOG_SILENT")


def test_every_verdict_of_a_receipt_is_found_in_the_log(world, write, honest):
    first, second = verdict_on(world, honest, outcome="inconclusive", code="E_DISAGREE"), verdict_on(world, honest)
    more = [{"sha256": second.digest, "outcome": "pass", "code": None}]
    log = logged(world, honest, first, more=more)
    assert audit_json(write(honest, verdicts=(first, second), log=log))[1]["in_log"] is True
    elsewhere = logged(world, honest, first, more=[{"sha256": "0" * 64, "receipt_id": "f" * 32}])
    assert audit_json(write(honest, verdicts=(first,), log=elsewhere))[1]["in_log"] is True  # of another receipt


def test_what_is_not_shown_is_not_in_the_log(world, write, honest):
    verdict = verdict_on(world, honest)
    log = logged(world, honest, verdict)
    nothing = replace(log, entries=())
    for changes in (
        {"receipt": None, "log": nothing}, {"receipt": None, "log": log}, {"log": nothing}, {"log": log},
        {"verdicts": (verdict,), "log": nothing},
    ):
        assert audit_json(write(honest, **changes))[1]["in_log"] is False, changes
    assert audit_json(write(honest, verdicts=(verdict,), log=log))[1]["in_log"] is True


# -- what reaches the terminal -------------------------------------------------------------------------------

CLEAR = "\x1b[2J\x1b[H\nPASS after T0, T1, T2\n"


def test_words_of_a_file_are_no_markup_and_no_orders_to_a_terminal(world, write, honest, tmp_path):
    verdict = verdict_on(world, honest, outcome="fail", code=f"[/x][bold]{CLEAR}")
    log = logged(world, honest, verdict, submitted={"node_id": f"[/x]{CLEAR}"})
    page = tmp_path / "page.html"
    result = RUNNER.invoke(app, [write(honest, verdicts=(verdict,), log=log), "--html", str(page)])
    assert (result.exit_code, result.exception.__class__) == (4, SystemExit)
    assert "verdict in the file: fail [/x][bold]\\x1b[2J" in result.stdout
    assert "\x1b" not in result.stdout + page.read_text(encoding="utf-8")
    assert not [line for line in result.stdout.splitlines() if line.startswith("PASS")]
    lease = replace(honest.lease, payload_type=CLEAR)
    result = RUNNER.invoke(app, [write(honest, lease=lease)])
    assert result.exit_code == 3
    assert "E_PAYLOAD_TYPE" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "\x1b" not in result.stderr


def test_a_report_that_was_made_up_is_explained_on_lines_of_ours(tmp_path):
    finding = {"check": f"T1 {CLEAR}", "ok": False, "expected": CLEAR, "got": "\ud800"}
    report = {"schema": "assay.audit", "schema_version": 1, "kind": "log", "outcome": CLEAR, "code": None}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report | {"findings": [finding]}))
    result = RUNNER.invoke(app, ["explain", str(path)])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "got \\ud800" in result.stdout
    assert len(result.stdout.splitlines()) == 2
    assert json.loads(RUNNER.invoke(app, ["explain", str(path), "--json"]).stdout)["report"]["failed"] == [finding]


def test_findings_take_any_text():
    report = Report()
    report.note("a\ud800" * 80, "\ud800" * 500, "\n")
    report.observe("b", PeerFault(E_USAGE, "\ud83d", got=CLEAR * 100))
    assert [len(finding.expected) for finding in report.findings] == [400, 8]
    assert report.findings[0].got == "\\n"
    assert all(text.isprintable() for f in report.findings for text in (f.check, f.expected, f.got))


def _process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(  # the streams of a real process
        [sys.executable, "-m", "assay", "audit", *arguments], stderr=subprocess.PIPE, check=False, **options
    )


def test_a_report_that_nobody_got_is_neither_a_pass_nor_a_fail(write, honest):
    path = write(honest)
    for words in ([path], [path, "--json"], [path, "--nope", "--json"]):
        with open("/dev/full", "wb") as full:  # noqa: PTH123
            done = _process(*words, stdout=full)
        assert (done.returncode, b"Traceback" in done.stderr) == (4, False), done.stderr
        assert b"cannot be written; got No space left" in done.stderr
    for words in ([], ["--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = _process(path, *words, stdout=writer)
        os.close(writer)
        assert (done.returncode, done.stderr) == (4, b"")


def test_a_terminal_that_knows_ascii_alone_gets_a_report(write, honest):
    for changes, status in (({"lease": replace(honest.lease, payload_type="é" * 20)}, 3), ({}, 0)):
        for words in ([], ["--json"]):
            path = write(honest, **changes)
            done = _process(path, *words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
            assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr
            assert done.stdout or done.stderr


# -- sizes ---------------------------------------------------------------------------------------------------


def test_a_file_is_too_large_before_it_is_read(write, honest, tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(MAGIC)
        file.truncate(60 * 2**30)
    status, found = audit_json(str(path))
    assert (status, found["outcome"], found["code"]) == (3, "malformed", "E_TOO_LARGE")
    assert audit_json(write(honest), "--data", str(path))[0] == 0


# -- causes --------------------------------------------------------------------------------------------------


def test_causes_are_those_of_the_step_that_failed(world, write, honest):
    _, found = audit_json(write(honest, node_public_key=identity("somebody").public_key))
    assert found["code"] == "E_WRONG_KEY"
    assert "another node" in found["likely_causes"][0]
    assert "--root" not in found["hint"]
    stranger = replace(honest.commitment, signatures=honest.lease.signatures)
    assert "the commitment was changed" in str(audit_json(write(honest, commitment=stranger))[1]["likely_causes"])
    _, found = audit_json(write(honest, lease=world.lease().sign(identity("x"))))
    assert found["code"] == "E_SIGNATURE"
    assert "commitment" not in str(found["likely_causes"])
    _, found = audit_json(write(honest), "--root", "00" * 32)
    assert "another run" in found["likely_causes"][0]
    verdict = verdict_on(world, honest)
    path = write(honest, verdicts=(verdict,), log=logged(world, honest, verdict, identity("somebody")))
    _, found = audit_json(path)
    assert found["code"] == "E_SIGNATURE"
    assert "head of the log" in found["likely_causes"][0]
    assert "head of the log" in RUNNER.invoke(app, [path]).stdout
