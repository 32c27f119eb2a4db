"""``assay audit log``: live and from a file, honest and forged; exit codes as everywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from protocol import evidence as evidence_file
from protocol import log_file
from protocol.client import CoordinatorClient
from protocol.log_entry import LogEntry
from protocol.log_file import LogFile
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


class Between(httpx.BaseTransport):
    """Whoever sits between us and the coordinator, and answers in its stead."""

    def __init__(self, world: World):
        self._world = world
        self.answers: dict[str, Callable[[], httpx.Response]] = {}  #: by path
        self.asked: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        answer = self.answers.get(request.url.path)
        return answer() if answer else self._world.transport.handle_request(request)


@pytest.fixture(autouse=True)
def between(world: World, monkeypatch: pytest.MonkeyPatch) -> Between:
    """Addresses lead to the coordinator in this process."""
    made = Between(world)

    def connect(where: str, identity: None, deadline_s: float) -> CoordinatorClient:
        assert where == URL
        return CoordinatorClient(where, identity, transport=made, clock=FakeClock(), deadline_s=deadline_s)

    monkeypatch.setattr(log_cli, "CoordinatorClient", connect)
    monkeypatch.setattr(log_cli, "SystemClock", lambda: world.clock)
    return made


def audit(
    world: World, *arguments: object, root: str | None = None, command: str = "log"
) -> tuple[int, dict[str, Any]]:
    key = root or world.keys["root"].public_key.hex()
    result = RUNNER.invoke(app, [command, *map(str, arguments), "--root", key, "--json"])
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
    key = world.keys["root"].public_key.hex()
    for command in ("log", "run"):  # whose key it was is said, and whether that is what was asked for
        pinned = audit(world, saved, command=command)[1]
        assert (pinned["root"], pinned["root_pinned"]) == (key, True)
        found = json.loads(RUNNER.invoke(app, [command, str(saved), "--json"]).stdout)
        assert (found["root"], found["root_pinned"]) == (key, False)
        assert f"root key {key} (NOT pinned" in RUNNER.invoke(app, [command, str(saved)]).stdout


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
    assert "the coordinator says that its log holds no such receipt" in found["findings"][1]["got"]
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
        assert (code, found["outcome"], found["code"]) == (1, "fail", "E_LOG_FORK")
        assert found["conflicting_heads"] == [other.read_text()]
        assert found["entries_read"] == (len(log) if size < len(log) or not live else 0)
        assert other.read_text() != found["head"]  # what was remembered is not overwritten


@pytest.mark.parametrize("command", ["log", "run"])
@pytest.mark.parametrize("off_ms", [1_600_000, -400_000, -(10**12)])
def test_a_log_that_stands_still_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch, command: str, off_ms: int
) -> None:
    """An entry of the future would keep it fresh for ever."""
    monkeypatch.setattr(log_cli, "SystemClock", lambda: FakeClock(world.clock.now_ms() + off_ms))
    code, found = audit(world, URL, command=command)
    assert (code, found["outcome"], found["code"]) == (4, "inconclusive", "E_LOG_STALE")


@pytest.mark.parametrize("command", ["log", "run"])
def test_clocks_may_be_a_little_apart(world: World, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(log_cli, "SystemClock", lambda: FakeClock(entries(world)[-1].at_ms - 200_000))
    code, found = audit(world, URL, command=command)
    assert (code, found["findings"][-1]["got"]) == (0, "0 s old")


def test_a_smaller_live_log_than_a_signed_head_proves_nothing(world: World, tmp_path: Path) -> None:
    log = entries(world)
    newer = tmp_path / "newer.head"
    newer.write_text(signed(world, [*log, LogEntry(len(log), 1, "more", {})]))
    for whole in ([], ["--all"]):
        code, found = audit(world, URL, "--against", newer, *whole)
        assert (code, found["code"], found["conflicting_heads"]) == (4, "E_LOG_ROLLBACK", [])
        assert "by another way" in found["hint"]
    result = RUNNER.invoke(
        app, ["log", URL, "--root", world.keys["root"].public_key.hex(), "--against", str(newer)]
    )
    assert "prove it" not in result.stdout


@pytest.mark.parametrize("command", ["log", "run"])
def test_an_older_copy_blames_nobody(world: World, write: Any, tmp_path: Path, command: str) -> None:
    log = entries(world)
    newer = tmp_path / "newer.head"
    newer.write_text(signed(world, log))
    copy = write(log[:-3])
    code, found = audit(world, copy, "--remember", newer, command=command)
    assert (code, found["outcome"], found["code"]) == (4, "inconclusive", "E_LOG_BEHIND")
    assert found["conflicting_heads"] == []
    assert "older than the head you know" in found["findings"][2]["got"]
    assert newer.read_text() == signed(world, log)


@pytest.mark.parametrize("command", ["log", "run"])
def test_a_file_that_somebody_spoilt_is_no_evidence(world: World, write: Any, tmp_path: Path, command: str) -> None:
    log = entries(world)
    head, known = signed(world, log), tmp_path / "known.head"
    known.write_text(signed(world, log, 6))
    for forged in (
        rewritten(world, 4), log[:-1], log[1:], [*log, LogEntry(len(log), 1, "more", {})], [*log, log[-1]],
        [*log[:3], log[4], log[3], *log[5:]],
    ):
        status, found = audit(world, write(forged, head), "--remember", known, command=command)
        assert (status, found["outcome"], found["code"]) == (3, "malformed", "E_LOG_ROOT")
    spoilt = write(log)
    for data, code in ((spoilt.read_bytes()[:-9], "E_LOG_FILE"), (spoilt.read_bytes() + b"\nmore", "E_JSON")):
        spoilt.write_bytes(data)
        status, found = audit(world, spoilt, "--remember", known, command=command)
        assert (status, found["outcome"], found["code"]) == (3, "malformed", code)


def test_two_heads_of_one_size_prove_a_fork_whatever_became_of_the_entries(
    world: World, write: Any, tmp_path: Path
) -> None:
    log = entries(world)
    other, older = tmp_path / "other.head", tmp_path / "older.head"
    other.write_text(signed(world, rewritten(world, 2)))
    older.write_text(signed(world, log, 6))
    code, found = audit(world, write(log[:-1], signed(world, log)), "--against", other, "--against", older)
    assert (code, found["code"], found["conflicting_heads"]) == (1, "E_LOG_FORK", [other.read_text()])
    assert [finding["code"] for finding in found["findings"]] == [None, "E_LOG_ROOT", "E_LOG_FORK"]


def test_the_draws_are_those_of_the_entries_that_were_checked(
    world: World, write: Any, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers another time with other entries is not asked another time."""
    log, reads = entries(world), []
    honest = LogFile.entries

    def once(file: LogFile) -> Iterator[LogEntry]:
        reads.append(file.path)
        return honest(file) if len(reads) == 1 else iter(log[:2])

    monkeypatch.setattr(LogFile, "entries", once)
    code, found = audit(world, write(log), command="run")
    assert (code, len(reads), found["draws"]["receipts"]) == (0, 1, 2)
    code, found = audit(world, URL, command="run")
    assert (code, between.asked.count("/v1/log"), found["draws"]["receipts"]) == (0, 1, 2)


def test_draws_of_entries_that_are_not_under_the_head_are_not_told(world: World, between: Between) -> None:
    log = entries(world)
    for told in (rewritten(world, 4), [LogEntry(0, 1, "submitted", {}), *log[1:]]):
        body = {"entries": [entry.to_dict() for entry in told]}
        between.answers["/v1/log"] = lambda body=body: httpx.Response(200, json=body)
        code, found = audit(world, URL, command="run")
        assert (code, found["code"], found["draws"]["receipts"]) == (4, "E_LOG_ROOT", 0)
        assert not any(finding["check"].startswith("D.") for finding in found["findings"])


PROBLEM = {
    "type": "urn:assay:error:E_LOG_FORK", "title": "x", "status": 422, "detail": "\ud800", "code": "E_LOG_FORK",
    "expected": "\udfff", "got": None, "hint": None,
}


@pytest.mark.parametrize(
    "answer",
    [
        lambda: httpx.Response(404, content=b"<html>"), lambda: httpx.Response(200, content=b"<html>"),
        lambda: httpx.Response(422, content=json.dumps(PROBLEM)),
        lambda: httpx.Response(422, content=json.dumps(PROBLEM | {"fault": "local", "code": "E_USAGE"})),
        lambda: httpx.Response(503, content=json.dumps(PROBLEM | {"fault": "transient", "code": "E_UNREACHABLE"})),
        lambda: httpx.Response(200, content=b'{"entries":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        lambda: httpx.Response(200, content=b'{"entries":["\\ud800"],"proof":"\\ud800","entry":"\\ud800","log":7}'),
        lambda: httpx.Response(200, content=b'{"entries":[],"proof":null,"entry":null,"log":{"head":"","entries":[]}}'),
        lambda: httpx.Response(200, content=b"[]"), lambda: httpx.Response(200, content=b"\xff\xfe"),
        lambda: httpx.Response(302, headers={"location": "http://["}),
    ],
)
@pytest.mark.parametrize(
    "place", ["run", "log/head", "log", "log/inclusion", "log/consistency", f"receipts/{'a' * 32}"]
)
def test_answers_that_nobody_signed_blame_nobody(
    world: World, between: Between, tmp_path: Path, place: str, answer: Callable[[], httpx.Response]
) -> None:
    between.answers[f"/v1/{place}"] = answer
    known = tmp_path / "known.head"
    known.write_text(signed(world, entries(world), 6))
    whole = ["--all"] if place == "log" else []
    receipt = ["--receipt", "a" * 32] if place.startswith("receipts") else []
    code, found = audit(world, URL, "--against", known, *whole, *receipt)
    assert (code, found["outcome"]) == (4, "inconclusive")
    assert found["code"] in ("E_LOG_ANSWER", "E_UNREACHABLE")


def test_entries_that_were_not_asked_for_blame_nobody(world: World, between: Between) -> None:
    log = [entry.to_dict() for entry in entries(world)]
    for page, expected in (
        ([], "E_LOG_ANSWER"), (log[1:], "E_LOG_ANSWER"), ([*log, log[-1]], "E_LOG_ANSWER"), (log[::-1], "E_LOG_ROOT")
    ):
        between.answers["/v1/log"] = lambda page=page: httpx.Response(200, json={"entries": page})
        code, found = audit(world, URL, "--all")
        assert (code, found["code"]) == (4, expected)


def test_a_log_about_a_receipt_must_be_the_coordinators(world: World, between: Between) -> None:
    receipt_id = Receipt.from_payload(world.replies[0].receipt.payload).receipt_id
    path, log = f"/v1/receipts/{receipt_id}", entries(world)
    honest = world.http.get(path).json()
    by_another = LogHead(origin_of(RUN_ID), 0, Peaks().root).sign(world.keys["learner"])
    forked = signed(world, rewritten(world, 2))
    for proof, expected, conflicts in (
        (honest["log"] | {"entries": []}, (4, "E_LOG_SILENT"), []),
        ({"head": by_another, "entries": []}, (4, "E_LOG_ANSWER"), []),
        ({"head": forked, "entries": []}, (1, "E_LOG_FORK"), [forked]),
        (honest["log"] | {"head": signed(world, log, 3)}, (4, "E_LOG_INCLUSION"), []),
    ):
        between.answers[path] = lambda proof=proof: httpx.Response(200, json=honest | {"log": proof})
        code, found = audit(world, URL, "--receipt", receipt_id)
        assert (code, found["code"], found["conflicting_heads"]) == (*expected, conflicts)


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


def test_wrong_calls(world: World, tmp_path: Path, write: Any, between: Between) -> None:
    assert RUNNER.invoke(app, ["log", URL]).exit_code == 2  # whose log should it be?
    assert RUNNER.invoke(app, ["log", str(tmp_path / "none")]).exit_code == 2
    assert RUNNER.invoke(app, ["log", URL, "--root", "x"]).exit_code == 2
    assert audit(world, write(entries(world)), "--receipt", "0" * 32)[0] == 2
    for receipt in ("typo", "../nodes", "", "A" * 32, "0" * 33):
        code, found = audit(world, URL, "--receipt", receipt)
        assert (code, found["code"], found["message"]) == (2, "E_USAGE", "--receipt is no receipt id")
    assert not between.asked


def test_what_is_no_log_is_not_written_over(world: World, tmp_path: Path, write: Any) -> None:
    precious = tmp_path / "precious.txt"
    for data in (b"my thesis", b"\xff\xfe", b"{}\n"):
        precious.write_bytes(data)
        for option in ("--save", "--remember"):
            code, found = audit(world, URL, option, precious)
            assert (code, found["code"], option in found["message"]) == (2, "E_USAGE", True)
            assert "log again" not in found["hint"]
        code, found = audit(world, URL, "--against", precious)
        assert (code, found["message"]) == (2, "--against: the file holds no log head")
        assert precious.read_bytes() == data
    precious.write_bytes(b"")
    assert audit(world, URL, "--save", precious)[0] == 0
    assert audit(world, URL, "--save", precious)[0] == 0  # an older log may be replaced
    code, found = audit(world, URL, "--remember", precious)
    assert (code, found["message"]) == (2, "--remember: the file holds no log head")
    other = tmp_path / "other.head"
    other.write_text(LogHead(origin_of("0" * 32), 0, Peaks().root).sign(world.keys["coordinator"]))
    code, found = audit(world, URL, "--remember", other)
    assert (code, found["code"]) == (3, "E_LOG_ORIGIN")
    assert str(other) in found["hint"]


def test_pipes_and_endless_files_are_refused(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    for call in ([pipe], [URL, "--against", pipe], [URL, "--remember", pipe], ["/dev/zero"]):
        code, found = audit(world, *call)
        assert (code, found["code"]) == (2, "E_USAGE")
        assert "is a pipe or a device" in found["message"]
    monkeypatch.setattr(log_cli, "_MAX_EVIDENCE_BYTES", 1 << 20)
    for start, code in ((evidence_file.MAGIC, (3, "E_TOO_LARGE")), (b"", (2, "E_USAGE"))):
        huge.write_bytes(start)
        os.truncate(huge, 1 << 40)  # with a hole in it
        status, found = audit(world, URL, "--against", huge)
        assert (status, found["code"]) == code
        assert "log again" not in found["hint"]
    assert audit(world, huge)[0] == 3


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
    assert "Both are signed: keep them, they prove it to anybody." in result.stdout
    assert result.stdout.count("assay-log/") >= 2
    other.write_text(signed(world, rewritten(world, 2), 5))
    result = RUNNER.invoke(app, ["log", str(path), "--against", str(other)])
    assert result.exit_code == 1
    assert "keep them and the log's entries" in result.stdout
