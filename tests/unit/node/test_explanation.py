"""``assay node explain``: signed receipt, verdict and log of one's own work, and a coordinator that shows others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.explanation import Explanation, explain
from node.home import Home, Pin
from node.spool import Receipts
from protocol.api import SubmitReply
from protocol.errors import LocalFault, PeerFault
from protocol.messages import Receipt
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID, FakeNode, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "run", FakeClock())
    made.publish()
    yield made
    made.close()


@pytest.fixture
def node(world: World) -> FakeNode:
    return world.node().join()


@pytest.fixture
def home(world: World, node: FakeNode, tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    node.key.save(home.key)
    pin = Pin(coordinator="http://nowhere", root=world.keys["root"].public_key.hex(), run_id=RUN_ID, name="me")
    home.remember(pin, world.coordinator.run.envelope)
    return home


def keep(home: Home, reply: SubmitReply) -> Receipt:
    receipt = Receipt.from_payload(reply.receipt.payload)
    Receipts(home.receipts).add(receipt.lease_id, receipt.receipt_id, reply.receipt.to_dict())
    return receipt


def lines(found: Explanation) -> str:
    return "\n".join(found.lines())


def test_a_failure_is_explained_with_what_was_signed(world: World, node: FakeNode, home: Home) -> None:
    receipt = keep(home, node.work(1)[0])
    world.verifier.judge("fail", "E_REPLAY")
    for what in (receipt.receipt_id, receipt.lease_id, None):
        found = explain(home, node.client, what)
        assert (found.receipt_id, found.state, found.code) == (receipt.receipt_id, "fail", "E_REPLAY")
        assert found.receipt_kept
        assert found.in_log, found.log_fault
    text = lines(found)
    evidence = f"/v1/evidence/{receipt.receipt_id}"
    for words in ("fail E_REPLAY", "expected  a", "got       b", "edited after the draw", evidence):
        assert words in text
    assert found.to_dict()["verdicts"][0]["code"] == "E_REPLAY"
    assert found.to_dict()["likely_causes"]


def test_a_failure_is_shown_before_what_its_ban_voided(world: World, node: FakeNode, home: Home) -> None:
    failed = keep(home, node.work(1)[0])
    world.verifier.judge("fail", "E_REPLAY")
    shown = [{"receipt_id": "0" * 32, "state": "void"}, {"receipt_id": failed.receipt_id, "state": "fail"}]
    answer = node.client.node(node.key.id) | {"receipts": shown}
    node.client.node = lambda _: answer  # type: ignore[method-assign]
    assert explain(home, node.client, None).receipt_id == failed.receipt_id


def test_the_owner_of_a_banned_node_is_told_why_and_for_how_long(
    world: World, node: FakeNode, home: Home
) -> None:
    failed = keep(home, node.work(1)[0])
    world.verifier.judge("fail", "E_REPLAY")
    record = node.client.node(node.key.id)
    assert (record["state"], record["ban_receipt_id"]) == ("banned", failed.receipt_id)
    later = [{"receipt_id": f"{number:032x}", "state": "void"} for number in range(20)]  # what is on the first page
    node.client.node = lambda _: record | {"receipts": later}  # type: ignore[method-assign]
    found = explain(home, node.client, None)
    assert (found.receipt_id, found.code) == (failed.receipt_id, "E_REPLAY")
    assert f"banned    E_REPLAY: {record['ban_reason']} (" in lines(found)
    operators = record | {
        "ban_receipt_id": None, "ban_code": None, "ban_reason": "maintenance", "ban_until_ms": 0, "receipts": []
    }
    node.client.node = lambda _: operators  # type: ignore[method-assign]
    with pytest.raises(PeerFault, match=r"maintenance \(until 1970-01-01T00:00"):
        explain(home, node.client, None)


@pytest.mark.parametrize("what", ["zzz", "../v1/run", "", "A" * 32])
def test_what_is_no_id_is_a_wrong_call(node: FakeNode, home: Home, what: str) -> None:
    with pytest.raises(LocalFault, match="E_USAGE"):
        explain(home, node.client, what)


def test_work_that_passed_or_waits(world: World, node: FakeNode, home: Home) -> None:
    receipt = keep(home, node.work(1)[0])
    assert explain(home, node.client, receipt.receipt_id).state == "pending"
    with pytest.raises(LocalFault, match="E_NOT_FOUND"):
        explain(home, node.client, None)
    world.verifier.pass_all()
    found = explain(home, node.client, receipt.lease_id)
    assert (found.state, found.code, found.failures) == ("pass", None, [])
    assert "NOT" not in lines(found)
    assert f"verdict   pass by {found.verdicts[0].verifier_id[:16]}" in lines(found)
    with pytest.raises(LocalFault, match="E_NOT_FOUND"):
        explain(home, node.client, "0" * 32)


def test_a_receipt_that_was_not_kept_is_said(world: World, node: FakeNode, home: Home) -> None:
    receipt = Receipt.from_payload(node.work(1)[0].receipt.payload)
    home.receipts.write_text(f'{{"receipt_id": "{receipt.receipt_id}"')  # a line cut short
    found = explain(home, node.client, receipt.receipt_id)
    assert not found.receipt_kept
    assert "not in receipts.jsonl" in lines(found)


def test_what_is_not_shown_yet_is_explained_from_the_receipt_that_was_kept(
    world: World, node: FakeNode, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = keep(home, node.work(1)[0])
    monkeypatch.setattr(world.coordinator.replicas, "withheld", lambda *_: True)
    world.verifier.pass_all()
    found = explain(home, node.client, receipt.lease_id)
    assert (found.state, found.withheld, found.in_log, len(found.verdicts)) == ("pass", True, True, 1)
    assert "not shown yet" in lines(found)
    home.receipts.unlink()
    with pytest.raises(LocalFault, match="E_WITHHELD"):
        explain(home, node.client, receipt.receipt_id)


def test_a_coordinator_that_shows_something_else(
    world: World, node: FakeNode, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node.work(2)
    receipt = keep(home, first)
    world.verifier.judge("fail", "E_REPLAY")
    true = node.client.get_object(f"/v1/receipts/{receipt.receipt_id}")

    def shows(**changes: Any) -> None:
        monkeypatch.setattr(node.client, "get_object", lambda path: true | changes)

    shows(receipt=second.receipt.to_dict())
    with pytest.raises(PeerFault, match="E_RECEIPT"):
        explain(home, node.client, receipt.receipt_id)
    shows(receipt=receipt.sign(world.keys["learner"]).to_dict())
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        explain(home, node.client, receipt.receipt_id)
    shows(log={"head": true["log"]["head"], "entries": true["log"]["entries"][:1]})
    found = explain(home, node.client, receipt.receipt_id)
    assert not found.in_log
    assert "no entry of" in (found.log_fault or "")
    shows(log=None)
    assert "E_LOG_ENTRY" in (explain(home, node.client, receipt.receipt_id).log_fault or "")
    forged = [dict(true["verdicts"][0], signatures=[{"keyid": "0" * 64, "sig": "AAAA"}])]
    shows(verdicts=forged)
    assert explain(home, node.client, receipt.receipt_id).verdicts == ()
