"""Hostile stores and tellers over real sockets, seen from the follower: refused by name, the live weights as before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from protocol.client import CoordinatorClient
from protocol.envelope import Envelope
from protocol.errors import AssayError
from protocol.weights.cache import ChunkCache
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import copy_state
from protocol.weights.pool import SourcePool
from protocol.weights.sources import HttpSource
from tests.fakes.checkpoints import LAYOUT, LEARNER, RUN_ID, FakeLearner, same_bits
from tests.fakes.office_server import Office, manifest_of, open_office
from tests.fakes.store import MemoryStore
from tests.fakes.web import Mirror, Mode, serving


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("flipped", "E_OBJECT_HASH"), ("swapped", "E_OBJECT_HASH"), ("truncated", "E_SOURCE_SHORT"),
        ("oversized", "E_TOO_LARGE"), ("bomb", "E_SOURCE_REPLY"), ("other range", "E_SOURCE_REPLY"),
        ("slow body", "E_SOURCE_SLOW"), ("slow headers", "E_SOURCE_SLOW"), ("no reply", "E_SOURCE_SLOW"),
    ],
)
def test_a_hostile_store_is_named_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, code: str
) -> None:
    store = MemoryStore()
    learner = FakeLearner(store)
    learner.publish_many(3)
    with serving(Mirror(store.objects)) as mirror, closing(HttpSource.mirror(mirror.url, name="the store")) as source:
        pool = SourcePool([source], ChunkCache(tmp_path))
        follower = CheckpointFollower(pool.fetch, LEARNER.public_key, RUN_ID, LAYOUT, threads=1)
        follower.advance(learner.envelopes[:2])
        before = copy_state(follower.state)
        mirror.mode = mode
        with monkeypatch.context() as patch:
            patch.setattr("protocol.weights.diff.open_chunk", lambda *_: pytest.fail("unverified bytes were decoded"))
            if code == "E_SOURCE_SLOW":  # no shorter for an honest store, which may be slow on a busy machine
                patch.setattr(pool, "_part_s", 0.3)
                patch.setattr(pool, "_chunk_s", 1.0)
            with pytest.raises(AssayError) as caught:
                follower.advance(learner.envelopes[2:])
        assert caught.value.code in (code, "E_NO_SOURCE")
        assert f"the store: {code}" in str(caught.value)
        assert follower.version == 1
        assert same_bits(follower.state, before)
        mirror.mode = "honest"
        assert follower.advance(learner.envelopes[2:]) == 2
        assert same_bits(follower.state, learner.states[2])


def rollback(learner: FakeLearner) -> None:
    """An older head, signed and fresh."""
    old = learner.head(1)
    learner.head = lambda version=-1: old  # type: ignore[method-assign]


def freeze(learner: FakeLearner) -> None:
    """The head of before, for longer than it is valid."""
    old = learner.head()
    learner.clock.advance(3600)
    learner.head = lambda version=-1: old  # type: ignore[method-assign]


def mix(learner: FakeLearner) -> None:
    """The newest version's manifest of another history that the same key signed."""
    other = FakeLearner(learner.store, seed=7)
    other.publish_many(5)
    served = [*learner.envelopes[:4], other.envelopes[4]]
    learner.list_manifests = lambda first, last: served[first : last + 1]  # type: ignore[method-assign]


def gap(learner: FakeLearner) -> None:
    """Versions left out."""
    learner.list_manifests = lambda first, last: learner.envelopes[last : last + 1]  # type: ignore[method-assign]


def unsigned(learner: FakeLearner) -> None:
    """Somebody else's signature under the right payload."""
    envelope = learner.envelopes[4]
    forged = Envelope(envelope.payload_type, envelope.payload, learner.envelopes[3].signatures)
    learner.list_manifests = lambda first, last: [*learner.envelopes[:4], forged][first : last + 1]  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        (rollback, "E_CHECKPOINT_ROLLBACK"), (freeze, "E_EXPIRED"), (mix, "E_CHECKPOINT_MIX"),
        (gap, "E_CHECKPOINT_GAP"), (unsigned, "E_SIGNATURE"),
    ],
)
def test_a_hostile_teller_moves_nothing(tmp_path: Path, lie: Callable[[FakeLearner], None], code: str) -> None:
    learner = FakeLearner()
    learner.publish_many(3)
    with (
        open_office(Office(learner, manifest_of(learner))) as office,
        CoordinatorClient(office.url, None) as client,
        closing(SourcePool([HttpSource.coordinator(office.url)], ChunkCache(tmp_path))) as pool,
    ):
        follower = CheckpointFollower(
            pool.fetch, LEARNER.public_key, RUN_ID, LAYOUT, manifests=client.checkpoints, threads=1
        )
        assert follower.catch_up(client.head(), learner.clock.now_ms())
        learner.publish_many(2)
        honest = learner.list_manifests, learner.head
        lie(learner)
        before = office.served
        with pytest.raises(AssayError) as caught:
            follower.catch_up(client.head(), learner.clock.now_ms())
        assert caught.value.code == code
        assert (follower.version, office.served) == (2, before)
        assert same_bits(follower.state, learner.states[2])
        learner.list_manifests, learner.head = honest  # type: ignore[method-assign]
        assert follower.catch_up(client.head(), learner.clock.now_ms())
        assert same_bits(follower.state, learner.states[4])
