"""T2' at the coordinator: who gets a replica, who compares, who is looked at again."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import event_log
from coordinator.models import Epoch, Node, Receipt, Unit
from protocol.api import E_WITHHELD
from protocol.audit_draw import is_replicated
from protocol.envelope import Envelope
from protocol.errors import LocalFault, PeerFault
from protocol.messages import AdmittedRequest, Lease
from protocol.messages import Receipt as ReceiptMessage
from tests.fakes.coordinator import RUN_ID, FakeNode, World
from tests.unit.coordinator.conftest import MakeWorld


def twins(
    make_world: MakeWorld, rate: int = 1_000_000, *, batch: dict[str, Any] | None = None, **audit: Any
) -> tuple[World, FakeNode, FakeNode]:
    world = make_world(
        config={"share_groups": False}, batch={"groups_per_batch": 20} | (batch or {}),
        audit={"ramp": 0, "floor_ppm": 0, "replicate_ppm": rate} | audit,
    )
    world.publish()
    return world, world.node("one").join(), world.node("two").join()


def unit_of(lease: Lease) -> tuple[int, list[int]]:
    return lease.group, lease.samples


def make_both(world: World, one: FakeNode, two: FakeNode) -> tuple[Any, Any]:
    """The receipts of a unit and of its replica."""
    [(first, digest)] = one.leases(1)
    receipt = one.finish(first, digest).receipt
    replica, replica_digest = next(
        (lease, digest) for lease, digest in two.leases(2) if unit_of(lease) == unit_of(first)
    )
    return receipt, two.finish(replica, replica_digest).receipt


def test_a_second_node_gets_the_same_unit_once(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world)
    [(first, digest)] = one.leases(1)
    one.finish(first, digest)
    leases = [lease for lease, _ in two.leases(2)]
    assert unit_of(first) in [unit_of(lease) for lease in leases]
    assert len({lease.lease_id for lease in [first, *leases]}) == 3
    third = world.node("three").join()
    assert unit_of(first) not in [unit_of(lease) for lease, _ in third.leases(1)]
    assert unit_of(first) not in [unit_of(lease) for lease, _ in one.leases(1)]  # never against oneself


def test_without_a_rate_nothing_is_made_twice(make_world: MakeWorld) -> None:
    _, one, two = twins(make_world, rate=0)
    [(first, digest)] = one.leases(1)
    one.finish(first, digest)
    assert unit_of(first) not in [unit_of(lease) for lease, _ in two.leases(3)]


def test_both_are_compared_and_paid_and_the_group_counts_one(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world)
    first, second = make_both(world, one, two)
    job = world.verifier.judge()
    assert job is not None
    assert job.replica is not None
    assert {job.receipt.digest, job.replica.receipt.digest} == {first.digest, second.digest}
    assert job.replica.node_public_key in (one.key.public_key.hex(), two.key.public_key.hex())
    world.verifier.pass_all()
    assert world.node_row(two)["credit"] == 10
    assert world.node_row(one)["credit_pending"] == 10


def test_when_one_is_right_the_other_is_recomputed(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world)
    make_both(world, one, two)
    world.verifier.judge()  # the first passes T1 before anybody compares
    job = world.verifier.claim()
    assert job is not None
    world.verifier.client.verdict(world.verifier.verdict(job, diverges=True))
    again = world.verifier.claim()
    assert again is not None
    assert again.drawn
    assert again.receipt.digest != job.receipt.digest
    world.verifier.client.verdict(world.verifier.verdict(again, "fail", "E_TOKEN_MARGIN"))
    assert sorted(row["state"] for row in (world.node_row(one), world.node_row(two))) == ["active", "banned"]


def test_when_both_differ_and_pass_each_is_recomputed_once(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world)
    receipts = make_both(world, one, two)
    world.verifier.judge()
    looked_at = []
    for job in iter(world.verifier.claim, None):
        looked_at.append((job.receipt.digest, job.drawn))
        world.verifier.client.verdict(world.verifier.verdict(job, diverges=True))
    first, second = (receipt.digest for receipt in receipts)
    assert looked_at == [(second, False), (first, True), (second, True)]
    assert world.node_row(one)["accepted"] == world.node_row(two)["accepted"] == 2  # nothing is counted twice


def test_whoever_differs_from_a_recomputed_twin_is_recomputed(make_world: MakeWorld) -> None:
    """A node that waits for its twin's public verdict may not make up what follows the first difference."""
    world, one, two = twins(make_world)
    with world.coordinator.database.write() as session:
        session.get_one(Node, one.key.id).forced_audits = 4
        event_log.append(session, world.clock.now_ms(), "audits-forced", {"node_id": one.key.id, "bundles": 4})
    [(lease, digest)] = one.leases(1)
    one.finish(lease, digest)
    twin = world.verifier.judge()
    assert twin is not None
    assert twin.drawn
    replica = next(pair for pair in two.leases(2) if unit_of(pair[0]) == unit_of(lease))
    late = two.finish(*replica).receipt
    job = world.verifier.claim()
    assert job is not None
    assert not job.drawn
    world.verifier.client.verdict(world.verifier.verdict(job, diverges=True))
    again = world.verifier.claim()
    assert again is not None
    assert (again.receipt.digest, again.drawn) == (late.digest, True)
    world.verifier.client.verdict(world.verifier.verdict(again, "fail", "E_HEAD_KL"))
    assert (world.node_row(two)["ban_code"], world.node_row(one)["state"]) == ("E_HEAD_KL", "active")


# -- nothing that a node can see tells before it hands in, and nothing can be copied ----------------------------


def receipt_id(envelope: Envelope) -> str:
    return ReceiptMessage.from_payload(envelope.payload).receipt_id


def test_a_unit_is_drawn_by_a_key_that_is_secret_while_its_lease_is_open(make_world: MakeWorld) -> None:
    """A node that holds its lease past the end of an epoch knows that epoch's key, and nothing follows from it."""
    world, one, _ = twins(make_world, rate=500_000, batch={"lease_ms": 60_000}, epoch_ms=30_000)
    world.coordinator.sweep()
    held = one.leases(8)
    world.clock.advance(31)
    world.coordinator.sweep()
    with world.coordinator.database.read() as session:
        assert session.query(Epoch).filter(Epoch.ended_ms.is_not(None)).count() == 1  # the key of then is known
        assert not any(unit.replicate for unit in session.query(Unit))
    for lease, digest in held:
        one.finish(lease, digest)
    with world.coordinator.database.read() as session:
        drawn = []
        for lease, digest in held:
            receipt = session.query(Receipt).filter_by(lease_id=lease.lease_id).one()
            epoch = session.get_one(Epoch, receipt.epoch)
            assert epoch.ended_ms is None
            drawn.append(session.get_one(Unit, receipt.unit_id).replicate)
            assert drawn[-1] == is_replicated(epoch.key, digest, 500_000)
    assert len(drawn) == 8


def test_who_hands_in_last_is_replicated_as_well(make_world: MakeWorld) -> None:
    """The group is trained on at once; it is made again while the weights it began with are in use."""
    world, one, two = twins(make_world)
    for lease, digest in one.leases(20):
        one.finish(lease, digest)
    world.verifier.pass_all()
    world.learner.client.post_batch(world.learner.plan(99))
    world.publish()
    one.version = two.version = 1
    [(replica, digest)] = [(x, d) for x, d in two.leases(1) if x.start_version == 0]
    two.finish(replica, digest)
    job = world.verifier.claim()
    assert job is not None
    assert job.replica is not None
    world.verifier.client.verdict(world.verifier.verdict(job))
    assert world.node_row(two)["credit"] == 10
    world.publish()
    world.publish()
    two.version = 3
    assert all(lease.start_version == 3 for lease, _ in two.leases(4))  # too old for anybody by now


def test_a_replica_looks_like_any_other_lease(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world)
    [(first, digest)] = one.leases(1)
    one.finish(first, digest)
    leases = [lease for lease, _ in two.leases(2)]
    assert {unit_of(lease) == unit_of(first) for lease in leases} == {True, False}
    assert [unit_of(lease) for lease in leases] == sorted(unit_of(lease) for lease in leases)
    assert leases[0].model_dump().keys() == leases[1].model_dump().keys() == first.model_dump().keys()
    shown = leases_of(world, first.group) + leases_of(world, leases[0].group)
    assert {lease["shadow"] for lease in shown} == {None}


def test_no_single_question_tells_what_a_lease_is_of(make_world: MakeWorld) -> None:
    """The unit of a replica is handed in, that of another lease is not: neither reading nor a late probe shows that."""
    world, one, two = twins(make_world)
    [(first, digest)] = one.leases(1)
    receipt = one.finish(first, digest).receipt
    held = two.leases(2)
    group = world.http.get(f"/v1/groups/{first.group}").json()
    assert {(unit["state"], unit["receipt_id"]) for unit in group["units"]} == {(None, None)}
    assert (group["state"], group["consumed_version"]) == (None, None)
    assert world.http.get(f"/v1/receipts/{receipt_id(receipt)}").json()["lease"] is None  # it would name the unit
    world.clock.advance(61)
    world.coordinator.sweep()
    probes = (({"rollouts": 1}, "E_COMMITMENT_MISMATCH"), ({"object_sha256": "00" * 32}, "E_OBJECT_MISSING"))
    for lease, lease_digest in held:
        for changes, code in probes:
            with pytest.raises(PeerFault, match=code):
                two.client.submit(two.commitment(lease, lease_digest, **changes))
    for lease, lease_digest in held:
        assert two.finish(lease, lease_digest).duplicate is False  # late, and of use
    assert world.node_row(two)["dropped"] == 0
    for _ in range(2):
        world.publish()
    group = world.http.get(f"/v1/groups/{first.group}").json()
    assert (group["state"], {unit["state"] for unit in group["units"]}) == ("cancelled", {"cancelled"})


def test_a_late_replica_is_refused_once_somebody_else_has_it(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world)
    [(first, digest)] = one.leases(1)
    one.finish(first, digest)
    late = next(pair for pair in two.leases(2) if unit_of(pair[0]) == unit_of(first))
    world.clock.advance(61)
    third = world.node("three").join()
    assert unit_of(first) in [unit_of(lease) for lease, _ in third.leases(4)]
    with pytest.raises(PeerFault, match="E_LEASE_EXPIRED"):
        two.finish(*late)


@pytest.mark.parametrize("alone", [False, True])
def test_whoever_makes_a_replica_is_not_paid_for_the_unit_as_well(make_world: MakeWorld, alone: bool) -> None:
    """It would be one computation for two leases, compared with nothing. Alone it may do it, and is paid once."""
    world, one, two = twins(make_world)
    [(first, digest)] = one.leases(1)
    one.finish(first, digest)
    replica = next(pair for pair in two.leases(2) if unit_of(pair[0]) == unit_of(first))
    world.verifier.judge("fail", "E_REPLAY")
    two.finish(*replica)
    world.verifier.pass_all()
    assert world.node_row(two)["credit"] == 10
    third = None if alone else world.node("three").join()
    again = [pair for pair in two.leases(4) if unit_of(pair[0]) == unit_of(first)]
    if third is not None:
        assert again == []
        again = [pair for pair in third.leases(1) if unit_of(pair[0]) == unit_of(first)]
    maker = third or two
    [(lease, lease_digest)] = again
    maker.finish(lease, lease_digest)
    world.verifier.pass_all()
    row = world.node_row(two)
    assert (row["credit"], row["credit_pending"]) == (10, 0)
    assert third is None or world.node_row(third)["credit_pending"] == 10


def test_nobody_is_shown_what_could_be_copied(make_world: MakeWorld) -> None:
    """Neither whether a unit is drawn nor where its rollouts are, until nobody can hand it in any more."""
    world, one, two = twins(make_world)
    first, second = make_both(world, one, two)
    world.verifier.pass_all()
    for envelope in (first, second):
        body = world.http.get(f"/v1/receipts/{receipt_id(envelope)}").json()
        assert (body["withheld"], body["receipt"], body["commitment"]) == (True, None, None)
        assert (body["state"], body["sha256"], len(body["verdicts"])) == ("pass", envelope.digest, 1)
        assert body["log"]["entries"]
        assert ReceiptMessage.from_payload(envelope.payload).object_sha256 not in str(body)
        with pytest.raises(LocalFault, match=E_WITHHELD) as caught:
            one.client.evidence(receipt_id(envelope))
        assert "ask again later" in (caught.value.hint or "")
    assert world.http.get(f"/v1/evidence/{receipt_id(first)}").status_code == 425
    for _ in range(2):
        world.publish()  # the group is stale now: cancelled, and never leased again
    body = world.http.get(f"/v1/receipts/{receipt_id(first)}").json()
    assert Envelope.from_dict(body["receipt"]).digest == first.digest
    assert Envelope.from_dict(body["commitment"]).digest
    assert sorted(lease["shadow"] for lease in leases_of(world, 0)) == [False, False, True]


def test_what_the_learner_takes_tells_nobody_where_bundles_are(make_world: MakeWorld) -> None:
    """Neither the groups that wait for it nor those that it has trained on, while the first node's twin may be made."""
    world, one, _ = twins(make_world)
    for lease, digest in one.leases(2):
        one.finish(lease, digest)
    world.verifier.pass_all()
    objects = {s.object_sha256 for group in world.learner.client.admitted(9) for s in group.samples}
    assert len(objects) == 2
    assert world.http.get("/v1/admitted").status_code == 405
    asked = AdmittedRequest(run_id=RUN_ID, limit=9, issued_at_ms=world.clock.now_ms())
    for key in (one.key, world.verifier.key):
        answer = world.http.post("/v1/admitted", content=asked.sign(key).to_bytes())
        assert (answer.status_code, answer.json()["code"]) == (403, "E_WRONG_KEY")
    # a question that was overheard is of no use for long
    overheard = asked.model_copy(update={"issued_at_ms": world.clock.now_ms() - 3_601_000}).sign(world.learner.key)
    answer = world.http.post("/v1/admitted", content=overheard.to_bytes())
    assert answer.json()["code"] == "E_CLOCK_SKEW"
    world.learner.client.post_batch(world.learner.plan(1))
    world.publish()
    batch = world.learner.client.batch(1)
    assert [s.object_sha256 for group in batch.groups for s in group.samples] == [None] * 4
    assert not [name for name in objects if name in world.http.get("/v1/batches/1").text]
    world.publish()  # one version more, and nobody makes it again: all can be audited
    shown = world.learner.client.batch(1)
    assert {s.object_sha256 for group in shown.groups for s in group.samples} == objects


def test_a_bundle_that_failed_is_shown_at_once(make_world: MakeWorld) -> None:
    world, one, _ = twins(make_world)
    [(first, digest)] = one.leases(1)
    receipt = one.finish(first, digest).receipt
    world.verifier.judge("fail", "E_REPLAY")
    body = world.http.get(f"/v1/receipts/{receipt_id(receipt)}").json()
    assert (body["withheld"], Envelope.from_dict(body["receipt"]).digest) == (False, receipt.digest)
    assert world.http.get(f"/v1/evidence/{receipt_id(receipt)}").status_code == 200


def test_without_replicas_only_what_somebody_else_is_making_is_withheld(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world, rate=0)
    assert world.admin("drills", node_id=two.key.id, attack="int8").status_code == 200
    (first, digest), *_ = one.leases(2)[1:]
    receipt = one.finish(first, digest).receipt
    address = f"/v1/receipts/{receipt_id(receipt)}"
    assert not world.http.get(address).json()["withheld"]
    [(shadow, digest)] = two.leases(1)
    assert unit_of(shadow) == unit_of(first)
    assert world.http.get(address).json()["withheld"]
    two.finish(shadow, digest)
    assert not world.http.get(address).json()["withheld"]


def leases_of(world: World, group: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.http.get(f"/v1/groups/{group}").json()["leases"]
    return found
