"""``assay audit run`` of a live coordinator: what the learner trained on was handed in, and had passed (D.9)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from protocol.client import CoordinatorClient
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, E_UNREACHABLE, AssayError, LocalFault, Transient
from protocol.log_entry import LogEntry
from protocol.messages import BatchGroup, BatchPlan, RunManifest
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID, World
from tests.fakes.whole_log import read_log
from verifier import log_cli
from verifier.audit_cli import app
from verifier.batch_audit import BatchAudit
from verifier.findings import Report

Log = list[LogEntry]
URL = "http://coordinator"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two groups, one of them trained on."""
    made = World(tmp_path_factory.mktemp("batches") / "run", FakeClock())
    made.publish()
    node = made.node().join()
    while len(made.learner.client.admitted(2)) < 2:
        node.work(2)
        made.verifier.pass_all()
    made.learner.client.post_batch(made.learner.plan())
    made.publish()
    yield made
    made.close()


@pytest.fixture(scope="module")
def log(world: World) -> Log:
    return read_log(world.http, RUN_ID, world.keys["coordinator"].public_key)


@pytest.fixture(scope="module")
def run(world: World) -> RunManifest:
    return world.coordinator.run.manifest


@pytest.fixture(scope="module")
def plan(world: World) -> Envelope:
    return world.learner.client.batch(1).plan


def check(run: RunManifest, log: Log, *plans: Envelope | AssayError) -> Report:
    """What is found when these plans are answered, from version 1 on."""
    def plan_of(version: int) -> Envelope:
        answer = plans[version - 1]
        if isinstance(answer, AssayError):
            raise answer
        return answer

    audit, report = BatchAudit(run), Report()
    assert list(audit.seen(iter(log))) == log
    audit.check(plan_of, report)
    return report


def named(log: Log, *plans: Envelope) -> Log:
    """The log, but the plans that it names are these."""
    bodies = iter(plans)
    return [
        entry if entry.kind != "batch"
        else LogEntry(entry.index, entry.at_ms, "batch", entry.body | {"sha256": next(bodies).digest})
        for entry in log
    ]


def without(log: Log, kind: str, receipt_id: str) -> Log:
    return [entry for entry in log if (entry.kind, entry.body.get("receipt_id")) != (kind, receipt_id)]


def receipt_of(log: Log, plan: Envelope) -> str:
    """Id of a receipt of the plan."""
    digest = BatchPlan.from_payload(plan.payload).groups[0].receipts[0]
    entry = next(entry for entry in log if entry.kind == "submitted" and entry.body["sha256"] == digest)
    return str(entry.body["receipt_id"])


def test_an_honest_batch_holds(run: RunManifest, log: Log, plan: Envelope) -> None:
    assert [entry.body["version"] for entry in log if entry.kind == "batch"] == [1]
    report = check(run, log, plan)
    assert report.clean
    assert [(finding.check, finding.got) for finding in report.findings] == [("D.9 batches", "1 plan")]


def test_a_receipt_that_nobody_handed_in(world: World, run: RunManifest, log: Log, plan: Envelope) -> None:
    receipt_id = receipt_of(log, plan)
    report = check(run, without(log, "submitted", receipt_id), plan)
    assert report.blamed == "E_BATCH_UNFOUNDED"
    assert "nobody handed it in" in report.findings[0].got
    made_up = BatchPlan.from_payload(plan.payload)
    made_up = made_up.model_copy(update={"groups": [*made_up.groups, BatchGroup(group=9, receipts=["ab" * 32])]})
    envelope = made_up.sign(world.keys["learner"])
    report = check(run, named(log, envelope), envelope)
    [finding] = report.findings
    assert (report.blamed, "abababab" in finding.got, "group 9" in finding.got) == ("E_BATCH_UNFOUNDED", True, True)


def test_a_receipt_that_had_not_passed(run: RunManifest, log: Log, plan: Envelope) -> None:
    receipt_id = receipt_of(log, plan)
    place = next(entry.index for entry in log if (entry.kind, entry.body.get("receipt_id")) == ("verdict", receipt_id))
    told, batch = log[place], next(entry.index for entry in log if entry.kind == "batch")

    def instead(index: int, **changes: Any) -> LogEntry:
        return LogEntry(index, told.at_ms, "verdict", {**told.body, **changes})

    for bent, wrong in (
        (without(log, "verdict", receipt_id), "no verdict that counted before"),
        ([*log[:place], instead(place, counted=False), *log[place + 1 :]], "no verdict that counted before"),
        ([*log[:place], instead(place, verifier_id="dd" * 32), *log[place + 1 :]], "no verdict that counted"),
        ([*log[:place], instead(place, outcome="inconclusive"), *log[place + 1 :]], "no verdict that counted"),
        ([*log[:place], *log[place + 1 :], instead(len(log))], "no verdict that counted before"),
        ([*log[:batch], instead(batch - 1, outcome="fail"), *log[batch:]], "a fail that counted before"),
    ):
        report = check(run, bent, plan)
        assert (report.blamed, report.excused) == ("E_BATCH_UNFOUNDED", None), wrong
        assert wrong in report.findings[0].got
    assert check(run, [*log, instead(len(log), outcome="fail")], plan).clean  # found out later


def test_a_plan_of_another_version_than_the_log_says(
    world: World, run: RunManifest, log: Log, plan: Envelope
) -> None:
    other = BatchPlan.from_payload(plan.payload).model_copy(update={"version": 7}).sign(world.keys["learner"])
    assert check(run, named(log, other), other).blamed == "E_BATCH_UNFOUNDED"


def test_an_answer_that_is_not_the_plan_blames_nobody(
    world: World, run: RunManifest, log: Log, plan: Envelope
) -> None:
    message = BatchPlan.from_payload(plan.payload)
    stranger = message.sign(world.keys["verifier"])
    for answer, expected in (
        (message.model_copy(update={"issued_at_ms": 0}).sign(world.keys["learner"]), "E_LOG_ANSWER"),
        (stranger, "E_LOG_ANSWER"), (LocalFault(E_NOT_FOUND, "none"), E_NOT_FOUND),
        (Transient(E_UNREACHABLE, "away"), E_UNREACHABLE),
    ):
        report = check(run, log, answer)
        assert (report.blamed, report.excused) == (None, expected)


def test_a_bad_plan_is_found_beside_one_that_nobody_answers(run: RunManifest, log: Log, plan: Envelope) -> None:
    receipt_id = receipt_of(log, plan)
    batch = next(entry for entry in log if entry.kind == "batch")
    again = LogEntry(len(log), batch.at_ms, "batch", {**batch.body, "version": 2})
    report = check(run, [*without(log, "verdict", receipt_id), again], LocalFault(E_NOT_FOUND, "none"), plan)
    assert (report.blamed, report.excused) == ("E_BATCH_UNFOUNDED", E_NOT_FOUND)
    report = check(run, [*log, again], Transient(E_UNREACHABLE, "away"), plan)
    assert len(report.findings) == 1  # nobody waits for version after version of a coordinator that is gone


def test_a_batch_entry_in_a_strange_form_is_no_plan(run: RunManifest, log: Log, plan: Envelope) -> None:
    for body in ({}, {"version": 2}, {"version": "2", "sha256": plan.digest}, {"version": 2, "sha256": ["x"]}):
        assert check(run, [*log, LogEntry(len(log), 0, "batch", body)], plan).clean


def test_the_first_release_told_too_little(run: RunManifest, log: Log, plan: Envelope) -> None:
    rebuilt = LogEntry(0, 0, "log-rebuilt", {"entries": 0})
    assert check(run, [rebuilt, *(entry for entry in log if entry.kind == "batch")], plan).clean


class _Between(httpx.BaseTransport):
    def __init__(self, world: World, answer: httpx.Response | None):
        self._world, self._answer = world, answer

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._answer is not None and request.url.path.startswith("/v1/batches/"):
            return self._answer
        return self._world.transport.handle_request(request)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(None, (0, None)), (httpx.Response(404, json={}), (4, "E_LOG_ANSWER")),
     (httpx.Response(200, json={"plan": [7]}), (4, "E_LOG_ANSWER")),
     (httpx.Response(200, json={"plan": None}), (4, "E_LOG_ANSWER"))],
)
def test_the_command_asks_for_the_plans(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: httpx.Response | None, expected: Any
) -> None:
    def connect(where: str, identity: None, deadline_s: float) -> CoordinatorClient:
        transport = _Between(world, answer)
        return CoordinatorClient(where, identity, transport=transport, clock=FakeClock(), deadline_s=deadline_s)

    monkeypatch.setattr(log_cli, "CoordinatorClient", connect)
    monkeypatch.setattr(log_cli, "SystemClock", lambda: world.clock)
    root = world.keys["root"].public_key.hex()
    result = CliRunner().invoke(app, ["run", URL, "--root", root, "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["code"]) == expected, found["findings"]
    [told] = [finding for finding in found["findings"] if finding["check"] == "D.9 batches"]
    assert told["ok"] == (answer is None)
    saved = tmp_path / "run.log"
    assert CliRunner().invoke(app, ["log", URL, "--root", root, "--save", str(saved)]).exit_code == 0
    offline = CliRunner().invoke(app, ["run", str(saved), "--json"])
    assert (offline.exit_code, "D.9" in offline.stdout) == (0, False)
