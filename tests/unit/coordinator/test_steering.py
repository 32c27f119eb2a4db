"""Every node's samples are compared with those of peers; whoever is too lucky gets leases that are pinned."""

from __future__ import annotations

from typing import Any

from coordinator.models import Node
from coordinator.steering import E_STEERING
from protocol.messages import Lease, LeaseReturn
from protocol.statistics import LUCK_ALARM_MILLI
from tests.fakes.coordinator import RUN_ID, FakeNode, World
from tests.unit.coordinator.conftest import MakeWorld, check_log

BATCH = {"groups_per_batch": 20, "group_size": 4, "samples_per_lease": 2, "max_lag_versions": 3}


def rewarded(world: World, rewards: dict[str, int]) -> None:
    """Let everything pass that waits, with the given reward for all samples of a node."""
    while (job := world.verifier.claim()) is not None:
        lease = Lease.from_payload(job.lease.payload)
        reward = [rewards[lease.node_id]] * len(lease.samples)
        world.verifier.client.verdict(world.verifier.verdict(job, rewards_micro=reward))


def step(world: World) -> None:
    """Train on everything that is admitted, and publish."""
    world.learner.client.post_batch(world.learner.plan(99))
    world.publish()


def turn(world: World, nodes: list[tuple[FakeNode, int]], leases: int = 6) -> list[Lease]:
    """The nodes work side by side and earn what stands beside them; then comes the next version. Their leases."""
    held = [(node, lease, digest) for node, _ in nodes for lease, digest in node.leases(leases)]
    for node, lease, digest in held:
        node.finish(lease, digest)
    rewarded(world, {node.key.id: reward for node, reward in nodes})
    step(world)
    for node, _ in nodes:
        node.version += 1
    return [lease for _, lease, _ in held]


def test_a_node_that_is_always_luckier_than_its_peers_is_pinned_and_not_punished(make_world: MakeWorld) -> None:
    """And so is its only peer, for it may be the one that chooses."""
    world = make_world(batch=BATCH)
    world.publish()
    lucky, other = world.node("lucky").join(), world.node("other").join()
    turns = 0
    while world.node_row(lucky)["pinned_ms"] is None:
        assert not any(lease.pinned for lease in turn(world, [(lucky, 1_000_000), (other, 0)]))
        turns += 1
        assert turns < 40
    worse = world.node_row(other)
    assert (worse["luck_milli"], worse["pinned_ms"]) == (0, world.node_row(lucky)["pinned_ms"])
    assert worse["worse_milli"] == world.node_row(lucky)["luck_milli"]
    assert (worse["state"], worse["reasons"], worse["rejected"]) == ("active", {E_STEERING: 1}, 0)
    row = world.node_row(lucky)
    assert row["luck_milli"] >= LUCK_ALARM_MILLI
    assert row["reasons"] == {E_STEERING: 1}
    assert (row["state"], row["rejected"], row["forfeited"]) == ("active", 0, 0)
    assert all(lease.pinned for node in (lucky, other) for lease, _ in node.leases(2))
    check_log(world)


def test_a_node_that_chooses_what_earns_least_is_pinned_before_its_peers(make_world: MakeWorld) -> None:
    """It makes each of its peers look lucky, but less so than it looks unlucky itself."""
    world = make_world(batch=BATCH | {"samples_per_lease": 1})
    world.publish()
    saboteur, *peers = nodes = [world.node(f"{name}").join() for name in range(4)]
    before = LUCK_ALARM_MILLI - 1000  # as after some thirty such groups
    with world.coordinator.database.write() as session:
        session.get_one(Node, saboteur.key.id).worse_milli = before
    for _ in range(3):
        assert world.node_row(saboteur)["pinned_ms"] is None
        turn(world, [(node, 0 if node is saboteur else 1_000_000) for node in nodes], leases=1)
    row = world.node_row(saboteur)
    assert row["pinned_ms"] is not None
    assert (row["luck_milli"], row["state"], row["reasons"]) == (0, "active", {E_STEERING: 1})
    for peer in peers:
        other = world.node_row(peer)
        assert (other["pinned_ms"], other["worse_milli"]) == (None, 0)
        assert 0 < 2 * other["luck_milli"] < row["worse_milli"] - before
    assert all(lease.pinned for lease, _ in saboteur.leases(2))
    assert not any(lease.pinned for lease, _ in peers[0].leases(2))


def test_luck_has_a_floor_and_an_unban_forgets_it(make_world: MakeWorld) -> None:
    world = make_world(batch=BATCH)
    world.publish()
    one, other = world.node("one").join(), world.node("other").join()
    turn(world, [(one, 0), (other, 1_000_000)])
    assert world.node_row(one)["luck_milli"] == 0  # bad luck is not banked as luck
    assert world.node_row(one)["worse_milli"] > 0
    assert (before := world.node_row(other)["luck_milli"]) > 0
    turn(world, [(one, 1_000_000), (other, 0)])
    assert world.node_row(one)["luck_milli"] > 0
    assert world.node_row(other)["luck_milli"] < before
    assert world.admin("ban", node_id=one.key.id).status_code == 200
    assert world.admin("unban", node_id=one.key.id).status_code == 200
    assert (world.node_row(one)["luck_milli"], world.node_row(one)["worse_milli"]) == (0, 0)


def test_equal_rewards_and_groups_without_peers_say_nothing(make_world: MakeWorld) -> None:
    world = make_world(batch=BATCH)
    world.publish()
    alone = world.node("alone").join()
    turn(world, [(alone, 1_000_000)])
    assert world.node_row(alone)["luck_milli"] == 0
    other = world.node("other").join()
    other.version = 1
    turn(world, [(alone, 500_000), (other, 500_000)])
    assert [world.node_row(node)["luck_milli"] for node in (alone, other)] == [0, 0]


def test_a_node_whose_completions_are_always_longer_is_pinned_too(make_world: MakeWorld, monkeypatch: Any) -> None:
    world = make_world(batch=BATCH, sampling={"max_new_tokens": 8})
    world.publish()
    long, short = world.node("long").join(), world.node("short").join()
    honest = short.commitment
    monkeypatch.setattr(
        short, "commitment", lambda lease, *rest, **changes: honest(lease, *rest, tokens=len(lease.samples), **changes)
    )
    turns = 0
    while world.node_row(long)["pinned_ms"] is None:
        turn(world, [(long, 500_000), (short, 500_000)])
        turns += 1
        assert turns < 60
    row = world.node_row(long)
    assert (row["luck_milli"], row["state"], row["reasons"]) == (0, "active", {E_STEERING: 1})
    assert row["length_milli"] >= LUCK_ALARM_MILLI
    other = world.node_row(short)
    assert (other["length_milli"], other["shorter_milli"], other["pinned_ms"]) == (
        0, row["length_milli"], row["pinned_ms"]
    )


# -- who gets which part of a group -------------------------------------------------------------------------


def test_nodes_share_groups(make_world: MakeWorld) -> None:
    world = make_world(batch=BATCH)
    world.publish()
    a, b = world.node("a").join(), world.node("b").join()
    mine, others = a.leases(4), b.leases(4)
    assert [(x.group, x.samples) for x, _ in mine] == [(g, [0, 1]) for g in range(4)]
    assert [(x.group, x.samples) for x, _ in others] == [(g, [2, 3]) for g in range(4)]


def test_nobody_gets_a_whole_group_while_others_work(make_world: MakeWorld) -> None:
    world = make_world(batch=BATCH | {"groups_per_batch": 5}, config={"batches_ahead": 2})
    world.publish()
    a, b = world.node("a").join(), world.node("b").join()
    assert [(x.group, x.samples) for x, _ in a.leases(64)] == [(g, [0, 1]) for g in range(10)]
    assert a.leases(64) == []
    world.clock.sleep(4)
    assert [(x.group, x.samples) for x, _ in b.leases(3)] == [(g, [2, 3]) for g in range(3)]
    assert a.leases(64) == []
    world.clock.sleep(2)  # now they have waited long enough
    assert [(x.group, x.samples) for x, _ in a.leases(64)] == [(g, [2, 3]) for g in range(3, 10)]


def test_peers_that_are_busy_are_peers(make_world: MakeWorld) -> None:
    """A node that works on a full house asks for nothing; its share is kept all the same."""
    world = make_world(batch=BATCH | {"lease_ms": 120_000})
    world.publish()
    a, b = world.node("a").join(), world.node("b").join()
    world.clock.sleep(100)
    assert [(x.group, x.samples) for x, _ in a.leases(2)] == [(0, [0, 1]), (1, [0, 1])]
    assert [(x.group, x.samples) for x, _ in b.leases(2)] == [(0, [2, 3]), (1, [2, 3])]
    world.clock.sleep(121)  # nothing was heard of b for the time of a lease
    assert [(x.group, x.samples) for x, _ in a.leases(3)] == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1])]


def test_who_gives_a_unit_back_waits_long_for_others_of_its_group(make_world: MakeWorld) -> None:
    world = make_world(batch=BATCH | {"groups_per_batch": 1}, config={"batches_ahead": 1})
    world.publish()
    a, b = world.node("a").join(), world.node("b").join()
    [(lease, _)] = a.leases(1)
    a.client.return_leases(LeaseReturn(
        run_id=RUN_ID, node_id=a.key.id, lease_ids=[lease.lease_id], reason="a test", issued_at_ms=world.clock.now_ms()
    ))
    world.clock.sleep(6)
    assert a.leases(4) == []
    assert [(x.group, x.samples) for x, _ in b.leases(1)] == [(0, [0, 1])]
    world.clock.sleep(2 * 120)
    world.node("c").join()
    [(lease, _), *_] = a.leases(4)
    assert (lease.group, lease.samples) == (0, [0, 1])  # nobody did it: better than a stale group


def test_what_nobody_else_takes_goes_to_who_asks(make_world: MakeWorld) -> None:
    world = make_world(batch=BATCH | {"groups_per_batch": 1}, config={"batches_ahead": 2})
    world.publish()
    a, _ = world.node("a").join(), world.node("b").join()
    assert [(x.group, x.samples) for x, _ in a.leases(4)] == [(0, [0, 1]), (1, [0, 1])]
    assert a.leases(4) == []
    world.clock.sleep(6)
    assert [(x.group, x.samples) for x, _ in a.leases(4)] == [(0, [2, 3]), (1, [2, 3])]


def test_leases_can_be_handed_out_as_they_come(make_world: MakeWorld) -> None:
    world = make_world(batch=BATCH, config={"share_groups": False})
    world.publish()
    a, _ = world.node("a").join(), world.node("b").join()
    assert [(x.group, x.samples) for x, _ in a.leases(3)] == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1])]
