"""What catching up costs on weights that move as under an optimiser: the same ones, back and forth, by small steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protocol.weights.layout import Layout, State
from protocol.weights.skips import SkipMaker
from tests.fakes.checkpoints import LEARNER, RUN_ID, FakeLearner, same_bits

LAYOUT = Layout.of({"a": ("BF16", (100_000,))})


def walk() -> Iterator[State]:
    """bf16 roundings of fp32 masters that follow a momentum of random gradients; about 2 % of the words change."""
    rng = np.random.default_rng(0)
    masters = (rng.standard_normal(100_000) * 0.04).astype(np.float32)
    momentum = np.zeros_like(masters)
    while True:
        bits = masters.view(np.uint32)
        yield {"a": ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)}  # to the nearest, ties to even
        momentum = 0.9 * momentum + 0.1 * rng.standard_normal(100_000).astype(np.float32)
        masters = masters - np.float32(4e-6) * momentum


def test_twenty_versions_cost_at_most_45_percent_of_their_diffs_wherever_they_begin() -> None:
    learner, states = FakeLearner(layout=LAYOUT), walk()
    maker = SkipMaker(learner.store, LEARNER, RUN_ID, LAYOUT)
    for version in range(28):
        learner.publish(new=next(states))
        bases = ((learner.manifests[base], learner.states[base]) for base in maker.due(version))
        maker.make(learner.manifests[version], learner.states[version], bases)
    anchor = sum(ref.size_bytes for ref in learner.manifests[0].anchor)
    for start in range(4, 8):
        follower = learner.follower()
        follower.advance(learner.envelopes[: start + 1])
        way = follower.way_to(learner.head(start + 20), learner.clock.now_ms())
        assert way is not None
        assert way.chain_bytes is not None
        print(way.describe(), f"{way.nbytes / way.chain_bytes:.3f} of the chain")
        assert way.nbytes <= 0.45 * way.chain_bytes
        assert way.nbytes < anchor
        assert follower.follow(way)
        assert same_bits(follower.state, learner.states[start + 20])
