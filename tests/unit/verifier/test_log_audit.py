"""``assay audit log``: live and from a file, honest and forged; exit codes as everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from protocol import evidence as evidence_file
from protocol import log_file
from protocol.client import CoordinatorClient
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead, origin_of
from protocol.messages import Receipt
from protocol.transparency import Peaks
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID, World
from tests.fakes.whole_log import read_log
from verifier import log_cli
from verifier.audit_cli import app

RUNNER = CliRunner()
URL = "http://coordinator"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = World(tmp_path_factory.mktemp("log") / "run", FakeClock())
    made.publish()
    made.replies = made.node().join().work(2)
    made.verifier.judge()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _connected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses lead to the coordinator in this process."""
    def connect(where: str, identity: None, deadline_s: float) -> CoordinatorClient:
        assert where == URL
        return CoordinatorClient(where, identity, transport=world.transport, clock=world.clock, deadline_s=deadline_s)

    monkeypatch.setattr(log_cli, "CoordinatorClient", connect)
    monkeypatch.setattr(log_cli, "SystemClock", lambda: world.clock)


def audit(world: World, *arguments: object, root: str | None = None) -> tuple[int, dict[str, Any]]:
    key = root or world.keys["root"].public_key.hex()
    result = RUNNER.invoke(app, ["log", *map(str, arguments), "--root", key, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def entries(world: World) -> list[LogEntry]:
    return read_log(world.http, RUN_ID, world.keys["coordinator"].public_key)


def signed(world: World, log: list[LogEntry], size: int | None = None) -> str:
    """A head over a history, signed by the coordinator: what a lying one can do."""
    peaks = Peaks()
    for entry in log[:size]:
        peaks.append(entry.leaf)
    return LogHead(origin_of(RUN_ID), peaks.size, peaks.root).sign(world.keys["coordinator"])


def rewritten(world: World, at: int) -> list[LogEntry]:
    log = entries(world)
    return [*log[:at], LogEntry(at, log[at].at_ms, log[at].kind, {"nothing": "happened"}), *log[at + 1 :]]


@pytest.fixture
def write(world: World, tmp_path: Path) -> Callable[..., Path]:
    """Writes a log file."""
    def to_file(log: list[LogEntry], head: str | None = None, **changes: Any) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        fields = {"root_public_key": world.keys["root"].public_key, "run_manifest": world.coordinator.run.envelope}
        log_file.write(path, **(fields | changes), head=head or signed(world, log), entries=log)
        return path

    return to_file


def test_a_head_is_remembered_and_must_be_part_of_the_next(world: World, tmp_path: Path) -> None:
    remember = tmp_path / "run.head"
    code, found = audit(world, URL, "--remember", remember)
    assert (code, found["outcome"], found["entries_read"]) == (0, "pass", 0)
    assert (found["schema"], found["schema_version"], found["kind"]) == ("assay.audit", 1, "log")
    assert remember.read_text() == found["head"] == world.http.get("/v1/log/head").text
    world.publish()
    code, found = audit(world, URL, "--remember", remember)
    assert code == 0
    assert any("entries added" in finding["got"] for finding in found["findings"])
    assert remember.read_text() == found["head"]


def test_every_entry_can_be_read_and_kept(world: World, tmp_path: Path) -> None:
    saved = tmp_path / "run.log"
    code, found = audit(world, URL, "--save", saved)
    assert (code, found["entries_read"]) == (0, len(entries(world)))
    assert audit(world, saved)[0] == 0
    assert audit(world, URL, "--all")[1]["entries_read"] == len(entries(world))
    assert list(log_file.LogFile.open(saved).entries()) == entries(world)


def test_receipts_and_heads_of_evidence_are_in_the_log(world: World, tmp_path: Path) -> None:
    receipt_id = Receipt.from_payload(world.replies[0].receipt.payload).receipt_id
    file = tmp_path / "one.evidence"
    file.write_bytes(world.verifier.client.evidence(receipt_id))
    world.publish()
    code, found = audit(world, URL, "--receipt", receipt_id, "--against", file)
    assert code == 0
    checks = {finding["check"] for finding in found["findings"]}
    assert checks == {"G.1 head", "G.3 only grown", "G.4 receipt", "G.5 goes on"}
    code, found = audit(world, URL, "--receipt", "0" * 32)
    assert (code, found["code"]) == (4, "E_NOT_FOUND")
    without = tmp_path / "own.evidence"
    evidence = evidence_file.decode(file.read_bytes())
    without.write_bytes(evidence_file.encode(evidence_file.Evidence(**{**vars(evidence), "log": None})))
    assert audit(world, URL, "--against", without)[0] == 2


@pytest.mark.parametrize("live", [True, False])
def test_forks_are_found_whatever_their_size(world: World, write: Any, tmp_path: Path, live: bool) -> None:
    log = entries(world)
    source = URL if live else write(log)
    for size in (3, 4, 7, len(log) - 1, len(log)):
        other = tmp_path / "other.head"
        other.write_text(signed(world, rewritten(world, 2), size))
        code, found = audit(world, source, "--remember", other)
        expected = "E_LOG_FORK" if size == len(log) or not live else "E_LOG_CONSISTENCY"
        assert (code, found["outcome"], found["code"]) == (1, "fail", expected)
        assert found["conflicting_heads"] == ([other.read_text()] if expected == "E_LOG_FORK" else [])
        assert other.read_text() != found["head"]  # what was remembered is not overwritten


def test_a_log_that_stands_still_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    later = FakeClock(world.clock.now_ms() + 1_600_000)
    monkeypatch.setattr(log_cli, "SystemClock", lambda: later)
    code, found = audit(world, URL)
    assert (code, found["outcome"], found["code"]) == (4, "inconclusive", "E_LOG_STALE")


@pytest.mark.parametrize("live", [True, False])
def test_rollbacks_are_found(world: World, write: Any, tmp_path: Path, live: bool) -> None:
    log = entries(world)
    newer = tmp_path / "newer.head"
    newer.write_text(signed(world, [*log, LogEntry(len(log), 1, "more", {})]))
    code, found = audit(world, URL if live else write(log), "--against", newer)
    assert (code, found["code"], found["conflicting_heads"]) == (1, "E_LOG_ROLLBACK", [newer.read_text()])


def test_forged_files_fail(world: World, write: Any) -> None:
    log = entries(world)
    head = signed(world, log)
    for forged, code in (
        (rewritten(world, 4), "E_LOG_ROOT"), (log[:-1], "E_LOG_ROOT"), (log[1:], "E_LOG_ENTRY"),
        ([*log, LogEntry(len(log), 1, "more", {})], "E_LOG_ROOT"), ([*log, log[-1]], "E_LOG_ENTRY"),
    ):
        status, found = audit(world, write(forged, head))
        assert (status, found["code"]) == (1, code)


def test_what_nobody_signed_is_no_evidence(world: World, write: Any, tmp_path: Path) -> None:
    log = entries(world)
    other = world.keys["learner"]
    by_another = LogHead(origin_of(RUN_ID), 0, Peaks().root).sign(other)
    elsewhere = LogHead(origin_of("0" * 32), 0, Peaks().root).sign(world.keys["coordinator"])
    for path, code in (
        (write(log, by_another), "E_SIGNATURE"), (write(log, "garbage"), "E_NOTE"),
        (write(log, elsewhere), "E_LOG_ORIGIN"),
        (write(log, run_manifest=world.coordinator.run.manifest.sign(other)), "E_SIGNATURE"),
        (write(log, root_public_key=other.public_key), "E_WRONG_KEY"),
    ):
        status, found = audit(world, path)
        assert (status, found["outcome"], found["code"]) == (3, "malformed", code), path
    broken = tmp_path / "broken.log"
    broken.write_bytes(write(log).read_bytes()[:-3])
    assert audit(world, broken)[1]["code"] == "E_LOG_FILE"
    remembered = tmp_path / "bad.head"
    remembered.write_text(by_another)
    assert audit(world, URL, "--remember", remembered)[0] == 3


def test_wrong_calls(world: World, tmp_path: Path, write: Any) -> None:
    assert RUNNER.invoke(app, ["log", URL]).exit_code == 2  # whose log should it be?
    assert RUNNER.invoke(app, ["log", str(tmp_path / "none")]).exit_code == 2
    assert RUNNER.invoke(app, ["log", URL, "--root", "x"]).exit_code == 2
    assert audit(world, write(entries(world)), "--receipt", "0" * 32)[0] == 2


def test_for_human_eyes(world: World, write: Any, tmp_path: Path) -> None:
    path = write(entries(world))
    result = RUNNER.invoke(app, ["log", str(path)])
    assert result.exit_code == 0, result.stdout
    assert "PASS" in result.stdout
    other = tmp_path / "other.head"
    other.write_text(signed(world, rewritten(world, 2)))
    result = RUNNER.invoke(app, ["log", str(path), "--against", str(other)])
    assert result.exit_code == 1
    assert "E_LOG_FORK" in result.stdout
    assert "prove it to anybody" in result.stdout
    assert result.stdout.count("assay-log/") >= 2
