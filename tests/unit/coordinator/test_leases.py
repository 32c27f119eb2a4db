from __future__ import annotations

import pytest

from coordinator.app import create_app
from protocol.errors import PeerFault
from protocol.messages import Lease, LeaseReturn
from tests.fakes.coordinator import RUN_ID, FakeNode, FakePrompts, World
from tests.unit.coordinator.conftest import MakeWorld


def give_back(world: World, node: FakeNode, lease: Lease) -> None:
    node.client.return_leases(
        LeaseReturn(
            run_id=RUN_ID, node_id=node.key.id, lease_ids=[lease.lease_id], reason="none",
            issued_at_ms=world.clock.now_ms(),
        )
    )


def code_of(caught: pytest.ExceptionInfo[PeerFault]) -> str:
    return caught.value.code


def test_no_work_before_the_first_version(make_world: MakeWorld) -> None:
    world = make_world()
    reply = world.node().join().ask()
    assert reply.leases == []
    assert reply.why == "no checkpoint is published yet"
    assert reply.retry_after_ms > 0


def test_the_same_nonce_gives_the_same_leases(world: World) -> None:
    node = world.node().join()
    request = node.request(3)
    first, again = node.client.lease(request), node.client.lease(request)
    assert [e.to_bytes() for e in first.leases] == [e.to_bytes() for e in again.leases]
    assert len(first.leases) == 3
    other = node.ask(3)
    assert not {e.digest for e in first.leases} & {e.digest for e in other.leases}


def test_leases_are_signed_and_cover_each_sample_once(world: World) -> None:
    node = world.node().join()
    leases = [
        Lease.open(e, world.keys["coordinator"].public_key, run_id=RUN_ID) for e in node.ask(64).leases
    ]
    assert [(x.group, x.samples) for x in leases] == [(g, s) for g in range(4) for s in ([0, 1], [2, 3])]
    assert [x.environment for x in leases[::2]] == ["even", "odd", "even", "odd"]
    assert {x.start_version for x in leases} == {0}


def test_nobody_leases_and_returns_without_end(make_world: MakeWorld) -> None:
    """Each lease leaves rows and a place in the log: a node gives back a few times what it may hold, and no more."""
    world = make_world(config={"max_active_leases": 2})
    world.publish()
    node, count = world.node().join(), 0
    while count < 40 and (leases := node.leases(2)):
        ids, now_ms = [lease.lease_id for lease, _ in leases], world.clock.now_ms()
        node.client.return_leases(
            LeaseReturn(run_id=RUN_ID, node_id=node.key.id, lease_ids=ids, reason="none", issued_at_ms=now_ms)
        )
        count += len(ids)
    assert count == 8
    assert "gave 8 back lately" in node.ask().why
    assert world.node("other").join().leases(1)
    world.clock.advance(61)
    assert node.leases(1)


def test_the_pace_is_bound_to_the_learners(world: World) -> None:
    node = world.node().join()
    reply = node.ask(64)  # (max_lag 1 + 1) * 2 groups of 2 units
    assert len(reply.leases) == 8
    assert "waiting for the learner" in reply.why
    assert node.ask(64).leases == []
    for envelope in reply.leases[:4]:
        node.finish(Lease.from_payload(envelope.payload), envelope.digest)
    assert node.ask(64).leases == []  # verified or not, the groups are unconsumed
    world.verifier.pass_all()
    world.learner.client.post_batch(world.learner.plan())
    assert len(node.ask(64).leases) == 4


def test_the_operator_chooses_how_far_work_runs_ahead(make_world: MakeWorld) -> None:
    for ahead, units in ((1, 4), (3, 12), (9, 16)):
        world = make_world(config={"batches_ahead": ahead}, batch={"max_lag_versions": 3})
        world.publish()
        assert len(world.node().join().ask(64).leases) == units


def test_a_complete_run_says_so(make_world: MakeWorld) -> None:
    world = make_world(batch={"max_versions": 1})
    world.publish()
    node = world.node().join()
    assert len(node.ask(64).leases) == 6  # what the one missing version needs, and one group to spare
    world.publish()
    assert node.ask(64).why == "run complete"
    assert world.http.get("/v1/status").json()["run"]["complete"] is True


def test_an_expired_lease_goes_on_with_the_same_version_and_beacon(world: World) -> None:
    slow, quick = world.node("slow").join(), world.node("quick").join()
    [(lost, _)] = slow.leases(1)
    world.publish()
    quick.version = 1
    world.clock.advance(61)
    [(lease, _)] = quick.leases(1)
    assert (lease.group, lease.samples) == (lost.group, lost.samples)
    assert (lease.start_version, lease.beacon, lease.prompt_sha256) == (0, lost.beacon, lost.prompt_sha256)
    assert lease.lease_id != lost.lease_id
    assert world.node_row(slow)["dropped"] == 1


def test_a_late_submission_is_taken_while_nobody_else_has_the_unit(world: World) -> None:
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    world.clock.advance(61)
    world.coordinator.sweep()
    assert world.node_row(node)["dropped"] == 1
    assert node.finish(lease, digest).duplicate is False
    assert world.node_row(node)["dropped"] == 0


def test_a_late_submission_is_refused_once_the_unit_is_leased_again(world: World) -> None:
    slow, quick = world.node("slow").join(), world.node("quick").join()
    [(lease, digest)] = slow.leases(1)
    world.clock.advance(61)
    [(again, again_digest)] = quick.leases(1)
    with pytest.raises(PeerFault) as caught:
        slow.finish(lease, digest)
    assert code_of(caught) == "E_LEASE_EXPIRED"
    quick.finish(again, again_digest)
    with pytest.raises(PeerFault) as caught:
        slow.finish(lease, digest)
    assert code_of(caught) == "E_LEASE_EXPIRED"


def test_late_work_is_taken_while_nobody_holds_the_unit_whoever_held_it_meanwhile(world: World) -> None:
    slow, quick = world.node("slow").join(), world.node("quick").join()
    [(lease, digest)] = slow.leases(1)
    world.clock.advance(61)
    [(again, _)] = quick.leases(1)
    assert (again.group, again.samples) == (lease.group, lease.samples)
    give_back(world, quick, again)
    assert slow.finish(lease, digest).duplicate is False
    assert world.node_row(slow)["dropped"] == 0


# -- while the coordinator is away -------------------------------------------------------------------------------------


def away(world: World, seconds: float) -> None:
    world.transport.stop()
    world.clock.advance(seconds)
    world.transport.start(create_app(world.config, clock=world.clock, store=world.store, prompts=FakePrompts()))


@pytest.mark.parametrize("seconds", [65, 100_000])
def test_nobody_is_late_for_a_coordinator_that_is_away(make_world: MakeWorld, seconds: int) -> None:
    world = make_world(config={"share_groups": False})
    world.publish()
    node, other = world.node().join(), world.node("other").join()
    held = node.leases(4)
    world.clock.advance(50)
    away(world, seconds)
    taken = {(lease.group, tuple(lease.samples)) for lease, _ in other.leases(8)}
    assert not taken & {(lease.group, tuple(lease.samples)) for lease, _ in held}
    world.clock.advance(29)  # ten seconds were left of them: a moment is given
    for lease, digest in held[:3]:
        node.finish(lease, digest)
    row = world.node_row(node)
    assert (row["dropped"], row["forfeited"]) == (0, 0)
    world.clock.advance(2)
    other.ask()
    assert world.node_row(node)["dropped"] == 1  # no longer than that


def test_what_had_run_out_before_stays_out_and_nothing_lasts_longer_than_a_lease(world: World) -> None:
    node = world.node().join()
    node.leases(1)
    world.clock.advance(61)
    node.leases(1)
    world.clock.jump(-30)
    away(world, 1)  # by a clock that was set back: what is left is longer than a lease
    away(world, 10_000_000)
    world.clock.advance(59)
    world.coordinator.sweep()
    assert world.node_row(node)["dropped"] == 1
    world.clock.advance(2)
    world.coordinator.sweep()
    assert world.node_row(node)["dropped"] == 2


def test_it_knows_when_it_served_last_though_it_was_killed(world: World) -> None:
    node, other = world.node().join(), world.node("other").join()
    [(lease, digest)] = node.leases(1)
    for _ in range(50):
        world.clock.advance(1)
        world.coordinator.sweep()
    world.coordinator.close = lambda: None  # type: ignore[method-assign]
    away(world, 300)
    world.clock.advance(25)
    assert (lease.group, lease.samples) not in [(x.group, x.samples) for x, _ in other.leases(8)]
    assert node.finish(lease, digest).duplicate is False
    assert world.node_row(node)["dropped"] == 0


def test_returned_leases_are_offered_again_and_closed_for_the_giver(world: World) -> None:
    node, other = world.node().join(), world.node("other").join()
    [(lease, digest), _] = node.leases(2)
    back = LeaseReturn(
        run_id=RUN_ID, node_id=node.key.id, lease_ids=[lease.lease_id], reason="drain",
        issued_at_ms=world.clock.now_ms(),
    )
    assert node.client.return_leases(back).duplicate is False
    assert node.client.return_leases(back).duplicate is True
    [(again, _)] = other.leases(1)
    assert (again.group, again.samples, again.beacon) == (lease.group, lease.samples, lease.beacon)
    with pytest.raises(PeerFault) as caught:
        node.finish(lease, digest)
    assert code_of(caught) == "E_LEASE_CLOSED"


def test_a_node_cannot_return_the_lease_of_another(world: World) -> None:
    node, thief = world.node().join(), world.node("thief").join()
    [(lease, digest)] = node.leases(1)
    back = LeaseReturn(
        run_id=RUN_ID, node_id=thief.key.id, lease_ids=[lease.lease_id], reason="x", issued_at_ms=world.clock.now_ms()
    )
    assert thief.client.return_leases(back).duplicate is True
    assert node.finish(lease, digest).duplicate is False


def test_a_node_that_drops_losing_units_gains_nothing_and_answers_for_them(world: World) -> None:
    """It lets every second unit expire. Each comes back with the same seed until its version is too stale."""
    picky = world.node("picky").join()
    leases = picky.leases(4)
    for lease, digest in leases[::2]:
        picky.finish(lease, digest)
    world.clock.advance(61)
    again = [(x.group, x.samples, x.beacon) for x, _ in picky.leases(2)]
    assert again == [(x.group, x.samples, x.beacon) for x, _ in leases[1::2]]
    world.clock.advance(61)
    world.coordinator.sweep()
    world.publish()
    assert world.http.get("/v1/groups/0").json()["state"] == "open"  # lag 1 is within the bound
    world.publish()
    for group in (0, 1):
        body = world.http.get(f"/v1/groups/{group}").json()
        assert (body["state"], body["cause"]) == ("cancelled", "stale")
    row = world.node_row(picky)
    assert row["dropped"] == 4
    assert row["forfeited"] == 8  # two units of two samples, each dropped twice
    assert row["audited_passes"] == 0
    assert world.http.get("/v1/status").json()["rollouts"]["cancelled"] == 4
    picky.version = 2
    assert {lease.group for lease, _ in picky.leases(64)}.isdisjoint({0, 1})  # never re-rolled


def test_dropping_shrinks_what_a_node_may_hold(make_world: MakeWorld) -> None:
    world = make_world(config={"max_active_leases": 4})
    world.publish()
    node = world.node().join()
    assert len(node.leases(64)) == 4
    assert node.ask(64).leases == []
    world.clock.advance(61)
    world.coordinator.sweep()
    [(lease, digest)] = node.leases(64)
    node.finish(lease, digest)
    assert len(node.leases(64)) == 4  # a submission ends the streak


def test_a_stale_group_cancels_the_lease_that_is_still_out(world: World) -> None:
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    world.publish()
    world.publish()
    with pytest.raises(PeerFault) as caught:
        node.finish(lease, digest)
    assert code_of(caught) == "E_LEASE_CLOSED"
    assert world.node_row(node)["forfeited"] == 2


def test_a_node_without_the_newest_weights_gets_only_what_it_can_start(world: World) -> None:
    old = world.node("old").join()
    old.leases(1)
    world.publish()
    [(lease, _)] = old.leases(64)  # the second unit of group 0
    assert (lease.group, lease.start_version) == (0, 0)
    assert "fetch it first" in old.ask(1).why


def test_a_claim_to_a_version_never_published_is_refused(world: World) -> None:
    node = world.node().join()
    node.version = 5
    with pytest.raises(PeerFault) as caught:
        node.ask()
    assert code_of(caught) == "E_NODE_VERSION"
