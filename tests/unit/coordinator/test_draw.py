from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from coordinator.epochs import Epochs
from coordinator.models import Receipt
from protocol.audit_draw import audit_rate_ppm, commit_to, is_drawn, is_replicated
from protocol.messages import AuditPolicy
from tests.fakes.clock import FakeClock
from tests.unit.coordinator.conftest import MakeWorld

POLICY = AuditPolicy(ramp=20, floor_ppm=50_000, epoch_ms=1000)


@pytest.mark.parametrize(
    ("passes", "rate"), [(0, 1_000_000), (19, 1_000_000), (20, 500_000), (60, 250_000), (380, 50_000), (10**6, 50_000)]
)
def test_rate_falls_with_trust_but_never_below_the_floor(passes: int, rate: int) -> None:
    assert audit_rate_ppm(POLICY, passes) == rate


def test_no_ramp_means_the_floor_from_the_start() -> None:
    assert audit_rate_ppm(AuditPolicy(ramp=0, floor_ppm=7), 0) == 7


def test_draw_hits_as_often_as_its_rate_says() -> None:
    digests = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(20_000)]
    drawn = sum(is_drawn(b"k" * 32, digest, 50_000) for digest in digests)
    assert 850 < drawn < 1150  # 5 sigma around 1000
    assert all(is_drawn(b"k" * 32, digest, 1_000_000) for digest in digests[:1000])
    assert not any(is_drawn(b"k" * 32, digest, 0) for digest in digests[:1000])


VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "audit-draw"


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.json")), ids=lambda path: path.stem)
def test_known_answers(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    key, draw = bytes.fromhex(case["key"]), {"audit": is_drawn, "replica": is_replicated}[case["draw"]]
    assert commit_to(key) == case["key_sha256"]
    assert [draw(key, case["digest"], rate) for rate, _ in case["drawn"]] == [drawn for _, drawn in case["drawn"]]


def test_the_two_draws_say_nothing_about_each_other() -> None:
    digests = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(4000)]
    both = [(is_drawn(b"k" * 32, d, 500_000), is_replicated(b"k" * 32, d, 500_000)) for d in digests]
    assert 840 < both.count((True, True)) < 1160  # 5 sigma and more around a quarter


def test_whoever_dates_receipts_does_not_choose_who_is_drawn(make_world: MakeWorld, clock: FakeClock) -> None:
    """The coordinator knows the key and picks the date: whatever it picks, the node's commitment decides."""
    drawn, began_ms = [], clock.now_ms()
    for late_s in range(6):
        clock.jump((began_ms - clock.now_ms()) / 1000)
        world = make_world(audit={"ramp": 0, "floor_ppm": 500_000}, batch={"groups_per_batch": 20})
        world.coordinator.epochs = world.coordinator.submissions._epochs = Epochs(
            world.coordinator.run, lambda: b"k" * 32
        )
        world.publish()
        node = world.node().join()
        [(lease, digest)] = node.leases(1)
        commitment = node.commitment(lease, digest)
        node.upload(node.bundle(lease))
        world.clock.advance(late_s)
        receipt = node.client.submit(commitment).receipt
        with world.coordinator.database.read() as session:
            row = session.query(Receipt).filter_by(sha256=receipt.digest).one()
            assert row.drawn == is_drawn(b"k" * 32, commitment.sign(node.key).digest, 500_000)
            drawn.append((receipt.digest, row.drawn))
    assert len({digest for digest, _ in drawn}) == 6  # as many receipts of one commitment
    assert len({was for _, was in drawn}) == 1


def test_the_draw_can_be_repeated_once_the_key_is_revealed(make_world: MakeWorld) -> None:
    world = make_world(audit={"ramp": 1, "floor_ppm": 300_000}, batch={"groups_per_batch": 20})
    world.coordinator.epochs = world.coordinator.submissions._epochs = Epochs(world.coordinator.run, lambda: b"k" * 32)
    world.publish()
    node = world.node().join()
    node.work(1)
    world.verifier.pass_all()  # past the ramp: from now on the rate is below one
    node.work(12)
    whole = world.http.get("/v1/epochs/0/draws").json()
    draws = whole["draws"]
    assert (len(draws), whole["next"]) == (13, None)
    pages = [world.http.get(f"/v1/epochs/0/draws?from={first}&limit=7").json() for first in (0, 7)]
    assert ([*pages[0]["draws"], *pages[1]["draws"]], pages[0]["next"], pages[1]["next"]) == (draws, 7, None)
    assert all(d["drawn"] is None for d in draws)
    assert world.http.get("/v1/epochs").json()["epochs"][0]["key"] is None

    world.clock.advance(601)
    world.coordinator.sweep()
    ended = world.http.get("/v1/epochs").json()["epochs"][-1]
    key = bytes.fromhex(ended["key"])
    assert commit_to(key) == ended["key_sha256"]
    draws = world.http.get("/v1/epochs/0/draws").json()["draws"]
    assert [d["drawn"] for d in draws] == [is_drawn(key, d["commitment_sha256"], d["rate_ppm"]) for d in draws]
    assert {d["drawn"] for d in draws} == {True, False}
