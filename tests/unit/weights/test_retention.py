"""What is deleted is never asked for again; what can be asked for is never deleted."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.weights.layout import Layout
from protocol.weights.retention import retention
from protocol.weights.skips import CheckpointSkip, SkipMaker, index_name, read_announcement
from tests.fakes.checkpoints import LEARNER, RUN_ID, FakeLearner, same_bits
from tests.fakes.store import MemoryStore

LAYOUT = Layout.of({"a": ("BF16", (3000,))})


def published(seed: int, versions: int = 20) -> tuple[FakeLearner, list[CheckpointSkip]]:
    """A chain with anchors at random and skips."""
    rng, learner = np.random.default_rng(seed), FakeLearner(layout=LAYOUT, seed=seed)
    maker = SkipMaker(learner.store, LEARNER, RUN_ID, LAYOUT, lengths=(4, 8))
    skips = []
    for version in range(versions):
        learner.publish(anchor=version == 0 or bool(rng.random() < 0.2))
        bases = ((learner.manifests[base], learner.states[base]) for base in maker.due(version))
        skips += maker.make(learner.manifests[version], learner.states[version], bases)
    return learner, skips


def clear(learner: FakeLearner, skips: list[CheckpointSkip], oldest: int) -> int:
    plan = retention(learner.manifests, skips, oldest, [LAYOUT.sha256])
    assert not plan.keep & plan.delete.keys()
    for sha256 in plan.delete:
        learner.store.delete(sha256)
    return plan.freed_bytes


@pytest.mark.parametrize("seed", range(4))
def test_everything_from_the_oldest_needed_on_can_still_be_had(seed: int) -> None:
    learner, skips = published(seed)
    oldest = int(np.random.default_rng(seed).integers(0, 20))
    clear(learner, skips, oldest)
    assert learner.store.has(LAYOUT.sha256)
    joiner = learner.follower()
    joiner.catch_up(learner.head(), learner.clock.now_ms())
    assert same_bits(joiner.state, learner.states[-1])
    for version in range(oldest, 20):
        late = learner.follower(keep_versions=0)
        late._skips = None
        late.catch_up(learner.head(version), learner.clock.now_ms())
        assert same_bits(late.state, learner.states[version])
        assert late.catch_up(learner.head(), learner.clock.now_ms()) == (version < 19)
        assert same_bits(late.state_at(version), learner.states[version])


def test_old_chunks_go_and_their_bytes_are_told() -> None:
    learner = FakeLearner(layout=LAYOUT)
    learner.publish_many(20, anchor_every=5)
    store = learner.store
    assert isinstance(store, MemoryStore)
    before = sum(map(len, store.objects.values()))
    freed = clear(learner, [], 12)
    assert before - sum(map(len, store.objects.values())) == freed > 0
    assert not store.has(learner.manifests[10].diff[0].sha256)  # leads from a version that nobody can ask for
    assert store.has(learner.manifests[10].anchor[0].sha256)


def test_without_an_anchor_in_reach_nothing_goes() -> None:
    learner = FakeLearner(layout=LAYOUT)
    learner.publish_many(4)
    manifests = learner.manifests[1:]
    plan = retention(manifests, [], 3)
    assert (plan.anchor, plan.delete) == (None, {})


def test_a_long_sleeper_whose_diffs_are_gone_starts_anew_from_an_anchor() -> None:
    learner = FakeLearner(layout=LAYOUT)
    learner.publish_many(5)
    sleeper = learner.follower()
    sleeper.advance(learner.envelopes[:3])
    learner.publish_many(16, anchor_every=10)
    clear(learner, [], 20)
    way = sleeper.way_to(learner.head(), learner.clock.now_ms())
    assert way is not None
    assert way.steps[0].kind == "diff"
    assert sleeper.follow(way)
    assert same_bits(sleeper.state, learner.states[-1])


def test_skips_over_the_anchor_go_with_what_they_lead_from() -> None:
    learner, skips = published(3)
    oldest = 19
    plan = retention(learner.manifests, skips, oldest)
    assert plan.anchor is not None
    for skip in skips:
        name = index_name(learner.manifests[skip.to_version])
        assert skip in read_announcement(learner.store.announced(name), RUN_ID)
        kept = {ref.sha256 for ref in skip.chunks} <= plan.keep
        assert kept or skip.from_version < plan.anchor
