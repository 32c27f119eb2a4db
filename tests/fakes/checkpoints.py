"""Checkpoints without a learner: random states, small random updates, and a chain of signed versions in a store."""

from __future__ import annotations

import hashlib

import numpy as np

from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import CheckpointManifest
from protocol.store import Store
from protocol.weights.chain import publish, sign_head
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout, State, copy_state
from tests.fakes.clock import FakeClock
from tests.fakes.store import MemoryStore

RUN_ID = "5e" * 16
LEARNER = Identity(hashlib.sha256(b"the fake learner").digest())

#: Every case at once: both word sizes interleaved, a scalar, an empty tensor, several dimensions.
LAYOUT = Layout.of(
    {
        "embed.weight": ("BF16", (37, 8)),
        "empty": ("BF16", (0, 5)),
        "layers.0.norm": ("F32", (19,)),
        "layers.0.weight": ("BF16", (5, 3, 7)),
        "layers.1.weight": ("F16", (64,)),
        "scale": ("F32", ()),
        "z.tail": ("BF16", (1,)),
    },
    aliases={"lm_head.weight": "embed.weight"},
)


def random_bits(layout: Layout, rng: np.random.Generator) -> State:
    """A state of any bit patterns: NaNs, infinities, subnormals and both zeros among them."""
    return {
        entry.name: np.asarray(rng.integers(0, 2 ** (8 * entry.words.itemsize), entry.shape, dtype=np.uint64)).astype(
            entry.words
        )
        for entry in layout.entries
    }


def changed(state: State, rng: np.random.Generator, density: float, *, any_bits: bool = False) -> State:
    """A copy with about ``density`` of its words changed: by one unit in the last place, or to any pattern."""
    new = copy_state(state)
    for array in new.values():
        words = array.reshape(-1)
        where = rng.random(words.size) < density
        if any_bits:
            values = rng.integers(0, 2 ** (8 * words.itemsize), int(where.sum()), dtype=np.uint64)
            words[where] = values.astype(words.dtype)
        else:
            words[where] += rng.choice([1, -1], int(where.sum())).astype(words.dtype)
    return new


def same_bits(a: State, b: State) -> bool:
    """Whether two states are identical, bit by bit."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


class FakeLearner:
    """Publishes random versions into a store and remembers every state."""

    def __init__(
        self, store: Store | None = None, seed: int = 0, layout: Layout = LAYOUT, identity: Identity = LEARNER,
        state_hash: str = "sha-256",
    ):
        self.rng = np.random.default_rng(seed)
        self.store: Store = MemoryStore() if store is None else store
        self.clock = FakeClock()
        self.layout, self.identity, self.state_hash = layout, identity, state_hash
        self.first: State | None = None  #: the state of version 0; random bits by default
        self.states: list[State] = []
        self.manifests: list[CheckpointManifest] = []
        self.envelopes: list[Envelope] = []

    def publish(
        self, *, anchor: bool = False, density: float = 0.05, any_bits: bool = False, new: State | None = None
    ) -> Envelope:
        """One more version, with the state ``new`` or a random change of the last one; the first is an anchor."""
        self.clock.advance(1)
        old = self.states[-1] if self.states else None
        if new is None:
            new = self._first() if old is None else changed(old, self.rng, density, any_bits=any_bits)
        version = publish(
            self.store, self.identity, RUN_ID, self.layout,
            (self.manifests[-1], self.envelopes[-1]) if old is not None else None, old, new,
            anchor=anchor, clock=self.clock, beacon=self.rng.bytes(32).hex(),
            state_hash=self.state_hash,
        )
        self.states.append(new)
        self.manifests.append(version.manifest)
        self.envelopes.append(version.envelope)
        return version.envelope

    def _first(self) -> State:
        return self.first or random_bits(self.layout, self.rng)

    def publish_many(self, count: int, *, anchor_every: int = 0) -> None:
        """``count`` more versions, an anchor at every multiple of ``anchor_every``."""
        for _ in range(count):
            version = len(self.states)
            self.publish(anchor=bool(anchor_every) and version % anchor_every == 0)

    def head(self, version: int = -1) -> Envelope:
        """A fresh head for ``version`` (negative: from the end)."""
        version = version % len(self.envelopes)
        return sign_head(self.identity, self.envelopes[version], run_id=RUN_ID, version=version, clock=self.clock)

    def list_manifests(self, first: int, last: int) -> list[Envelope]:
        """As the coordinator would answer."""
        return self.envelopes[first : last + 1]

    def follower(self, *, keep_versions: int = 3) -> CheckpointFollower:
        """A follower of this learner that fetches from its store."""
        return CheckpointFollower(
            self.store.get, self.identity.public_key, RUN_ID, self.layout, manifests=self.list_manifests,
            skips=self.store.announced, state_hash=self.state_hash, keep_versions=keep_versions, threads=1,
        )
