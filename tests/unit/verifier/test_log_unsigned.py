"""``assay audit log``: what comes over the wire is unsigned and blames nobody, and hides no fork that can be proven."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from protocol import log_file
from protocol.client import CoordinatorClient
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead, origin_of
from protocol.messages import Receipt
from protocol.transparency import EMPTY_ROOT, Peaks, consistency_proof, inclusion_proof
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID, World
from tests.fakes.log_tree import Tree
from tests.fakes.whole_log import read_log
from verifier import log_cli, log_growth
from verifier.audit_cli import app

RUNNER = CliRunner()
URL = "http://coordinator"
Log = list[LogEntry]
Bend = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: Any = World(tmp_path_factory.mktemp("log") / "run", FakeClock())
    made.publish()
    made.replies = made.node().join().work(2)
    made.verifier.judge()
    yield made
    made.close()


class Between(httpx.BaseTransport):
    """Somebody on the way who bends answers, by their path, or gives another one."""

    def __init__(self, world: World):
        self._world = world
        self.bends: dict[str, Bend] = {}
        self.instead: dict[str, Callable[[httpx.Request], httpx.Response]] = {}
        self.asked: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if path in self.instead:
            return self.instead[path](request)
        answer = self._world.transport.handle_request(request)
        if path not in self.bends:
            return answer
        told = json.loads(answer.read())
        self.bends[path](told)
        return httpx.Response(answer.status_code, json=told)


@pytest.fixture(autouse=True)
def between(world: World, monkeypatch: pytest.MonkeyPatch) -> Between:
    made = Between(world)

    def connect(where: str, identity: None, deadline_s: float) -> CoordinatorClient:
        return CoordinatorClient(where, identity, transport=made, clock=FakeClock(), deadline_s=deadline_s)

    monkeypatch.setattr(log_cli, "CoordinatorClient", connect)
    monkeypatch.setattr(log_cli, "SystemClock", lambda: world.clock)
    return made


def audit(world: World, *arguments: object, command: str = "log") -> tuple[int, dict[str, Any]]:
    words = [command, *map(str, arguments), "--root", world.keys["root"].public_key.hex(), "--json"]
    result = RUNNER.invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def entries(world: World) -> Log:
    return read_log(world.http, RUN_ID, world.keys["coordinator"].public_key)


def signed(world: World, log: Log, size: int | None = None) -> str:
    peaks = Peaks()
    for entry in log[:size]:
        peaks.append(entry.leaf)
    return LogHead(origin_of(RUN_ID), peaks.size, peaks.root).sign(world.keys["coordinator"])


def rewritten(log: Log, at: int) -> Log:
    return [*log[:at], LogEntry(at, log[at].at_ms, log[at].kind, {"nothing": "happened"}), *log[at + 1 :]]


def served(world: World, between: Between, log: Log) -> str:
    """Somebody serves a log with all its proofs; its newest head."""
    tree = Tree(entry.leaf for entry in log)

    def number(request: httpx.Request, name: str) -> int:
        return int(request.url.params[name])

    def page(request: httpx.Request) -> httpx.Response:
        first = number(request, "from")
        told = [entry.to_dict() for entry in log[first : first + number(request, "limit")]]
        return httpx.Response(200, json={"entries": told})

    def consistency(request: httpx.Request) -> httpx.Response:
        old, new = number(request, "from"), number(request, "to")
        if new > len(log):
            return httpx.Response(404, json={})
        return httpx.Response(200, json={"proof": [node.hex() for node in consistency_proof(tree, old, new)]})

    def inclusion(request: httpx.Request) -> httpx.Response:
        index, size = number(request, "index"), number(request, "size")
        proof = [node.hex() for node in inclusion_proof(tree, index, size)]
        return httpx.Response(200, json={"entry": log[index].to_dict(), "proof": proof})

    head = signed(world, log)
    between.instead = {
        "/v1/log": page, "/v1/log/consistency": consistency, "/v1/log/inclusion": inclusion,
        "/v1/log/head": lambda _: httpx.Response(200, content=head.encode()),
    }
    return head


def swap_first_hash(told: dict[str, Any]) -> None:
    told["proof"][0] = "00" * 32


def later(told: dict[str, Any]) -> None:
    told["entries"][1]["at_ms"] += 1


def other_receipt(told: dict[str, Any]) -> None:
    told["log"]["entries"][0]["entry"]["at_ms"] += 1


@pytest.fixture
def known(world: World, tmp_path: Path) -> Path:
    path = tmp_path / "known.head"
    path.write_text(signed(world, entries(world), 6))
    return path


def test_one_changed_hash_or_entry_accuses_nobody(world: World, between: Between, known: Path) -> None:
    receipt_id = Receipt.from_payload(world.replies[0].receipt.payload).receipt_id  # type: ignore[attr-defined]
    for path, bend, words, expected in (
        ("log", later, ["--all"], "E_LOG_ROOT"), ("log", later, None, "E_LOG_ROOT"),
        ("log/inclusion", swap_first_hash, [], "E_LOG_INCLUSION"),
        (f"receipts/{receipt_id}", other_receipt, ["--receipt", receipt_id], "E_LOG_INCLUSION"),
    ):
        between.bends = {f"/v1/{path}": bend}
        option = "--remember" if words is None else "--against"
        code, found = audit(world, URL, option, known, *(words or []), command="run" if words is None else "log")
        assert (code, found["outcome"], found["code"]) == (4, "inconclusive", expected), path
        assert found["conflicting_heads"] == []
        assert "by another way" in found["hint"]


def test_a_changed_proof_is_seen_through_by_the_entries(world: World, between: Between, known: Path) -> None:
    between.bends = {"/v1/log/consistency": swap_first_hash}
    code, found = audit(world, URL, "--against", known)
    assert (code, found["entries_read"]) == (0, len(entries(world)))
    assert "the proof that was answered is wrong" in found["findings"][1]["got"]
    assert between.asked.count("/v1/log") == 1


def test_wrong_proofs_without_their_entries_accuse_nobody(
    world: World, between: Between, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between.bends = {"/v1/log/consistency": swap_first_hash, "/v1/log": later}
    for words in ([], ["--against", known], ["--all"]):
        code, found = audit(world, URL, "--against", known, *words)
        expected = "E_LOG_ROOT" if "--all" in words else "E_LOG_CONSISTENCY"
        assert (code, found["outcome"], found["code"]) == (4, "inconclusive", expected)
        assert found["conflicting_heads"] == []
    assert between.asked.count("/v1/log") == 3  # once each, however many heads there are to compare with
    between.bends.pop("/v1/log")
    monkeypatch.setattr(log_growth, "MOST_READ", 7)
    code, found = audit(world, URL, "--against", known)
    assert (code, found["code"], found["entries_read"]) == (4, "E_LOG_CONSISTENCY", 0)
    assert "--all" in found["findings"][1]["got"]


def test_an_older_head_out_of_a_cache_accuses_nobody(world: World, between: Between, tmp_path: Path) -> None:
    log, newer = entries(world), tmp_path / "newer.head"
    newer.write_text(signed(world, log))
    cached = signed(world, log, 7)
    between.instead["/v1/log/head"] = lambda _: httpx.Response(200, content=cached.encode())
    for bends in ({}, {"/v1/log/consistency": swap_first_hash}):
        between.bends = bends
        code, found = audit(world, URL, "--remember", newer)
        assert (code, found["outcome"], found["code"]) == (4, "inconclusive", "E_LOG_ROLLBACK")
        assert found["conflicting_heads"] == []
        assert "a cache or a proxy" in found["likely_causes"][0]
    assert newer.read_text() == signed(world, log)


def test_an_older_head_of_another_history_is_a_fork(world: World, between: Between, tmp_path: Path) -> None:
    """The smaller head cannot be of the log under the larger: all entries of that one show it."""
    log, newer = entries(world), tmp_path / "newer.head"
    newer.write_text(signed(world, log))
    other = signed(world, rewritten(log, 2), 7)
    between.instead["/v1/log/head"] = lambda _: httpx.Response(200, content=other.encode())
    code, found = audit(world, URL, "--against", newer)
    assert (code, found["code"], found["conflicting_heads"]) == (1, "E_LOG_FORK", [newer.read_text()])
    assert (found["head"], found["entries_read"]) == (other, len(log))


def test_a_fork_is_proven_live_and_by_the_file_that_is_saved(world: World, between: Between, tmp_path: Path) -> None:
    """Whoever gets the two heads and the file comes to the same end, offline."""
    log, mine = entries(world), tmp_path / "mine.head"
    mine.write_text(signed(world, log, 6))
    head = served(world, between, rewritten(log, 2))
    code, found = audit(world, URL, "--remember", mine)
    assert (code, found["code"], found["conflicting_heads"]) == (1, "E_LOG_FORK", [mine.read_text()])
    assert (found["head"], mine.read_text()) == (head, signed(world, log, 6))
    saved = tmp_path / "proof.log"
    assert audit(world, URL, "--remember", mine, "--save", saved)[0] == 1
    between.instead.clear()
    code, found = audit(world, saved, "--against", mine)
    assert (code, found["code"], found["conflicting_heads"]) == (1, "E_LOG_FORK", [mine.read_text()])
    result = RUNNER.invoke(app, ["log", str(saved), "--against", str(mine)])
    for words in ("together they prove it to anybody", "what to do: Keep both signed heads", mine.read_text()[:60]):
        assert words in result.stdout


def test_a_fork_is_told_though_its_entries_cannot_be_saved(
    world: World, between: Between, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, mine, saved = entries(world), tmp_path / "mine.head", tmp_path / "proof.log"
    mine.write_text(signed(world, log, 6))
    served(world, between, rewritten(log, 2))
    page, asked = between.instead["/v1/log"], []

    def once(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return page(request) if len(asked) == 1 else httpx.Response(200, json={"entries": []})

    between.instead["/v1/log"] = once
    code, found = audit(world, URL, "--against", mine, "--save", saved)
    assert (code, found["code"], saved.exists()) == (1, "E_LOG_FORK", False)
    honest = entries(world)
    changed = [[entry.to_dict() for entry in told] for told in (honest, rewritten(honest, 3))]
    between.instead = {"/v1/log": lambda _: httpx.Response(200, json={"entries": changed.pop(0)})}
    code, found = audit(world, URL, "--save", saved)
    assert (code, found["outcome"], found["code"], saved.exists()) == (4, "inconclusive", "E_LOG_ANSWER", False)


def test_a_head_over_nothing_with_some_root_contradicts_every_log(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other.head"
    for root, expected in ((EMPTY_ROOT, (0, None)), (b"x" * 32, (1, "E_LOG_FORK"))):
        other.write_text(LogHead(origin_of(RUN_ID), 0, root).sign(world.keys["coordinator"]))
        code, found = audit(world, URL, "--against", other)
        assert (code, found["code"]) == expected


def test_the_log_of_a_receipt_from_another_history_is_a_fork(world: World, between: Between) -> None:
    """Its head is larger than the one that is audited, and of no log with it: its own entries show that."""
    log = entries(world)
    receipt_id = Receipt.from_payload(world.replies[0].receipt.payload).receipt_id  # type: ignore[attr-defined]
    honest = world.http.get("/v1/log/head").text
    fork = [*rewritten(log, 2), LogEntry(len(log), log[-1].at_ms, "leased", {})]
    head = served(world, between, fork)
    between.instead["/v1/log/head"] = lambda _: httpx.Response(200, content=honest.encode())
    between.bends[f"/v1/receipts/{receipt_id}"] = lambda told: told.update(log={"head": head, "entries": []})
    code, found = audit(world, URL, "--receipt", receipt_id)
    assert (code, found["code"], found["conflicting_heads"]) == (1, "E_LOG_FORK", [head])


def test_draws_under_a_signed_head_are_the_coordinators(world: World, between: Between) -> None:
    """Entries that break the rules are bound by the signature of their head, live too."""
    log = entries(world)
    place = next(entry.index for entry in log if entry.kind == "submitted")
    bent = LogEntry(place, log[place].at_ms, "submitted", {**log[place].body, "rate_ppm": 1})
    served(world, between, [*log[:place], bent, *log[place + 1 :]])
    code, found = audit(world, URL, command="run")
    assert (code, found["outcome"], found["code"]) == (1, "fail", "E_DRAW_RATE")


def test_a_saved_log_is_not_replaced_by_an_older_one(world: World, between: Between, tmp_path: Path) -> None:
    log, saved, newer = entries(world), tmp_path / "run.log", tmp_path / "newer.head"
    assert audit(world, URL, "--save", saved)[0] == 0
    newer.write_text(signed(world, log))
    served(world, between, log[:7])
    assert audit(world, URL, "--save", saved, "--against", newer)[1]["code"] == "E_LOG_ROLLBACK"
    assert len(list(log_file.LogFile.open(saved).entries())) == len(log)


@pytest.mark.parametrize("command", ["log", "run"])
def test_entries_that_were_signed_out_of_their_places_are_the_coordinators(
    world: World, between: Between, tmp_path: Path, command: str
) -> None:
    """Their hashes are under the signed head, so nobody else can have put them there."""
    log = entries(world)
    told = [*log[:4], log[5], log[4], *log[6:]]
    saved = tmp_path / "run.log"
    log_file.write(
        saved, world.keys["root"].public_key, world.coordinator.run.envelope, signed(world, told), iter(told)
    )
    served(world, between, told)
    for source in (URL, saved):
        code, found = audit(world, source, *(["--all"] if command == "log" else []), command=command)
        assert (code, found["outcome"], found["code"]) == (1, "fail", "E_LOG_ENTRY")
        assert "log entry out of place: 5" in found["findings"][1]["got"]
