"""Hostile stores over real sockets, seen from the follower: refused by name, and the live weights as before."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from protocol.errors import AssayError
from protocol.weights.cache import ChunkCache
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import copy_state
from protocol.weights.pool import SourcePool
from protocol.weights.sources import HttpSource
from tests.fakes.checkpoints import LAYOUT, LEARNER, RUN_ID, FakeLearner, same_bits
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
        pool = SourcePool([source], ChunkCache(tmp_path), part_deadline_s=0.3, chunk_deadline_s=1.0)
        follower = CheckpointFollower(pool.fetch, LEARNER.public_key, RUN_ID, LAYOUT, threads=1)
        follower.advance(learner.envelopes[:2])
        before = copy_state(follower.state)
        mirror.mode = mode
        with monkeypatch.context() as patch:
            patch.setattr("protocol.weights.diff.open_chunk", lambda *_: pytest.fail("unverified bytes were decoded"))
            with pytest.raises(AssayError) as caught:
                follower.advance(learner.envelopes[2:])
        assert caught.value.code in (code, "E_NO_SOURCE")
        assert f"the store: {code}" in str(caught.value)
        assert follower.version == 1
        assert same_bits(follower.state, before)
        mirror.mode = "honest"
        assert follower.advance(learner.envelopes[2:]) == 2
        assert same_bits(follower.state, learner.states[2])
