"""Everything at once, in random order, with repeats and restarts: the books must still be right."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.models import Credit, Group, Receipt, Unit
from protocol.errors import AssayError
from protocol.messages import Lease
from tests.fakes.coordinator import RUN_ID, FakeNode, World
from tests.fakes.whole_log import read_log
from tests.unit.coordinator.conftest import MakeWorld

#: What honest parties may run into when leases expire, versions pass by and nodes get banned.
EXPECTED = {"E_LEASE_EXPIRED", "E_LEASE_CLOSED", "E_NODE_BANNED", "E_BATCH"}


class Chaos:
    def __init__(self, world: World, seed: int):
        self.world, self.rng = world, random.Random(seed)
        self.nodes = [world.node(str(i)).join() for i in range(3)]
        self.open: list[tuple[FakeNode, Lease, str]] = []
        self.done: list[tuple[FakeNode, Lease, str]] = []
        self.seeds: dict[tuple[int, int], str] = {}

    def step(self) -> None:
        act = self.rng.choice([
            self.lease, self.lease, self.finish, self.finish, self.repeat, self.judge, self.judge, self.judge,
            self.wait, self.train, self.restart,
        ])
        try:
            act()
        except AssayError as error:
            if error.code not in EXPECTED:
                raise

    def lease(self) -> None:
        node = self.rng.choice(self.nodes)
        node.version = len(self.world.learner.manifests) - 1
        request = node.request(self.rng.randint(1, 3))
        replies = [node.client.lease(request) for _ in range(self.rng.randint(1, 2))]
        assert len({tuple(e.digest for e in reply.leases) for reply in replies}) == 1
        for envelope in replies[0].leases:
            lease = Lease.from_payload(envelope.payload)
            for sample in lease.samples:  # a re-lease never changes the seed of a sample
                seed = f"{lease.start_version} {lease.beacon} {lease.prompt_sha256}"
                assert self.seeds.setdefault((lease.group, sample), seed) == seed
            self.open.append((node, lease, envelope.digest))

    def finish(self) -> None:
        if self.open:
            node, lease, digest = self.open.pop(self.rng.randrange(len(self.open)))
            node.finish(lease, digest)
            self.done.append((node, lease, digest))

    def repeat(self) -> None:
        if self.done:
            node, lease, digest = self.rng.choice(self.done)
            assert node.finish(lease, digest).duplicate is True

    def judge(self) -> None:
        job = self.world.verifier.claim()
        if job is None:
            return
        outcome = self.rng.choices(["pass", "inconclusive", "fail"], [20, 3, 1])[0]
        verdict = self.world.verifier.verdict(job, outcome, None if outcome == "pass" else f"E_{outcome.upper()}")
        for _ in range(self.rng.randint(1, 2)):
            self.world.verifier.client.verdict(verdict)

    def wait(self) -> None:
        self.world.clock.advance(self.rng.choice([1, 5, 70]))
        self.world.coordinator.sweep()

    def train(self) -> None:
        if len(self.world.learner.client.admitted(2)) < 2:
            return
        plan = self.world.learner.plan()
        for _ in range(self.rng.randint(1, 2)):
            self.world.learner.client.post_batch(plan)
        self.world.publish()

    def restart(self) -> None:
        if self.rng.random() < 0.3:
            self.world.restart()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_books_are_right_whatever_the_order(make_world: MakeWorld, seed: int) -> None:
    world = make_world(batch={"max_lag_versions": 2})
    world.publish()
    chaos = Chaos(world, seed)
    for _ in range(110):
        chaos.step()
    while world.verifier.pass_all():
        world.clock.advance(10)
    check_books(world)


def check_books(world: World) -> None:
    with world.coordinator.database.read() as session:
        receipts = list(session.scalars(select(Receipt)))
        units = list(session.scalars(select(Unit)))
        groups = {group.id: group for group in session.scalars(select(Group))}
        credit = {row.receipt_id: row for row in session.scalars(select(Credit))}
    assert {r.id for r in receipts if r.state == "pass"} >= {
        row.receipt_id for row in credit.values() if row.state == "settled"
    } - {r.id for r in receipts if r.state == "void"}
    assert max(Counter(r.lease_id for r in receipts).values()) == 1
    by_id = {receipt.id: receipt for receipt in receipts}
    for unit in units:
        group = groups[unit.group_id]
        if group.state in ("admitted", "consumed"):
            assert unit.state == "verified"
        if unit.state == "verified":
            assert by_id[str(unit.receipt_id)].state == "pass"
            if group.state == "consumed":
                assert credit[str(unit.receipt_id)].state in ("settled", "void")
    status: dict[str, Any] = world.http.get("/v1/status").json()
    assert status["rollouts"]["accepted"] == sum(node["accepted"] for node in status["nodes"])
    assert status["tokens_generated"] == sum(receipt.tokens for receipt in receipts)
    assert status["tokens_trained"] == sum(
        by_id[str(unit.receipt_id)].tokens for unit in units if groups[unit.group_id].state == "consumed"
    )
    assert read_log(world.http, RUN_ID, world.keys["coordinator"].public_key)
