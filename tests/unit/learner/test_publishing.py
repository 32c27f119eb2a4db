"""When the publisher sends an anchor, and the skips it makes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from learner.config import LearnerConfig
from learner.publisher import Publisher
from protocol.messages import CheckpointManifest
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout, State
from protocol.weights.trail import Trail
from tests.fakes.checkpoints import changed, random_bits, same_bits
from tests.fakes.clock import FakeClock
from tests.fakes.learning import LEARNER, RUN_ID, FakeCoordinator, run_manifest
from tests.fakes.store import MemoryStore

LAYOUT = Layout.of({"a": ("BF16", (20_000,))})


class Learning:
    """A publisher fed with random small changes."""

    def __init__(self, density: float = 0.01, **publish: Any):
        self.store, self.clock, self.density = MemoryStore(), FakeClock(), density
        self.config = LearnerConfig.model_validate({"publish": publish}).publish
        self.rng = np.random.default_rng(0)
        self.states: list[State] = []
        self.envelopes: list[Any] = []
        self.manifests: list[CheckpointManifest] = []
        self.client = FakeCoordinator()
        self.publisher = self.restarted()

    def restarted(self) -> Publisher:
        self.publisher = Publisher(
            self.client, self.store, LEARNER, run_manifest(LAYOUT), LAYOUT, self.config, self.clock
        )
        return self.publisher

    def step(self, density: float | None = None) -> None:
        old = self.states[-1] if self.states else None
        new = random_bits(LAYOUT, self.rng) if old is None else changed(old, self.rng, density or self.density)
        previous = (self.manifests[-1], self.envelopes[-1]) if self.manifests else None
        made = self.publisher.make(previous, old, new)
        self.states.append(new)
        self.envelopes.append(made.envelope)
        self.manifests.append(made.manifest)
        self.publisher.tell(made.manifest.version, made.envelope, None)

    def anchors(self) -> list[int]:
        return [manifest.version for manifest in self.manifests if manifest.anchor]

    def follower(self) -> CheckpointFollower:
        return CheckpointFollower(
            self.store.get, LEARNER.public_key, RUN_ID, LAYOUT, manifests=lambda a, b: self.envelopes[a : b + 1],
            skips=self.store.announced, threads=1,
        )


def test_a_joiner_never_pays_more_than_fifteen_percent_above_an_anchor() -> None:
    learning = Learning(anchor_least_versions=1)
    for _ in range(48):
        learning.step()
    assert 1 < len(learning.anchors()) < 20
    for version in range(48):
        joiner = learning.follower()
        way = joiner._way(learning.envelopes[: version + 1])
        assert way is not None
        dearest = max(sum(ref.size_bytes for ref in m.anchor) for m in learning.manifests if m.anchor)
        assert way.nbytes <= 1.15 * dearest


def test_anchors_are_not_too_close_and_not_too_far_apart() -> None:
    dense = Learning(density=0.9, anchor_least_versions=5, anchor_every_versions=12)
    for _ in range(25):
        dense.step()
    assert dense.anchors() == [0, 5, 10, 12, 17, 22, 24]
    quiet = Learning(density=0.0001, anchor_every_versions=12)
    for _ in range(25):
        quiet.step()
    assert quiet.anchors() == [0, 12, 24]


def test_the_rule_goes_on_after_a_restart() -> None:
    straight, broken = Learning(anchor_least_versions=1, skips=False), Learning(anchor_least_versions=1, skips=False)
    for version in range(24):
        straight.step()
        broken.step()
        last = broken.anchors()[-1]
        broken.restarted().recall(broken.manifests[last : version + 1])
    assert straight.anchors() == broken.anchors()
    assert len(straight.anchors()) > 1


def test_skips_are_announced_and_serve_a_node_that_was_away() -> None:
    learning = Learning(density=0.02)
    for _ in range(13):
        learning.step()
    away = learning.follower()
    away.advance(learning.envelopes[:1])
    way = away._way(learning.envelopes)
    assert way is not None
    assert "skip" in {step.kind for step in way.steps}
    assert way.chain_bytes is not None
    assert way.nbytes < way.chain_bytes
    assert away.follow(way)
    assert same_bits(away.state, learning.states[-1])


def test_a_store_that_takes_no_skips_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    from protocol.errors import E_STORE, LocalFault

    learning = Learning()

    def full(name: str, data: bytes) -> None:
        raise LocalFault(E_STORE, "full")

    learning.store.announce = full  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            learning.step()
    assert "skips were not made" in caplog.text
    assert learning.follower().advance(learning.envelopes) == 5


def test_the_trail_leads_back_as_far_as_its_memory() -> None:
    rng = np.random.default_rng(1)
    states = [random_bits(LAYOUT, rng)]
    for _ in range(10):
        states.append(changed(states[-1], rng, 0.01))
    for memory, reach in ((2**30, 10), (4000, 3), (0, 0)):
        trail = Trail(memory)
        trail.step(0, None, states[0])
        for version in range(1, 11):
            trail.step(version, states[version - 1], states[version])
        found = {version: same_bits(state, states[version]) for version, state in trail.back_to(range(11))}
        assert all(found.values())
        assert 10 - reach - 2 <= 10 - len(found) <= 10 - reach + 2
    trail.step(20, states[0], states[1])  # a gap: nothing before it is known
    assert [version for version, _ in trail.back_to(range(20))] == []
