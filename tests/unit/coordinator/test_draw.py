from __future__ import annotations

import hashlib

import pytest

from coordinator.epochs import Epochs
from protocol.audit_draw import audit_rate_ppm, commit_to, is_drawn
from protocol.messages import AuditPolicy
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


def test_known_answer() -> None:
    digest = hashlib.sha256(b"a receipt").hexdigest()
    assert commit_to(b"\x01" * 32) == hashlib.sha256(b"\x01" * 32).hexdigest()
    assert [is_drawn(b"\x01" * 32, digest, rate) for rate in (0, 250_000, 500_000, 1_000_000)].count(True) >= 1


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
    assert [d["drawn"] for d in draws] == [is_drawn(key, d["receipt_sha256"], d["rate_ppm"]) for d in draws]
    assert {d["drawn"] for d in draws} == {True, False}
