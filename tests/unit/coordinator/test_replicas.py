"""T2' at the coordinator: who gets a replica, who compares, who is looked at again."""

from __future__ import annotations

from typing import Any

from coordinator import event_log
from coordinator.models import Node
from protocol.messages import Lease
from tests.fakes.coordinator import FakeNode, World
from tests.unit.coordinator.conftest import MakeWorld


def twins(make_world: MakeWorld, rate: int = 1_000_000) -> tuple[World, FakeNode, FakeNode]:
    world = make_world(
        batch={"groups_per_batch": 20}, audit={"ramp": 0, "floor_ppm": 0, "replicate_ppm": rate}
    )
    world.publish()
    return world, world.node("one").join(), world.node("two").join()


def unit_of(lease: Lease) -> tuple[int, list[int]]:
    return lease.group, lease.samples


def make_both(world: World, one: FakeNode, two: FakeNode) -> tuple[Any, Any]:
    """The receipts of a unit and of its replica."""
    [(first, digest)] = one.leases(1)
    replica, replica_digest = next(
        (lease, digest) for lease, digest in two.leases(2) if unit_of(lease) == unit_of(first)
    )
    return one.finish(first, digest).receipt, two.finish(replica, replica_digest).receipt


def test_a_second_node_gets_the_same_unit_once_and_cannot_tell(make_world: MakeWorld) -> None:
    world, one, two = twins(make_world)
    [(first, _)] = one.leases(1)
    leases = [lease for lease, _ in two.leases(2)]
    assert unit_of(first) in [unit_of(lease) for lease in leases]
    assert len({lease.lease_id for lease in [first, *leases]}) == 3
    assert leases[0].model_dump().keys() == first.model_dump().keys()
    third = world.node("three").join()
    assert unit_of(first) not in [unit_of(lease) for lease, _ in third.leases(1)]
    assert unit_of(first) not in [unit_of(lease) for lease, _ in one.leases(1)]  # never against oneself


def test_without_a_rate_nothing_is_made_twice(make_world: MakeWorld) -> None:
    _, one, two = twins(make_world, rate=0)
    [(first, _)] = one.leases(1)
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
    [(lease, digest)] = one.leases(1)
    with world.coordinator.database.write() as session:
        session.get_one(Node, two.key.id).forced_audits = 4
        event_log.append(session, world.clock.now_ms(), "audits-forced", {"node_id": two.key.id, "bundles": 4})
    replica = next(pair for pair in two.leases(2) if unit_of(pair[0]) == unit_of(lease))
    two.finish(*replica)
    twin = world.verifier.judge()
    assert twin is not None
    assert twin.drawn
    late = one.finish(lease, digest).receipt
    job = world.verifier.claim()
    assert job is not None
    assert not job.drawn
    world.verifier.client.verdict(world.verifier.verdict(job, diverges=True))
    again = world.verifier.claim()
    assert again is not None
    assert (again.receipt.digest, again.drawn) == (late.digest, True)
    world.verifier.client.verdict(world.verifier.verdict(again, "fail", "E_HEAD_KL"))
    assert (world.node_row(one)["ban_code"], world.node_row(two)["state"]) == ("E_HEAD_KL", "active")
