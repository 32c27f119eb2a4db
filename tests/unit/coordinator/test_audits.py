from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from coordinator.models import Receipt as ReceiptRow
from protocol.errors import LocalFault, PeerFault
from protocol.messages import AuditClaim, Lease, Receipt
from protocol.provenance import open_provenance
from tests.fakes.coordinator import RUN_ID, FakeVerifier, World, sha
from tests.unit.coordinator.conftest import MakeWorld


def status(world: World) -> dict[str, Any]:
    body: dict[str, Any] = world.http.get("/v1/status").json()
    return body


def test_a_group_is_admitted_with_what_was_signed_for_it(world: World) -> None:
    """The learner need not believe the coordinator: commitment, receipt and the pass whose rewards count come along."""
    node = world.node().join()
    node.work(4)
    world.verifier.pass_all()
    group, _ = world.learner.client.admitted(9)
    proofs = {proof.receipt.digest: proof for proof in group.proofs}
    assert list(proofs) == list(dict.fromkeys(s.receipt_sha256 for s in group.samples))
    run = world.coordinator.run.manifest
    for sample in group.samples:
        lease = Lease.from_payload(sample.lease.payload)
        found = open_provenance(run, lease, sample.lease.digest, proofs[sample.receipt_sha256])
        assert found.commitment.object_sha256 == sample.object_sha256
        assert found.rewards_micro[sample.sample] == sample.reward_micro
    world.learner.client.post_batch(world.learner.plan(2))
    assert b"proofs" not in world.http.get("/v1/batches/1").content  # they name bundles that may be withheld


def test_a_group_is_admitted_when_all_its_samples_passed(world: World) -> None:
    node = world.node().join()
    node.work(3)
    world.verifier.pass_all()
    [group] = world.learner.client.admitted(9)
    assert (group.group, group.environment, group.start_version, group.prompt_tokens) == (0, "even", 0, [1, 2, 0])
    assert [s.sample for s in group.samples] == [0, 1, 2, 3]
    assert [s.reward_micro for s in group.samples] == [0, 1_000_000, 0, 1_000_000]
    node.work(1)
    world.verifier.pass_all()
    assert [g.group for g in world.learner.client.admitted(9)] == [0, 1]
    assert [g.group for g in world.learner.client.admitted(1)] == [0]


def test_claims_are_idempotent_and_one_at_a_time(world: World) -> None:
    world.node().join().work(2)
    claim = AuditClaim(run_id=RUN_ID, verifier_id=world.verifier.key.id, nonce="11" * 16, issued_at_ms=1)
    first, again = world.verifier.client.claim_audit(claim), world.verifier.client.claim_audit(claim)
    assert first is not None
    assert again is not None
    assert first.receipt.digest == again.receipt.digest
    other = FakeVerifier(world.keys["verifier2"], world.client(world.keys["verifier2"]), world.clock)
    second = other.claim()
    assert second is not None
    assert second.receipt.digest != first.receipt.digest
    assert world.verifier.claim() is None  # a new nonce: what it held goes back, and waits for a moment
    third = other.claim()  # anybody else may have it at once
    assert third is not None
    assert third.receipt.digest == first.receipt.digest
    world.clock.advance(2)
    again = world.verifier.claim()
    assert again is not None
    assert again.receipt.digest == second.receipt.digest


def test_a_claim_that_lapses_goes_to_somebody_else_and_not_for_ever(make_world: MakeWorld) -> None:
    world = make_world(config={"claim_ms": 1000, "max_claims": 3})
    world.publish()
    node = world.node().join()
    node.work(1)
    for _ in range(3):
        assert world.verifier.claim() is not None
        world.clock.advance(2)
    assert world.verifier.claim() is None
    row = world.node_row(node)
    assert (row["inconclusive"], row["reasons"], row["state"]) == (2, {"E_AUDIT_ABANDONED": 1}, "active")


def test_a_verifier_that_never_answers_voids_nobodys_work(make_world: MakeWorld) -> None:
    world = make_world(config={"claim_ms": 1000, "max_claims": 2})
    world.publish()
    node = world.node().join()
    node.work(3)
    liar = FakeVerifier(world.keys["verifier2"], world.client(world.keys["verifier2"]), world.clock)
    for _ in range(100):
        liar.claim()  # gives back what it held, and takes the next
        world.clock.advance(0.01)
    world.clock.advance(2)
    jobs = [world.verifier.judge() for _ in range(3)]
    assert sum(job.attempt for job in jobs if job is not None) <= 3 + 4  # one lapse in each second of three
    row = world.node_row(node)
    assert (row["accepted"], row["inconclusive"], row["reasons"]) == (6, 0, {})


def test_a_bundle_that_ends_its_verifier_is_set_aside(make_world: MakeWorld) -> None:
    """A verifier that dies of it comes back with another nonce each time, long before its claim runs out."""
    world = make_world(config={"max_claims": 3})
    world.publish()
    node, other = world.node().join(), world.node("other").join()
    [deadly] = node.work(1)
    other.work(1)
    deaths, passed = 0, 0
    for _ in range(100):
        job = world.verifier.claim()
        if job is not None and job.receipt.digest == deadly.receipt.digest:
            deaths += 1
        elif job is not None:
            world.verifier.client.verdict(world.verifier.verdict(job))
            passed += 1
        world.clock.advance(25)
        world.coordinator.sweep()
    row = world.node_row(node)
    assert (row["inconclusive"], row["reasons"], row["state"]) == (2, {"E_AUDIT_ABANDONED": 1}, "active")
    assert (row["forced_audits"], row["rejected"]) == (0, 0)
    assert passed == 1  # the others' work goes on meanwhile
    assert 3 <= deaths <= 12  # farther and farther apart


def test_no_verifier_adds_more_lapses_than_it_could_by_holding_on(make_world: MakeWorld) -> None:
    """Not by claims that it gives back, not by holding some meanwhile, not with many bundles at hand."""
    world = make_world(config={"claim_ms": 10_000, "max_claims": 4}, batch={"groups_per_batch": 20})
    world.publish()
    node = world.node().join()
    node.work(20)
    liar = FakeVerifier(world.keys["verifier2"], world.client(world.keys["verifier2"]), world.clock)
    for step in range(80):
        liar.claim()
        world.clock.advance((0.1, 10.1)[step % 4 == 0])
    spans = 20 * (10.1 + 0.3) / 10
    lapses = 0
    with world.coordinator.database.read() as session:
        for receipt in session.scalars(select(ReceiptRow)):
            lapses += receipt.claims
    assert 5 < lapses <= spans + 1


def test_a_failure_bans_voids_and_offers_the_work_to_others(world: World) -> None:
    cheat = world.node("cheat").join()
    cheat.work(3)  # group 0 and half of group 1
    honest = world.node("honest").join()
    held = cheat.leases(1)[0][0]
    world.verifier.judge()
    world.verifier.judge()
    assert [g.group for g in world.learner.client.admitted(9)] == [0]
    assert world.node_row(cheat)["credit_pending"] == 20
    job = world.verifier.judge("fail", "E_REPLAY")
    assert job is not None
    assert world.learner.client.admitted(9) == []
    row = world.node_row(cheat)
    assert (row["state"], row["ban_code"], row["credit_pending"], row["credit"]) == ("banned", "E_REPLAY", 0, 0)
    assert row["ban_receipt_id"] == Receipt.from_payload(job.receipt.payload).receipt_id
    assert (row["rejected"], row["reasons"]) == (2, {"E_REPLAY": 1})
    with pytest.raises(PeerFault) as caught:
        cheat.ask()
    assert caught.value.code == "E_NODE_BANNED"
    redone = [lease for lease, _ in honest.leases(4)]
    assert [(x.group, x.samples) for x in redone] == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3])]
    assert held.beacon == redone[-1].beacon


def test_consumed_work_of_a_banned_node_stays_consumed(world: World) -> None:
    node = world.node().join()
    node.work(4)
    world.verifier.pass_all()
    world.learner.client.post_batch(world.learner.plan())
    node.work(1)
    world.verifier.judge("fail", "E_REPLAY")
    assert world.node_row(node)["credit"] == 40  # settled credit is not taken back
    assert world.http.get("/v1/groups/0").json()["state"] == "consumed"


def test_inconclusive_is_tried_again_then_set_aside_and_never_punished(world: World) -> None:
    node = world.node().join()
    node.work(1)
    for attempt in range(3):
        assert world.verifier.judge("inconclusive", "E_OUT_OF_DISK") is not None
        assert world.verifier.claim() is None  # not at once
        world.clock.advance(2 * 2**attempt + 1)
    assert world.verifier.claim() is None
    row = world.node_row(node)
    assert (row["state"], row["inconclusive"], row["rejected"]) == ("active", 2, 0)
    assert (row["forfeited"], row["reasons"]) == (0, {"E_OUT_OF_DISK": 1})
    assert world.http.get("/v1/groups/0").json()["cause"] == "inconclusive"
    assert status(world)["rollouts"]["inconclusive"] == 2


def disagree(world: World) -> None:
    """Have the verifier's two configurations disagree on the next bundle until it is set aside."""
    job = world.verifier.judge("inconclusive", "E_DISAGREE")
    assert job is not None
    for _ in range(2):
        world.clock.advance(5)
        again = world.verifier.judge("inconclusive", "E_DISAGREE")
        assert again is not None
        assert again.receipt.digest == job.receipt.digest


def test_a_disagreement_of_the_verifier_is_no_veto_and_a_single_one_costs_nothing(world: World) -> None:
    node, other = world.node().join(), world.node("other").join()
    node.work(1)
    disagree(world)
    row = world.node_row(node)
    assert (row["state"], row["inconclusive"], row["reasons"]) == ("active", 2, {"E_DISAGREE": 1})
    assert (row["forced_audits"], row["rejected"]) == (0, 0)
    assert world.http.get("/v1/groups/0").json()["state"] == "open"
    mine = [(lease.group, lease.samples) for lease, _ in node.leases(4)]
    assert (0, [0, 1]) not in mine  # not to the node it was taken from
    assert [(lease.group, lease.samples) for lease, _ in other.leases(1)] == [(0, [0, 1])]


def test_alone_a_node_makes_the_unit_again(world: World) -> None:
    node = world.node().join()
    node.work(1)
    disagree(world)
    assert [(lease.group, lease.samples) for lease, _ in node.leases(1)] == [(0, [0, 1])]


def test_disagreements_at_will_cost_the_discount_and_work(make_world: MakeWorld) -> None:
    world = make_world(batch={"groups_per_batch": 40, "lease_ms": 600_000}, config={"max_active_leases": 8})
    world.publish()
    node, other = world.node().join(), world.node("other").join()
    for count in range(1, 4):
        node.work(1)
        disagree(world)
        other.work(1)
        world.verifier.pass_all()
        row = world.node_row(node)
        assert (row["state"], row["forced_audits"] > 0) == ("active", count > 1)
    assert len(node.leases(8)) == 2  # halved twice: the first one is free
    assert len(other.leases(8)) == 8


def test_a_bundle_that_no_verifier_finishes_is_no_veto_either(make_world: MakeWorld) -> None:
    world = make_world(config={"claim_ms": 1000, "max_claims": 1})
    world.publish()
    node, other = world.node().join(), world.node("other").join()
    node.work(1)
    assert world.verifier.claim() is not None
    world.clock.advance(2)
    assert world.verifier.claim() is None
    assert world.node_row(node)["reasons"] == {"E_AUDIT_ABANDONED": 1}
    assert world.node_row(node)["forced_audits"] == 0
    assert [(lease.group, lease.samples) for lease, _ in other.leases(1)] == [(0, [0, 1])]


def test_a_pass_after_an_inconclusive_counts(world: World) -> None:
    node = world.node().join()
    node.work(1)
    world.verifier.judge("inconclusive", "E_OUT_OF_DISK")
    world.clock.advance(3)
    world.verifier.judge()
    assert world.node_row(node)["accepted"] == 2


def test_verdicts_are_idempotent_and_a_later_contradiction_changes_nothing(world: World) -> None:
    node = world.node().join()
    node.work(1)
    job = world.verifier.claim()
    assert job is not None
    verdict = world.verifier.verdict(job)
    assert world.verifier.client.verdict(verdict).duplicate is False
    assert world.verifier.client.verdict(verdict).duplicate is True
    other = FakeVerifier(world.keys["verifier2"], world.client(world.keys["verifier2"]), world.clock)
    assert other.client.verdict(other.verdict(job, "fail", "E_REPLAY")).duplicate is True
    row = world.node_row(node)
    assert (row["state"], row["accepted"], row["credit_pending"]) == ("active", 2, 10)


@pytest.mark.parametrize(
    ("outcome", "verdict_code", "change"),
    [
        ("pass", None, {"code": "E_REPLAY"}),
        ("pass", None, {"tiers": ["T0"]}),
        ("pass", None, {"tiers": ["T0", "T1"]}),  # it was drawn: T2 is due
        ("pass", None, {"samples": [0, 2]}),
        ("pass", None, {"rewards_micro": [1]}),
        ("pass", None, {"rewards_micro": [0, 1_000_001]}),
        ("pass", None, {"rewards_micro": [-1, 0]}),
        ("pass", None, {"tokens": 11}),
        ("pass", None, {"lease_id": "00" * 16}),
        ("fail", None, {}),
        ("fail", "E_KL", {"tiers": ["T0", "T1", "T2"]}),  # no second configuration
    ],
)
def test_a_verdict_that_contradicts_itself_is_refused(
    world: World, outcome: str, verdict_code: str | None, change: dict[str, Any]
) -> None:
    node = world.node().join()
    node.work(1)
    job = world.verifier.claim()
    assert job is not None
    with pytest.raises(PeerFault) as caught:
        world.verifier.client.verdict(world.verifier.verdict(job, outcome, verdict_code, **change))
    assert caught.value.code == "E_VERDICT"
    row = world.node_row(node)
    assert (row["state"], row["accepted"]) == ("active", 0)


def test_only_verifiers_of_the_run_may_judge(world: World) -> None:
    node = world.node().join()
    node.work(1)
    job = world.verifier.claim()
    assert job is not None
    impostor = FakeVerifier(node.key, node.client, world.clock)
    with pytest.raises(PeerFault) as caught:
        impostor.client.verdict(impostor.verdict(job))
    assert caught.value.code == "E_WRONG_KEY"
    with pytest.raises(PeerFault) as caught:
        impostor.claim()
    assert caught.value.code == "E_WRONG_KEY"
    with pytest.raises(PeerFault) as caught:
        world.verifier.client.verdict(world.verifier.verdict(job, verifier_id=node.key.id))
    assert caught.value.code == "E_WRONG_KEY"
    with pytest.raises(LocalFault) as missing:
        world.verifier.client.verdict(world.verifier.verdict(job, receipt_sha256=sha("none")))
    assert missing.value.code == "E_NOT_FOUND"


def test_trust_lowers_the_rate(make_world: MakeWorld) -> None:
    world = make_world(batch={"groups_per_batch": 10})
    world.publish()
    node = world.node().join()
    rates = []
    for _ in range(6):
        [reply] = node.work(1)
        world.verifier.pass_all()
        receipt = Receipt.from_payload(reply.receipt.payload)
        rates.append(world.http.get(f"/v1/receipts/{receipt.receipt_id}").json()["rate_ppm"])
    assert rates[:5] == [1_000_000] * 4 + [500_000]
    assert rates[5] <= 500_000


def test_work_of_a_cancelled_group_is_still_checked_and_paid(world: World) -> None:
    node = world.node().join()
    node.work(1)
    world.publish()
    world.publish()
    assert world.verifier.pass_all() == 1
    row = world.node_row(node)
    assert (row["accepted"], row["credit"], row["forfeited"]) == (2, 10, 0)
    assert world.learner.client.admitted(9) == []
