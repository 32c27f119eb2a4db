"""Weights of any version, forwards and back, and the ways in which they cannot be had."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.errors import LocalFault, PeerFault
from protocol.messages import (
    AuditPolicy,
    BatchRules,
    Environment,
    ModelSpec,
    Profile,
    Roles,
    RunManifest,
    SamplingRules,
)
from tests.fakes.checkpoints import LAYOUT, LEARNER, RUN_ID, FakeLearner, same_bits
from verifier.checkpoints import CheckpointBook
from verifier.states import Folders, StateRing


def _run(layout_sha256: str = LAYOUT.sha256, state_hash: str = "sha-256") -> RunManifest:
    key = LEARNER.public_key.hex()
    return RunManifest(
        run_id=RUN_ID, name="states", created_at_ms=0, expires_at_ms=2**50,
        model=ModelSpec(name="none", layout_sha256=layout_sha256, files={}, state_hash=state_hash),
        environments=[Environment(name="sort", kind="sort")],
        sampling=SamplingRules(eos_token_ids=[1], vocab_size=64),
        batch=BatchRules(groups_per_batch=1, group_size=2, samples_per_lease=1, max_lag_versions=1),
        audit=AuditPolicy(), profiles=[Profile(name="p", max_mean_kl_nano=1, max_token_kl_micro=1, max_margin_micro=1)],
        roles=Roles(coordinator=key, learner=key, verifiers=[key]),
    )


@pytest.fixture(scope="module")
def learner():
    made = FakeLearner(seed=3)
    made.publish_many(10, anchor_every=4)
    return made


def _book(learner, versions=range(10)) -> CheckpointBook:
    book = CheckpointBook(_run())
    book.add(learner.envelopes[version] for version in versions)
    return book


@pytest.mark.parametrize("kept_undos", [0, 1, 3, 32])
def test_random_access_gives_the_published_bits(learner, kept_undos):
    ring = StateRing(LAYOUT, _book(learner), learner.store.get, kept_undos=kept_undos)
    for version in np.random.default_rng(kept_undos).integers(0, 10, 60):
        assert same_bits(ring.state(int(version)), learner.states[version])


def test_stepping_back_and_forth_fetches_and_decodes_nothing(learner, monkeypatch):
    fetched = []

    def fetch(sha256: str, size: int) -> bytes:
        fetched.append(sha256)
        return learner.store.get(sha256)

    ring = StateRing(LAYOUT, _book(learner), fetch)
    ring.state(4)
    ring.state(9)
    before = len(fetched)
    monkeypatch.setattr("verifier.states.decode_diff", None)
    for version in (8, 9, 8, 5, 7, 9):
        assert same_bits(ring.state(version), learner.states[version])
    assert len(fetched) == before
    assert (ring.moves.loaded, ring.moves.applied, ring.moves.stepped) == (1, 5, 1 + 1 + 1 + 3 + 2 + 2)


def test_a_joiner_begins_at_the_nearest_anchor(learner):
    ring = StateRing(LAYOUT, _book(learner, range(4, 10)), learner.store.get)
    assert same_bits(ring.state(6), learner.states[6])


@pytest.mark.parametrize(("versions", "wanted"), [(range(5, 8), 6), ([0, 1, 3], 3), ([], 0)])
def test_no_way_to_a_version(learner, versions, wanted):
    ring = StateRing(LAYOUT, _book(learner, versions), learner.store.get)
    with pytest.raises(LocalFault, match="E_VERSION_MISSING"):
        ring.state(wanted)


def test_a_version_after_a_gap_is_rebuilt_from_its_own_anchor(learner):
    ring = StateRing(LAYOUT, _book(learner, [0, 1, 8, 9]), learner.store.get)
    assert same_bits(ring.state(1), learner.states[1])
    assert same_bits(ring.state(9), learner.states[9])
    assert same_bits(ring.state(0), learner.states[0])


def test_a_wrong_root_leaves_the_ring_usable(learner):
    book = _book(learner)
    ring = StateRing(LAYOUT, book, learner.store.get)
    ring.state(1)
    manifest = book.get(2)
    lie = manifest.model_copy(update={"state_root": "00" * 32})
    book.get = lambda version: lie if version == 2 else CheckpointBook.get(book, version)
    with pytest.raises(LocalFault, match="E_STATE_ROOT"):
        ring.state(3)
    del book.get
    assert same_bits(ring.state(3), learner.states[3])


def test_a_wrong_state_is_located_by_the_leaf_list():
    learner = FakeLearner(seed=5)
    learner.publish_many(2)
    book = CheckpointBook(_run())
    book.add(learner.envelopes)
    honest = learner.manifests[0]
    manifest = honest.model_copy(update={
        "state_root": learner.manifests[1].state_root, "leaves": learner.manifests[1].leaves,
    })
    book.get = lambda version: manifest
    with pytest.raises(LocalFault, match=r"differing in embed\.weight bytes 0 to \d+"):
        StateRing(LAYOUT, book, learner.store.get).state(0)


def test_roots_by_blake3():
    learner = FakeLearner(seed=6, state_hash="blake3")
    learner.publish_many(5, anchor_every=3)
    book = CheckpointBook(_run(state_hash="blake3"))
    book.add(learner.envelopes)
    ring = StateRing(LAYOUT, book, learner.store.get)
    for version in (4, 1, 3, 0):
        assert same_bits(ring.state(version), learner.states[version])
    assert same_bits(Folders(LAYOUT, book, [learner.states[2]]).state(2), learner.states[2])
    with pytest.raises(PeerFault, match="E_CHECKPOINT_HASH"):
        CheckpointBook(_run()).add(learner.envelopes)


def test_folders_are_found_by_root(learner):
    folders = Folders(LAYOUT, _book(learner), [learner.states[3], learner.states[7]])
    assert same_bits(folders.state(7), learner.states[7])
    assert same_bits(folders.state(3), learner.states[3])
    with pytest.raises(LocalFault, match="E_VERSION_MISSING"):
        folders.state(4)


def test_folders_fall_back_to_a_store(learner):
    book = _book(learner)
    folders = Folders(LAYOUT, book, [learner.states[3]], StateRing(LAYOUT, book, learner.store.get))
    assert same_bits(folders.state(5), learner.states[5])


# -- the book -------------------------------------------------------------------------------------------------


def test_the_book_takes_manifests_in_any_order(learner):
    book = _book(learner, [5, 3, 4, 9])
    assert book.newest == 9
    assert book.get(4).version == 4
    assert book.get(8) is None
    assert book.envelope(3) == learner.envelopes[3]
    assert book.nearest_anchor(3) is None
    assert book.nearest_anchor(5) == 4
    assert _book(learner).nearest_anchor(7) == 4


def test_the_book_refuses_what_does_not_chain(learner):
    other = FakeLearner(seed=4)
    other.publish_many(3)
    book = _book(learner, [0, 1])
    with pytest.raises(PeerFault, match="E_CHECKPOINT_MIX"):
        book.add([other.envelopes[2]])
    with pytest.raises(PeerFault, match="E_CHECKPOINT_MIX"):
        book.add([other.envelopes[1]])
    with pytest.raises(PeerFault, match="E_CHECKPOINT_MIX"):
        _book(learner, [2]).add([other.envelopes[1]])
    assert book.newest == 1


def test_the_book_refuses_another_layout_and_another_key(learner):
    with pytest.raises(PeerFault, match="E_CHECKPOINT_LAYOUT"):
        CheckpointBook(_run("11" * 32)).add(learner.envelopes[:1])
    from tests.adversary.world import identity

    stranger = FakeLearner(identity=identity("stranger"))
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        CheckpointBook(_run()).add([stranger.publish()])
