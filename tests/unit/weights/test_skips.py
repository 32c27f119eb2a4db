"""Skips and the cheapest way: fewer bytes than the chain, from relays that nobody trusts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocol import canonical
from protocol.errors import LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import ChunkRef
from protocol.weights.diff import encode_anchor, encode_diff
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout
from protocol.weights.skips import CheckpointSkip, SkipMaker, index_name, read_announcement
from protocol.weights.way import Way
from tests.fakes.checkpoints import RUN_ID, FakeLearner, same_bits
from tests.fakes.store import MemoryStore

RELAY = Identity(hashlib.sha256(b"a relay").digest())
LAYOUT = Layout.of({"a": ("BF16", (60_000,)), "b": ("F32", (500,))})
NEWEST = 44


@pytest.fixture(scope="module")
def published() -> FakeLearner:
    """Versions 0 to 44, the same weights changing again and again, with every skip a relay makes."""
    learner = FakeLearner(layout=LAYOUT, seed=5)
    learner.publish_many(NEWEST + 1)
    maker = SkipMaker(learner.store, RELAY, RUN_ID, LAYOUT)
    for version in range(NEWEST + 1):
        make(learner, maker, version)
    return learner


@pytest.fixture
def learner(published: FakeLearner) -> FakeLearner:
    """The same, with a store and an index that a test may change."""
    copy = FakeLearner(MemoryStore(), layout=LAYOUT)
    store = published.store
    assert isinstance(store, MemoryStore)
    assert isinstance(copy.store, MemoryStore)
    copy.store.objects, copy.store.index = dict(store.objects), dict(store.index)
    copy.clock, copy.states = published.clock, published.states
    copy.manifests, copy.envelopes = published.manifests, published.envelopes
    return copy


def make(learner: FakeLearner, maker: SkipMaker, version: int) -> list[CheckpointSkip]:
    bases = ((learner.manifests[base], learner.states[base]) for base in maker.due(version))
    return maker.make(learner.manifests[version], learner.states[version], bases)


def held_at(learner: FakeLearner, version: int) -> CheckpointFollower:
    follower = learner.follower(keep_versions=4)
    follower.advance(learner.envelopes[: version + 1])
    return follower


class Meter:
    """Counts the bytes a follower fetches."""

    def __init__(self, follower: CheckpointFollower):
        self.bytes, self._fetch = 0, follower._fetch
        follower._fetch = self

    def __call__(self, sha256: str, size: int) -> bytes:
        data = self._fetch(sha256, size)
        self.bytes += len(data)
        return data


def diff_bytes(learner: FakeLearner, first: int, last: int) -> int:
    return sum(ref.size_bytes for manifest in learner.manifests[first : last + 1] for ref in manifest.diff)


def way_of(follower: CheckpointFollower, learner: FakeLearner) -> Way:
    way = follower.way_to(learner.head(), learner.clock.now_ms())
    assert way is not None
    return way


# -- the cheapest way ------------------------------------------------------------------------------------


def test_a_node_that_was_away_for_twenty_versions(learner: FakeLearner) -> None:
    follower = held_at(learner, 24)
    way, meter = way_of(follower, learner), Meter(follower)
    assert [step.kind for step in way.steps] == ["skip", "skip"]
    assert sorted(step.link.version - (step.start or 0) for step in way.steps) == [4, 16]
    assert follower.follow(way)
    assert same_bits(follower.state, learner.states[NEWEST])
    assert meter.bytes == way.nbytes
    assert way.chain_bytes == diff_bytes(learner, 25, NEWEST) > way.nbytes
    assert f"{way.nbytes:,} B in all" in way.describe()


@pytest.mark.parametrize("held", range(NEWEST))
def test_no_way_is_cheaper_than_the_one_taken(learner: FakeLearner, held: int) -> None:
    """Against a plain search over every combination of what was published."""
    follower = held_at(learner, held)
    cheapest = {held: 0}
    for version in range(held + 1, NEWEST + 1):
        ways = [cheapest[version - 1] + diff_bytes(learner, version, version)]
        for skip in read_announcement(learner.store.announced(index_name(learner.manifests[version])), RUN_ID):
            if skip.from_version >= held:
                ways.append(cheapest[skip.from_version] + skip.nbytes)
        cheapest[version] = min(ways)
    anchor = sum(ref.size_bytes for ref in learner.manifests[0].anchor)
    assert way_of(follower, learner).nbytes == cheapest[NEWEST] < anchor + cheapest[NEWEST]


def test_a_new_node_takes_the_anchor_and_skips(learner: FakeLearner) -> None:
    follower = learner.follower()
    way, meter = way_of(follower, learner), Meter(follower)
    assert [step.kind for step in way.steps] == ["anchor", *["skip"] * (len(way.steps) - 1)]
    assert follower.follow(way)
    assert same_bits(follower.state, learner.states[NEWEST])
    assert meter.bytes == way.nbytes < (way.anchor_bytes or 0)


def test_a_dear_catch_up_gives_way_to_an_anchor(learner: FakeLearner) -> None:
    dense = FakeLearner(layout=LAYOUT)
    dense.publish_many(2)
    for _ in range(4):
        dense.publish(density=1.0, any_bits=True)
    dense.publish(anchor=True)
    way = way_of(held_at(dense, 0), dense)
    assert [step.kind for step in way.steps] == ["anchor"]


def test_one_version_asks_for_no_skips(learner: FakeLearner) -> None:
    follower = held_at(learner, NEWEST - 1)
    follower._skips = lambda name: pytest.fail("asked")
    assert follower.catch_up(learner.head(), learner.clock.now_ms())


def test_versions_that_were_skipped_are_at_hand(learner: FakeLearner) -> None:
    """From the nearest older state that an undo log leads to, by the cheapest way; never from the anchor again."""
    follower = held_at(learner, 24)
    way = way_of(follower, learner)
    follower.follow(way)
    middle = way.steps[-1].start or 0
    meter = Meter(follower)
    for version in (42, middle, 43, 24, 33):
        meter.bytes = 0
        assert same_bits(follower.state_at(version), learner.states[version])
        assert follower.manifest_of(version) == learner.manifests[version]
        start = max(before for before in (24, middle) if before <= version)
        assert meter.bytes <= diff_bytes(learner, start + 1, version)
        assert (meter.bytes == 0) == (version in (24, middle))


# -- relays ----------------------------------------------------------------------------------------------


def test_a_second_relay_adds_only_what_is_missing(learner: FakeLearner) -> None:
    other = SkipMaker(learner.store, Identity(hashlib.sha256(b"another").digest()), RUN_ID, LAYOUT, lengths=(4, 12))
    assert [skip.from_version for skip in make(learner, other, 40)] == [28]
    found = read_announcement(learner.store.announced(index_name(learner.manifests[40])), RUN_ID)
    assert sorted(skip.from_version for skip in found) == [24, 28, 32, 36]
    assert not make(learner, other, 40)
    assert other.due(41) == []


def lie(learner: FakeLearner, relay: Identity = RELAY, **changes: Any) -> None:
    """Announce a skip from 40 to 44 with fields changed."""
    name = index_name(learner.manifests[44])
    (skip,) = (s for s in read_announcement(learner.store.announced(name), RUN_ID) if s.from_version == 40)
    forged = CheckpointSkip.model_validate({**skip.model_dump(), **changes}).sign(relay)
    learner.store.announce(name, canonical.encode({"format": "assay.skips.v1", "skips": [forged.to_dict()]}))


def stored(learner: FakeLearner, chunks: list[bytes], output: int = 2**20) -> list[dict[str, object]]:
    return [
        ChunkRef(sha256=learner.store.put(c), size_bytes=len(c), max_output_bytes=output).model_dump() for c in chunks
    ]


def flipped(chunk: bytes) -> bytes:
    """One bit of the last stream."""
    return chunk[:-1] + bytes([chunk[-1] ^ 1])


Lie = Callable[[FakeLearner], None]
LIES: dict[str, Lie] = {
    "another base root": lambda learner: lie(learner, base_root="00" * 32),
    "another new root": lambda learner: lie(learner, state_root="00" * 32),
    "another run": lambda learner: lie(learner, run_id="00" * 16),
    "another layout": lambda learner: lie(learner, layout_sha256="00" * 32),
    "backwards": lambda learner: lie(learner, from_version=44),
    "from the future": lambda learner: lie(learner, to_version=99),
    "somebody else's signature": lambda learner: lie(learner, Identity(bytes(32))),
    "no cheaper than the diffs": lambda learner: lie(learner, chunks=stored(
        learner, encode_anchor(LAYOUT, learner.states[44])
    )),
    "a chunk over the limits": lambda learner: lie(learner, chunks=[
        {"sha256": "00" * 32, "size_bytes": 1, "max_output_bytes": 2**40}
    ]),
    "chunks that are nowhere": lambda learner: lie(learner, chunks=[
        {"sha256": "00" * 32, "size_bytes": 10, "max_output_bytes": 100}
    ]),
    "chunks of another diff": lambda learner: lie(learner, chunks=stored(
        learner, encode_diff(LAYOUT, learner.states[40], learner.states[41])
    )),
    "two diffs for one": lambda learner: lie(learner, chunks=stored(learner, [
        *encode_diff(LAYOUT, learner.states[40], learner.states[41]),
        *encode_diff(LAYOUT, learner.states[41], learner.states[44]),
    ])),
    "a chunk that was cut off": lambda learner: lie(learner, chunks=stored(
        learner, [encode_diff(LAYOUT, learner.states[40], learner.states[44])[0][:-1]]
    )),
    "a chunk with a flipped bit": lambda learner: lie(learner, chunks=stored(
        learner, [flipped(encode_diff(LAYOUT, learner.states[40], learner.states[44])[0])]
    )),
    "an older state under a newer name": lambda learner: lie(learner, chunks=stored(
        learner, encode_diff(LAYOUT, learner.states[40], learner.states[39])
    )),
    "no chunk at all": lambda learner: lie(learner, chunks=stored(learner, [b"not a chunk"])),
    "a bomb": lambda learner: lie(learner, chunks=stored(
        learner, encode_diff(LAYOUT, learner.states[40], learner.states[44]), output=1
    )),
    "junk": lambda learner: learner.store.announce(index_name(learner.manifests[44]), b"\xff{"),
    "another document": lambda learner: learner.store.announce(index_name(learner.manifests[44]), b"{}"),
    "a giant": lambda learner: learner.store.announce(index_name(learner.manifests[44]), bytes(2**20)),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_relay_costs_a_little_and_changes_nothing(learner: FakeLearner, name: str) -> None:
    LIES[name](learner)
    follower = held_at(learner, 40)
    assert follower.catch_up(learner.head(), learner.clock.now_ms())
    assert same_bits(follower.state, learner.states[NEWEST])
    assert follower.version == NEWEST


def test_a_relay_whose_bytes_were_wrong_is_not_believed_again(learner: FakeLearner) -> None:
    LIES["chunks of another diff"](learner)
    follower = held_at(learner, 24)
    assert follower.catch_up(learner.head(), learner.clock.now_ms())
    assert same_bits(follower.state, learner.states[NEWEST])
    assert follower._refused == {RELAY.public_key.hex()}
    again = held_at(learner, 24)
    again._refused = set(follower._refused)
    assert {step.kind for step in way_of(again, learner).steps} == {"diff"}


def test_our_own_damage_is_not_blamed_on_a_relay(learner: FakeLearner) -> None:
    follower = held_at(learner, 40)
    follower.state["a"][0] ^= 1
    with pytest.raises(LocalFault) as caught:
        follower.catch_up(learner.head(), learner.clock.now_ms())
    assert caught.value.code == "E_STATE_DAMAGED"
    assert not follower._refused


@pytest.mark.parametrize("error", [Transient("E_UNREACHABLE", "away"), PeerFault("E_TOO_LARGE", "too much")])
def test_a_place_that_cannot_be_asked_is_asked_once(learner: FakeLearner, error: Exception) -> None:
    asked: list[str] = []

    def find(name: str) -> bytes:
        asked.append(name)
        raise error

    follower = held_at(learner, 4)
    follower._skips = find
    assert follower.catch_up(learner.head(), learner.clock.now_ms())
    assert len(asked) == 1


def test_random_ways(learner: FakeLearner) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        follower, position = learner.follower(keep_versions=int(rng.integers(0, 6))), -1
        while position < NEWEST:
            position = int(rng.integers(position + 1, NEWEST + 1))
            follower.catch_up(learner.head(position), learner.clock.now_ms())
            assert same_bits(follower.state, learner.states[position])
            back = int(rng.integers(max(0, position - 12), position + 1))
            assert same_bits(follower.state_at(back), learner.states[back])
