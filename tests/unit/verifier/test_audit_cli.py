"""``assay audit``: exit codes, what it prints, and that it needs nothing but its arguments."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol import bundle as bundles
from protocol.causes import ADVICE, CAUSES
from protocol.evidence import decode, encode
from tests.adversary.attacks import ATTACKS
from tests.adversary.world import COORDINATOR, ROOT, VERIFIER, World, identity
from tests.fakes.logged_evidence import audit_json, logged, verdict_on
from verifier.audit_cli import app
from verifier.explain import meanings

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


def test_honest_work_passes_with_a_store(world, write, honest):
    code, found = audit_json(write(honest), "--checkpoint", str(world.store.path))
    assert code == 0
    text = RUNNER.invoke(app, [write(honest)]).stdout
    assert "PASS after T0, T1\n" in text
    assert "T1.1 sampler replay" in text
    assert (found["outcome"], found["code"], found["tiers"]) == ("pass", None, ["T0", "T1", "T2"])
    assert found["recomputed"] is True
    assert len(found["rewards_micro"]) == 4
    assert all(finding["ok"] for finding in found["findings"])


def test_honest_work_passes_with_a_model_folder(world, write, honest):
    code, found = audit_json(write(honest), "--checkpoint", str(world.checkpoint_folder(1)))
    assert (code, found["outcome"]) == (0, "pass")


def test_without_a_checkpoint_the_model_is_left_out(write, honest):
    code, found = audit_json(write(honest))
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
    code, found = audit_json(write(BY_NAME["one token edited"](world, world.lease())))
    assert (code, found["code"]) == (1, "E_REPLAY")
    assert found["first_failure"]["position"] is not None
    assert found["likely_causes"]
    replayed = next(finding for finding in found["findings"] if finding["check"].startswith("T1.1"))
    assert replayed["expected"] == "0 tokens differ"  # as where it holds
    assert f"at position {replayed['position']} of sample {replayed['sample']}" in replayed["got"]


def test_places_of_a_report_agree_with_its_words(world, write):
    """Every failed check says in words where it first fails; the first of these places is the report's."""
    _, found = audit_json(write(BY_NAME["int8 weights"](world, world.lease())), "--checkpoint", str(world.store.path))
    failed = [finding for finding in found["findings"] if not finding["ok"]]
    assert len(failed) > 2
    for finding in failed:
        assert finding["got"].endswith(f"position {finding['position']} of sample {finding['sample']}"), finding
    first = found["first_failure"]
    assert (first["sample"], first["position"]) == min((f["sample"], f["position"]) for f in failed)


def test_a_version_that_is_not_there_is_inconclusive(world, write, honest):
    code, found = audit_json(write(honest), "--checkpoint", str(world.checkpoint_folder(2)))
    assert (code, found["outcome"], found["code"]) == (4, "inconclusive", "E_VERSION_MISSING")


def test_evidence_without_the_manifest_of_a_version_is_inconclusive(world, write):
    from protocol.rollout import Segment

    lease = world.lease()
    swapped = world.submission(lease, world.generate(lease, segments=[Segment(0, 1), Segment(8, 2)]))
    path = write(swapped, checkpoints=tuple(envelope for _, envelope in world.checkpoints[:2]))
    code, found = audit_json(path, "--checkpoint", str(world.store.path))
    assert (code, found["code"]) == (4, "E_VERSION_MISSING")


def test_evidence_with_a_second_manifest_of_a_version_is_inconclusive(world, write, honest):
    """Whoever made the file put in what the learner signed besides; the node named the other one."""
    path = write(honest, checkpoints=(world.checkpoints[0][1], world.second_manifest(1)))
    code, found = audit_json(path, "--checkpoint", str(world.store.path))
    assert (code, found["outcome"], found["code"]) == (4, "inconclusive", "E_OTHER_MANIFEST")
    assert "learner" in found["likely_causes"][0]


def test_another_root_key_is_refused(write, honest):
    code, found = audit_json(write(honest), "--root", identity("other").public_key.hex())
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
    status, found = audit_json(str(path))
    assert (status, found["code"]) == (3, code)


def test_garbage_is_malformed(tmp_path):
    path = tmp_path / "garbage"
    path.write_bytes(b"\0" * 100)
    assert audit_json(str(path))[0] == 3
    result = RUNNER.invoke(app, [str(path)])
    assert result.exit_code == 3
    assert "E_EVIDENCE" in result.stderr


WRONG_CALLS = [
    ("MISSING", "no such file"), ("EMPTY", "is a folder"), ("FILE --checkpoint MISSING", "no such folder"),
    ("FILE --checkpoint EMPTY", "holds no checkpoint"), ("FILE --checkpoint FILE", "is a file"),
    ("FILE --data MISSING", "no such file"), ("FILE --data EMPTY", "is a folder"), ("FILE --html EMPTY", "is a folder"),
    ("FILE --html MISSING/x.html", "does not exist"), ("FILE --html FILE", "overwrite the evidence"),
    ("FILE --data DATA --html DATA", "overwrite --data"), ("FILE --html EMPTY/../one.evidence", "overwrite"),
    ("FILE --root abc", "not a public key"), ("FILE --nope", "No such option"), ("FILE --html", "requires"),
    ("FILE more", "unexpected"), ("/dev/zero", "a pipe or a device"), ("FILE --data /dev/zero", "a pipe or a device"),
    ("log HTTP://host", "whose log"), ("run Https://host", "whose log"),
    ("log MISSING", "no such file"), ("log EMPTY", "is a folder"), ("log", "Missing"),
    ("log http://host", "whose log"), ("log FILE --against MISSING", "no such file"),
    ("log FILE --save FILE", "overwrite the log"), ("log FILE --remember FILE", "overwrite the log"),
    ("log DATA --save NEW --remember NEW", "overwrite --save"), ("log DATA --remember FILE", "overwrite evidence"),
    ("log DATA --against FILE --save FILE", "overwrite --against"), ("run MISSING", "no such file"),
    ("run FILE --remember FILE", "overwrite the log"), ("run FILE --save NEW", "No such option"),
    ("explain E_NOPE", "no such code"), ("explain nonsense", "neither"), ("explain EMPTY", "neither"),
    ("explain FILE", "no report"), (f"explain {'x' * 300}", "neither"), ("explain", "Missing"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_CALLS, ids=[words for words, _ in WRONG_CALLS])
def test_a_wrong_call_is_an_error_of_ours_and_changes_nothing(tmp_path, monkeypatch, write, honest, words, message):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    (tmp_path / "empty").mkdir()
    (tmp_path / "data").write_text("data")
    names = {"FILE": write(honest), "DATA": str(tmp_path / "data"), "EMPTY": str(tmp_path / "empty"),
             "MISSING": str(tmp_path / "missing"), "NEW": str(tmp_path / "new")}
    for name, path in names.items():
        words = words.replace(name, path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    first, *others = words.split()
    result = RUNNER.invoke(app, [first, "--json", *others])
    code, found = result.exit_code, json.loads(result.stdout)
    kind = {"log": "log", "run": "run", "explain": "explanation"}.get(words.split()[0], "submission")
    assert (code, found["outcome"], found["code"], found["kind"]) == (2, "usage", "E_USAGE", kind)
    assert message in found["message"]
    assert all(found[key] for key in ("expected", "got", "hint"))
    result = RUNNER.invoke(app, words.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("usage: E_USAGE: ")
    assert not result.stdout
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_link_to_the_evidence_is_no_place_for_the_page(tmp_path, write, honest):
    path = write(honest)
    link = tmp_path / "page.html"
    link.symlink_to(path)
    assert audit_json(path, "--html", str(link))[1]["message"] == "--html would overwrite the evidence"
    assert Path(path).read_bytes()[:5] != b"<!doc"


def test_malformed_files_say_what_to_do(tmp_path, write, honest):
    path = write(honest)
    bent = bytearray(Path(path).read_bytes())
    bent[bent.index(b'"lease"')] ^= 1
    for name, data in (("garbage", b"\0" * 100), ("bent", bytes(bent))):
        (tmp_path / name).write_bytes(data)
        code, found = audit_json(str(tmp_path / name))
        assert (code, found["outcome"]) == (3, "malformed")
        assert "get the evidence" in found["hint"].lower()
    code, found = audit_json(path, "--root", "00" * 32)
    assert (code, found["code"]) == (3, "E_WRONG_KEY")
    assert "--root" in found["hint"]


def test_verdicts_of_the_runs_verifiers_are_shown(world, write, honest):
    from protocol.messages import Verdict

    verdict = Verdict(
        run_id=world.run.run_id, verifier_id=VERIFIER.id, node_id=world.lease().node_id,
        lease_id=world.lease().lease_id, receipt_sha256=honest.receipt.digest, outcome="pass", code=None, tiers=["T0"],
        findings=[], samples=[], rewards_micro=[], tokens=0, issued_at_ms=0,
    )
    envelope = verdict.sign(VERIFIER)
    bent = replace(envelope, payload=envelope.payload.replace(b'"pass"', b'"fail"'))
    path = write(honest, verdicts=(envelope, verdict.sign(identity("liar")), bent))
    _, found = audit_json(path)
    assert [shown["outcome"] for shown in found["verdicts"]] == ["pass"]
    assert found["verdicts_ignored"] == 2
    assert [one["code"] for one in found["ignored"]] == ["E_WRONG_KEY", "E_SIGNATURE"]
    assert [one["signers"] for one in found["ignored"]] == [[identity("liar").id], [VERIFIER.id]]
    text = RUNNER.invoke(app, [path, "--html", str(Path(path).with_suffix(".html"))]).stdout
    assert f"verdict in the file: pass by {VERIFIER.id[:16]}\n" in text
    assert text.count("IGNORED (E_") == 2
    assert "own checks" in text
    page = Path(path).with_suffix(".html").read_text(encoding="utf-8")
    assert page.count("A verdict in the file was ignored (E_") == 2


def test_a_receipt_is_not_required(write, honest):
    assert audit_json(write(honest, receipt=None))[0] == 0


# -- the log in the evidence -------------------------------------------------------------------------------


def test_receipt_and_verdict_are_shown_in_the_log(world, write, honest):
    verdict = verdict_on(world, honest)
    code, found = audit_json(write(honest, verdicts=(verdict,), log=logged(world, honest, verdict)))
    assert (code, found["outcome"], found["in_log"]) == (0, "pass", True)
    assert [f["check"][:3] for f in found["findings"]][:3] == ["L.1", "L.2", "L.3"]
    assert audit_json(write(honest))[1]["in_log"] is False
    result = RUNNER.invoke(app, [write(honest)])
    assert "does not show" in result.stdout


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"submitted": {"sha256": "0" * 64}}, "E_LOG_SILENT"),
        ({"submitted": {"node_id": "0" * 64}}, "E_LOG_SILENT"),
        ({"submitted": {"commitment_sha256": "0" * 64}}, "E_LOG_SILENT"),  # what the draw is made of
        ({"verdict": {"sha256": "0" * 64}}, "E_LOG_SILENT"),
        ({"verdict": {"outcome": "fail", "code": "E_REPLAY"}}, "E_LOG_SILENT"),
        ({"verdict": {"tiers": ["T0", "T1", "T2"]}}, "E_LOG_SILENT"),
        ({"signer": VERIFIER}, "E_SIGNATURE"),
    ],
)
def test_a_log_that_says_something_else_is_never_held_against_the_node(world, write, honest, changes, code):
    verdict = verdict_on(world, honest)
    status, found = audit_json(write(honest, verdicts=(verdict,), log=logged(world, honest, verdict, **changes)))
    assert (status, found["outcome"], found["code"], found["in_log"]) == (4, "inconclusive", code, False)


def test_entries_that_are_not_under_the_head(world, write, honest):
    verdict = verdict_on(world, honest)
    proof = logged(world, honest, verdict)
    bent = replace(proof, entries=(replace(proof.entries[0], proof=proof.entries[1].proof), *proof.entries[1:]))
    status, found = audit_json(write(honest, verdicts=(verdict,), log=bent))
    assert (status, found["code"]) == (4, "E_LOG_INCLUSION")


def _with_bit(world, honest):
    envelope = honest.commitment
    [(name, signature)] = envelope.signatures.items()
    return {"commitment": replace(envelope, signatures={name: bytes([signature[0] ^ 1]) + signature[1:]})}


def _for_another_lease(world, honest):
    lease = world.lease(group=9)
    return {"lease": lease.sign(COORDINATOR), "receipt": None}


FRAMES = {
    "a bit of the signature": (_with_bit, "E_SIGNATURE"),
    "another payload type": (lambda _, honest: {"commitment": replace(honest.commitment, payload_type="x/y")},
                             "E_PAYLOAD_TYPE"),
    "another node's key": (lambda _, honest: {"node_public_key": identity("bob").public_key}, "E_WRONG_KEY"),
    "another lease of the node, no receipt": (_for_another_lease, "E_OTHER_LEASE"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_file_that_a_stranger_edited_says_nothing_against_the_node(world, tmp_path, honest, name):
    change, code = FRAMES[name]
    path = tmp_path / "framed.evidence"
    path.write_bytes(encode(replace(world.evidence(honest), **change(world, honest))))
    status, found = audit_json(str(path), "--checkpoint", str(world.store.path))
    assert (status, found["outcome"], found["code"]) == (3, "malformed", code)


def test_a_swapped_bundle_is_no_evidence(world, tmp_path, honest):
    other = BY_NAME["one token edited"](world, world.lease())
    path = tmp_path / "swapped.evidence"
    path.write_bytes(encode(replace(world.evidence(honest), bundle=other.bundle)))
    code, found = audit_json(str(path), "--checkpoint", str(world.store.path))
    assert (code, found["outcome"], found["code"]) == (3, "malformed", "E_OBJECT_HASH")
    assert (found["schema"], found["schema_version"], found["kind"]) == ("assay.audit", 1, "submission")


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_stands_alone_and_shows_every_token(world, write, tmp_path):
    path, page = write(BY_NAME["int8 weights"](world, world.lease())), tmp_path / "audit.html"
    arguments = [path, "--checkpoint", str(world.store.path), "--root", ROOT.public_key.hex(), "--html", str(page)]
    assert RUNNER.invoke(app, arguments).exit_code == 1
    text = page.read_text(encoding="utf-8")
    for word in ("http:", "https:", "<script", "@import", "url(", "<link", "src="):
        assert word not in text, word
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") == 4
    bundle = bundles.decode(decode(Path(path).read_bytes()).bundle, world.run.sampling)
    tokens = sum(len(rollout) for rollout in bundle.rollouts)
    assert text.count("<circle") == tokens
    assert text.count(' title="position ') == tokens
    assert 'class="bad"' in text
    assert "limit of one token" in text
    assert "quantised" in text
    assert f"--root {ROOT.public_key.hex()}" in text
    assert len(text) < 400_000


def test_the_page_without_a_model_and_of_a_cheat_that_needs_none(world, write, tmp_path):
    page = tmp_path / "audit.html"
    path = write(BY_NAME["one token edited"](world, world.lease()))
    assert RUNNER.invoke(app, [path, "--html", str(page)]).exit_code == 1
    text = page.read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "E_REPLAY" in text
    assert "no checkpoint was given" in text


# -- explanations ------------------------------------------------------------------------------------------


def test_a_code_is_explained():
    result = RUNNER.invoke(app, ["explain", "e_head_kl"])
    assert result.exit_code == 0
    for words in ("E_HEAD_KL:", "likely causes", "quantised", "what to do:"):
        assert words in result.stdout
    found = json.loads(RUNNER.invoke(app, ["explain", "E_LEASE_EXPIRED", "--json"]).stdout)
    assert "deadline" in found["meaning"]
    assert set(found) == {
        "schema", "schema_version", "kind", "outcome", "code", "meaning", "likely_causes", "what_to_do"
    }
    assert (found["schema"], found["schema_version"], found["kind"]) == ("assay.audit", 1, "explanation")


def test_every_code_that_is_given_a_cause_exists():
    assert set(CAUSES) | set(ADVICE) <= set(meanings())


def test_a_report_is_explained(world, write, tmp_path):
    report = tmp_path / "report.json"
    report.write_text(RUNNER.invoke(app, [write(BY_NAME["one token edited"](world, world.lease())), "--json"]).stdout)
    result = RUNNER.invoke(app, ["explain", str(report)])
    assert result.exit_code == 0
    for words in ("FAIL E_REPLAY", "checks do not hold", "T1.1", "position", "what to do:"):
        assert words in result.stdout
    found = json.loads(RUNNER.invoke(app, ["explain", str(report), "--json"]).stdout)
    assert found["report"]["failed"][0]["code"] == found["explanation"]["code"] == "E_REPLAY"


def test_a_code_of_a_later_release_is_told(tmp_path):
    report = {"schema": "assay.audit", "schema_version": 1, "kind": "log", "outcome": "fail", "code": "E_NEW_ONE"}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report | {"findings": []}))
    status, found = audit_json("explain", str(path))
    assert (status, found["explanation"]["code"], found["schema_version"]) == (0, "E_NEW_ONE", 1)
    text = RUNNER.invoke(app, ["explain", str(path)]).stdout
    assert text.startswith("FAIL E_NEW_ONE: 0 of 0")
    assert "does not know" in text


def test_a_report_is_explained_as_its_step_tells(world, write, tmp_path, honest):
    report = tmp_path / "report.json"
    log = logged(world, honest, verdict_on(world, honest), identity("somebody"))
    report.write_text(RUNNER.invoke(app, [write(honest, log=log), "--json"]).stdout)
    assert "head of the log" in str(audit_json("explain", str(report))[1]["explanation"]["likely_causes"])


def test_what_cannot_be_explained(tmp_path):
    assert "E_HEAD_KL" in audit_json("explain", "E_HED_KL")[1]["expected"]
    head = '"schema": "assay.audit", "schema_version": 1, "kind": "log", "outcome": "pass"'
    for text, words in (
        ("{", "no JSON"), ("", "empty"), ("[]", "a JSON list"), ("3", "a JSON number"), ('"x"', "a JSON text"),
        ("null", "a JSON null"), ('{"a": 1}', "another schema"), ('{"schema": []}', "another schema"),
        ('{"schema": "assay.audit"}', "schema version None"),
        ("{" + head.replace("1", "99") + "}", "schema version 99"),
        ("{" + head + "}", "code is missing"), ("{" + head + ', "code": 3, "findings": []}', "code is a JSON number"),
        ("{" + head + ', "code": null, "findings": {}}', "findings is a JSON object"),
        ("{" + head + ', "code": null, "findings": [1]}', "finding 0"),
        ("{" + head + ', "code": null, "findings": [{"ok": 1}]}', "finding 0"), ("\xff", "no JSON"),
        ("[" * 100_000, "no JSON"),
    ):
        path = tmp_path / "report.json"
        path.write_bytes(text.encode("latin-1"))
        code, found = audit_json("explain", str(path))
        assert (code, found["code"]) == (2, "E_USAGE")
        assert words in found["got"], (text[:40], found["got"])
        assert "indices" not in found["got"]
        assert "subscriptable" not in found["got"]


def test_help_names_options_and_verbs():
    text = RUNNER.invoke(app, ["--help"]).stdout
    for words in ("--checkpoint", "--html", "log", "run", "explain", "Exit codes"):
        assert words in text
