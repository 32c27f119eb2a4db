from __future__ import annotations

from tests.fakes.coordinator import World


def test_drill_work_is_checked_but_never_admitted(world: World) -> None:
    honest, mallory = world.node("honest").join(), world.node("mallory").join()
    assert world.admin("drills", node_id=mallory.key.id, attack="best-of-n").status_code == 200
    assert world.admin("drills", node_id=mallory.key.id, attack="best-of-n").status_code == 200
    theirs = honest.leases(2)
    shadows = mallory.leases(2)
    assert {(x.group, tuple(x.samples)) for x, _ in shadows} == {(x.group, tuple(x.samples)) for x, _ in theirs}
    for lease, digest in shadows:
        mallory.finish(lease, digest)
    assert world.verifier.pass_all() == 2
    assert world.learner.client.admitted(9) == []
    assert world.node_row(mallory)["credit_pending"] == 0
    for lease, digest in theirs:
        honest.finish(lease, digest)
    world.verifier.pass_all()
    [group] = world.learner.client.admitted(9)
    assert {s.node_id for s in group.samples} == {honest.key.id}


def test_a_caught_drill_tells_how_much_it_handed_in_before(world: World) -> None:
    mallory = world.node("mallory").join()
    world.admin("drills", node_id=mallory.key.id, attack="int8")
    mallory.work(3)
    world.verifier.judge()
    world.verifier.judge("fail", "E_KL")
    [drill] = world.http.get("/v1/status").json()["drills"]
    assert (drill["node"], drill["attack"], drill["caught"], drill["code"]) == (mallory.key.id, "int8", True, "E_KL")
    assert drill["rollouts_before_caught"] == 2
    assert world.node_row(mallory)["state"] == "banned"


def test_a_drill_never_takes_a_unit_twice_nor_from_others(world: World) -> None:
    mallory, honest = world.node("mallory").join(), world.node("honest").join()
    world.admin("drills", node_id=mallory.key.id, attack="stale")
    units = [(x.group, tuple(x.samples)) for x, _ in mallory.leases(2) + mallory.leases(2)]
    assert len(set(units)) == len(units)
    theirs = honest.leases(64)
    assert len(theirs) == 8
    world.clock.advance(59)
    mallory.leases(2)
    for lease, digest in theirs:
        honest.finish(lease, digest)
    world.clock.advance(61)
    world.coordinator.sweep()  # the shadows run out without touching the units
    assert world.node_row(mallory)["dropped"] == 6
    assert world.verifier.pass_all() == 8


def test_a_key_can_be_enrolled_before_it_registers_and_not_for_two_attacks(world: World) -> None:
    mallory = world.node("mallory")
    world.admin("drills", node_id=mallory.key.id, attack="stale")
    mallory.join()
    assert world.node_row(mallory)["drill"] == "stale"
    assert world.admin("drills", node_id=mallory.key.id, attack="int8").json()["code"] == "E_CONFLICT"
    assert world.admin("drills", node_id=mallory.key.id, attack="magic").json()["code"] == "E_USAGE"


def test_enrolling_a_working_node_takes_its_work_back(world: World) -> None:
    node = world.node().join()
    node.work(2)
    world.verifier.pass_all()
    assert len(world.learner.client.admitted(9)) == 1
    world.admin("drills", node_id=node.key.id, attack="stale")
    assert world.learner.client.admitted(9) == []
    other = world.node("other").join()
    assert [x.group for x, _ in other.leases(2)] == [0, 0]
