"""``assay audit run``: the draws of a real coordinator hold; every way to cheat with them is named."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.epochs import Epochs
from protocol import log_file
from protocol.audit_draw import commit_to, is_drawn
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead, origin_of
from protocol.messages import RunManifest
from protocol.transparency import Peaks
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID, FakeVerifier, World
from tests.fakes.whole_log import read_log
from verifier.audit_cli import app
from verifier.draw_audit import DrawAudit, audit_draws
from verifier.findings import Report

RUNNER = CliRunner()
Log = list[LogEntry]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two epochs of work by an honest node past its ramp, a banned one, a pending one."""
    made = World(
        tmp_path_factory.mktemp("draws") / "run", FakeClock(), audit={"ramp": 2, "floor_ppm": 300_000},
        batch={"groups_per_batch": 20},
    )
    made.coordinator.epochs = Epochs(made.coordinator.run, lambda: b"k" * 32)
    made.coordinator.submissions._epochs = made.coordinator.epochs
    made.publish()
    honest, cheat = made.node().join(), made.node("cheat").join()
    for _ in range(8):
        honest.work(1)
        made.verifier.pass_all()
    cheat.work(1)
    made.verifier.judge("fail", "E_REPLAY")
    honest.work(4)
    made.verifier.judge("inconclusive", "E_STORE")
    made.clock.advance(2)
    made.verifier.pass_all()
    made.clock.advance(601)
    made.coordinator.sweep()  # the key is revealed, a new epoch begins
    honest.work(1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def log(world: World) -> Log:
    return read_log(world.http, RUN_ID, world.keys["coordinator"].public_key)


@pytest.fixture(scope="module")
def run(world: World) -> RunManifest:
    return world.coordinator.run.manifest


def codes(run: RunManifest, log: Log) -> set[str | None]:
    report = Report()
    audit_draws(run, log, report)
    assert len({finding.check for finding in report.findings}) == 9
    return {finding.code for finding in report.findings if not finding.ok}


def changed(log: Log, fits: Callable[[LogEntry], bool], **body: Any) -> Log:
    """The log with the first fitting entry changed."""
    index = next(entry.index for entry in log if fits(entry))
    entry = log[index]
    return [*log[:index], LogEntry(index, entry.at_ms, entry.kind, {**entry.body, **body}), *log[index + 1 :]]


def without(log: Log, fits: Callable[[LogEntry], bool]) -> Log:
    return _renumbered([entry for entry in log if not fits(entry)])


def _renumbered(log: Log) -> Log:
    return [LogEntry(index, entry.at_ms, entry.kind, entry.body) for index, entry in enumerate(log)]


def assert_accounted(counts: DrawAudit) -> None:
    """Every receipt is in one sum, every drawn one in one of its parts."""
    assert counts.receipts == counts.drawn + counts.not_drawn + counts.secret
    parts = (counts.drawn_recomputed, counts.drawn_failed, counts.drawn_void, counts.drawn_set_aside,
             counts.drawn_skipped, counts.undecided)
    assert counts.drawn == sum(parts)


def is_verdict(entry: LogEntry, *, recomputed: bool) -> bool:
    return entry.kind == "verdict" and entry.body["outcome"] == "pass" and ("T2" in entry.body["tiers"]) == recomputed


def test_the_draws_of_an_honest_coordinator_hold(run: RunManifest, log: Log) -> None:
    report = Report()
    counts = audit_draws(run, log, report)
    assert report.clean, [finding for finding in report.findings if not finding.ok]
    assert (counts.receipts, counts.bans, counts.operator_bans) == (14, 1, 0)
    assert counts.secret == 1
    assert 0 < counts.drawn < 13
    assert all(finding.ok for finding in report.findings)
    assert counts.recomputed == counts.drawn - 1  # the cheat failed before T2
    assert counts.undecided == 0
    assert_accounted(counts)
    assert (counts.drawn_failed, counts.drawn_recomputed) == (1, counts.recomputed)
    assert f"of the {counts.drawn} drawn: {counts.recomputed} recomputed, 1 failed before that" in counts.words()


def test_the_rates_were_not_all_the_same(log: Log) -> None:
    rates = {entry.body["rate_ppm"] for entry in log if entry.kind == "submitted"}
    assert {1_000_000, 500_000} <= rates
    assert len(rates) >= 3


def test_another_key_than_the_committed_one(run: RunManifest, log: Log) -> None:
    """A coordinator that picks its key after the fact, to have somebody drawn or spared."""
    assert "E_DRAW_KEY" in codes(run, changed(log, lambda entry: entry.kind == "epoch-revealed", key=(b"x" * 32).hex()))
    bound = changed(log, lambda entry: entry.kind == "epoch-began", key_sha256=commit_to(b"x" * 32))
    assert "E_DRAW_KEY" in codes(run, bound)
    untold = without(log, lambda entry: entry.kind == "epoch-revealed")
    later_ms = log[-1].at_ms + 10**7
    ticks = [LogEntry(0, later_ms + after_ms, "leased", {}) for after_ms in (0, 300_001)]
    assert "E_DRAW_KEY" in codes(run, _renumbered([*untold, *ticks]))
    assert "E_DRAW_KEY" in codes(run, changed(log, lambda entry: entry.kind == "epoch-began", epoch=5))


def test_a_receipt_after_the_key_was_told(run: RunManifest, log: Log) -> None:
    late = changed(log, lambda entry: entry.kind == "submitted" and entry.body["epoch"] == 1, epoch=0)
    assert "E_DRAW_LATE" in codes(run, late)
    early = changed(log, lambda entry: entry.kind == "submitted", epoch=1)
    assert "E_DRAW_LATE" in codes(run, early)


@pytest.mark.parametrize("rate", [0, 299_999, 1_000_000])
def test_another_rate_than_the_rules(run: RunManifest, log: Log, rate: int) -> None:
    last = [entry for entry in log if entry.kind == "submitted"][-2]
    assert last.body["rate_ppm"] != rate
    assert "E_DRAW_RATE" in codes(run, changed(log, lambda entry: entry.index == last.index, rate_ppm=rate))


def test_a_drawn_bundle_that_was_let_pass(run: RunManifest, log: Log) -> None:
    skipped = changed(log, lambda entry: is_verdict(entry, recomputed=True), tiers=["T0", "T1"])
    assert "E_DRAW_SKIPPED" in codes(run, skipped)


def test_every_drawn_receipt_is_accounted_for(run: RunManifest, log: Log) -> None:
    """One drawn receipt at a time ends otherwise; each end has its own sum."""
    first = next(entry for entry in log if is_verdict(entry, recomputed=True))
    plain = audit_draws(run, log, Report())

    def ended(*instead: LogEntry) -> DrawAudit:
        return audit_draws(run, _renumbered([*log[: first.index], *instead, *log[first.index + 1 :]]), Report())

    receipt = first.body["receipt_id"]
    node = next(entry.body["node_id"] for entry in log if entry.body.get("receipt_id") == receipt)
    ban = {"node_id": node, "code": "E_BANNED", "reason": "so", "receipt_id": None, "until_ms": None}
    for counts, name in (
        (ended(), "undecided"), (ended(LogEntry(0, 0, "set-aside", {"receipt_id": receipt})), "drawn_set_aside"),
        (ended(LogEntry(0, 0, "banned", ban)), "drawn_void"),
        (ended(LogEntry(0, 0, "verdict", {**first.body, "tiers": ["T0"]})), "drawn_skipped"),
        (ended(LogEntry(0, 0, "verdict", {**first.body, "outcome": "fail", "tiers": ["T0"]})), "drawn_failed"),
    ):
        assert_accounted(counts)
        assert counts.drawn == plain.drawn
        assert getattr(counts, name) == getattr(plain, name) + 1, name
        assert counts.drawn_recomputed == plain.drawn_recomputed - 1
        assert ("PASSED WITHOUT IT" in counts.words()) == (name == "drawn_skipped")


def test_a_bundle_recomputed_on_a_false_pretext(run: RunManifest, log: Log) -> None:
    singled_out = changed(log, lambda entry: is_verdict(entry, recomputed=False), tiers=["T0", "T1", "T2"])
    assert "E_DRAW_PRETEXT" in codes(run, singled_out)
    index = next(entry.index for entry in log if is_verdict(entry, recomputed=False))
    receipt_id = log[index].body["receipt_id"]
    reviewed = _renumbered([
        *log[: index + 1], LogEntry(0, 0, "review", {"receipt_id": receipt_id, "why": "screen"}),
        LogEntry(
            0, 0, "verdict", {**log[index].body, "tiers": ["T0", "T1", "T2"], "counted": False, "sha256": "5a" * 32}
        ),
        *log[index + 1 :],
    ])
    assert codes(run, reviewed) == set()


def test_a_ban_that_nothing_speaks_for(run: RunManifest, log: Log) -> None:
    banned = next(entry for entry in log if entry.kind == "banned")
    honest = next(entry.body["receipt_id"] for entry in log if is_verdict(entry, recomputed=True))

    def is_ban(entry: LogEntry) -> bool:
        return entry.kind == "banned"

    assert codes(run, changed(log, is_ban, receipt_id=honest)) == {"E_BAN_UNFOUNDED"}
    assert codes(run, changed(log, is_ban, receipt_id="0" * 32)) == {"E_BAN_UNFOUNDED"}
    assert codes(run, changed(log, is_ban, receipt_id=None)) == set()  # counted as the operator's, with its reason
    hidden = without(log, lambda entry: entry.kind == "verdict" and entry.body["outcome"] == "fail")
    assert "E_BAN_UNFOUNDED" in codes(run, hidden)
    assert banned.body["reason"]


def test_entries_of_a_strange_form_are_the_coordinators_fault(run: RunManifest, log: Log) -> None:
    for bent in (
        changed(log, lambda entry: entry.kind == "verdict", tiers=None),
        changed(log, lambda entry: entry.kind == "epoch-revealed", key="no hex"),
        changed(log, lambda entry: entry.kind == "submitted", epoch=[]),
    ):
        assert "E_LOG_ENTRY" in codes(run, bent)


def test_forced_audits_explain_a_high_rate(world: World, run: RunManifest, log: Log) -> None:
    last = [entry for entry in log if entry.kind == "submitted"][-2]
    raised = changed(log, lambda entry: entry.index == last.index, rate_ppm=1_000_000)
    drawn = is_drawn(b"k" * 32, last.body["commitment_sha256"], last.body["rate_ppm"])
    forced = LogEntry(0, 0, "audits-forced", {"node_id": last.body["node_id"], "bundles": 1, "why": "reward"})
    found = codes(run, _renumbered([*raised[: last.index], forced, *raised[last.index :]]))
    assert found == (set() if drawn else {"E_DRAW_SKIPPED"})


def test_the_command_works_offline(
    world: World, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an offline audit opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)

    def write(entries: Log) -> str:
        peaks = Peaks()
        for entry in entries:
            peaks.append(entry.leaf)
        head = LogHead(origin_of(RUN_ID), peaks.size, peaks.root).sign(world.keys["coordinator"])
        path = tmp_path / f"{hashlib.sha256(head.encode()).hexdigest()[:8]}.log"
        log_file.write(path, world.keys["root"].public_key, world.coordinator.run.envelope, head, entries)
        return str(path)

    result = RUNNER.invoke(app, ["run", write(log), "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["kind"], found["outcome"]) == (0, "run", "pass")
    assert found["draws"]["receipts"] == 14
    result = RUNNER.invoke(app, ["run", write(log)])
    assert "14 receipts" in result.stdout
    skipped = changed(log, lambda entry: is_verdict(entry, recomputed=True), tiers=["T0", "T1"])
    remember = tmp_path / "run.head"
    result = RUNNER.invoke(app, ["run", write(skipped), "--json", "--remember", str(remember)])
    assert (result.exit_code, json.loads(result.stdout)["code"]) == (1, "E_DRAW_RATE")
    assert not remember.exists()


@pytest.mark.parametrize(("outcome", "found"), [("pass", None), ("fail", "E_HEAD_KL")])
def test_a_second_verifier_cannot_have_the_coordinator_accused(tmp_path: Path, outcome: str, found: str | None) -> None:
    """It signs a recomputation that nobody asked for, after the bundle has passed."""
    made = World(tmp_path / "run", FakeClock(), audit={"ramp": 0, "floor_ppm": 0}, batch={"groups_per_batch": 20})
    made.publish()
    made.node().join().work(1)
    job = made.verifier.claim()
    made.verifier.client.verdict(made.verifier.verdict(job))
    other = FakeVerifier(made.keys["verifier2"], made.client(made.keys["verifier2"]), made.clock)
    other.client.verdict(other.verdict(job, outcome, found, tiers=["T0", "T1", "T2", "T3"]))
    made.clock.advance(700)
    made.coordinator.sweep()
    report = Report()
    audit_draws(made.coordinator.run.manifest, read_log(made.http, RUN_ID, made.keys["coordinator"].public_key), report)
    made.close()
    assert report.clean
    [finding] = [finding for finding in report.findings if not finding.ok]
    assert (finding.code, made.keys["verifier2"].public_key.hex() in finding.got) == ("E_VERIFIER_UNASKED", True)
