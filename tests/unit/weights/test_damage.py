"""Where a state is wrong: leaf lists lead to tensors and byte ranges, and errors say so."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import AssayError, LocalFault, PeerFault
from protocol.messages import CheckpointManifest, ChunkRef
from protocol.weights.damage import Damage, damages, in_words
from protocol.weights.diff import encode_anchor
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.state_root import LEAF_BYTES, leaf_list
from tests.fakes.checkpoints import LEARNER, FakeLearner, random_bits, same_bits

#: Six leaves: a fills the first two and four bytes of the third, b goes on to the middle of the sixth.
LAYOUT = Layout.of({
    "a": ("F32", (2**19 + 1,)), "b": ("BF16", (3 * 2**19 + 2**18,)), "c": ("BF16", (0,)), "d": ("BF16", (9,)),
})


def spoilt(state: State, *places: tuple[str, int]) -> State:
    wrong = copy_state(state)
    for name, word in places:
        wrong[name][word] ^= 1
    return wrong


def found(*places: tuple[str, int]) -> list[Damage]:
    state = random_bits(LAYOUT, np.random.default_rng(1))
    return damages(LAYOUT, leaf_list(LAYOUT, state), leaf_list(LAYOUT, spoilt(state, *places)))


def test_damage_is_found_within_one_leaf() -> None:
    assert found() == []
    assert found(("a", 5)) == [Damage("a", 0, LEAF_BYTES)]
    assert found(("a", 5), ("a", 2**18)) == [Damage("a", 0, 2 * LEAF_BYTES)]  # neighbours are told as one
    assert found(("b", 2**20)) == [Damage("b", 2 * LEAF_BYTES - 4, 3 * LEAF_BYTES - 4)]
    end = 3 * LEAF_BYTES + LEAF_BYTES // 2
    assert found(("d", 8)) == [Damage("b", 3 * LEAF_BYTES - 4, end), Damage("d", 0, 18)]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_named_holds_all_that_is_wrong_and_nothing_far_from_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [entry for entry in LAYOUT.entries if entry.nbytes]
    places = []
    for _ in range(int(rng.integers(1, 5))):
        entry = names[int(rng.integers(len(names)))]
        places.append((entry.name, int(rng.integers(entry.nbytes // entry.words.itemsize))))
    told = found(*set(places))
    offsets = {entry.name: entry.offset for entry in LAYOUT.entries}
    sizes = {entry.name: entry.words.itemsize for entry in LAYOUT.entries}
    wrong = [offsets[name] + word * sizes[name] for name, word in places]
    for name, word in places:
        at = word * sizes[name]
        assert any(d.tensor == name and d.start <= at < d.end for d in told)
    for d in told:
        for leaf in {(offsets[d.tensor] + at) // LEAF_BYTES for at in range(d.start, d.end, LEAF_BYTES // 4)}:
            assert any(at // LEAF_BYTES == leaf for at in wrong)


def test_words_name_three_and_count_the_rest() -> None:
    assert in_words([]) == ""
    assert in_words([Damage("a", 0, 8)]) == "a bytes 0 to 8"
    assert in_words([Damage(name, 0, 1) for name in "abcde"]).endswith("c bytes 0 to 1; and 2 more")


def two_versions(state_hash: str = "sha-256") -> FakeLearner:
    learner = FakeLearner(layout=LAYOUT, state_hash=state_hash)
    learner.publish()
    learner.publish(density=1e-4, anchor=True)
    return learner


def wrong_anchor(learner: FakeLearner) -> CheckpointManifest:
    """Version 1 with an anchor of which one word is wrong."""
    chunks = encode_anchor(LAYOUT, spoilt(learner.states[1], ("b", 2**20)))
    refs = [ChunkRef(sha256=learner.store.put(c), size_bytes=len(c), max_output_bytes=2**24) for c in chunks]
    return learner.manifests[1].model_copy(update={"anchor": refs})


@pytest.mark.parametrize("state_hash", ["sha-256", "blake3"])
def test_a_root_that_is_wrong_says_where(state_hash: str) -> None:
    learner = two_versions(state_hash)
    assert all(manifest.leaves is not None and manifest.state_hash == state_hash for manifest in learner.manifests)
    with pytest.raises(PeerFault) as caught:
        learner.follower().advance([wrong_anchor(learner).sign(LEARNER)])
    assert caught.value.code == "E_STATE_ROOT"
    assert f"b bytes {2 * LEAF_BYTES - 4} to {3 * LEAF_BYTES - 4}" in str(caught.value)


@pytest.mark.parametrize("how", ["none named", "gone", "of another state", "other bytes"])
def test_without_a_leaf_list_the_fault_is_the_same_and_the_place_is_not_told(how: str) -> None:
    learner = two_versions()
    bad = wrong_anchor(learner)
    leaves = bad.leaves
    assert leaves is not None
    if how == "none named":
        bad = bad.model_copy(update={"leaves": None})
    elif how == "of another state":
        bad = bad.model_copy(update={"leaves": learner.manifests[0].leaves})
    else:
        learner.store.delete(leaves.sha256)
    follower = learner.follower()
    if how == "other bytes":
        honest = follower._fetch
        follower._fetch = lambda key, size: bytes(size) if key == leaves.sha256 else honest(key, size)
    with pytest.raises(PeerFault) as caught:
        follower.advance([bad.sign(LEARNER)])
    assert caught.value.code == "E_STATE_ROOT"
    assert "bytes" not in caught.value.message


def test_our_own_copy_is_located_in_memory_and_on_disk(tmp_path: Path) -> None:
    learner = two_versions()
    follower = learner.follower()
    follower.advance(learner.envelopes[:1])
    follower.save(tmp_path)
    follower.state["a"][2**18] ^= 1
    fetched: list[str] = []
    honest = follower._fetch
    follower._fetch = lambda key, size: (fetched.append(key), honest(key, size))[1]  # type: ignore[func-returns-value]
    with pytest.raises(LocalFault) as caught:
        follower._live.apply(follower._way(learner.envelopes[1:]).fresh[0], learner.manifests[1].diff, follower._fetch)  # type: ignore[union-attr]
    assert caught.value.code == "E_STATE_DAMAGED"
    assert f"a bytes {LEAF_BYTES} to {2 * LEAF_BYTES}" in str(caught.value)
    (file,) = tmp_path.glob("state-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1  # in d, the last tensor
    file.write_bytes(data)
    with pytest.raises(LocalFault) as caught:
        learner.follower().load(tmp_path)
    assert caught.value.code == "E_STATE_DAMAGED"
    assert "d bytes 0 to 18" in str(caught.value)


def test_a_run_by_blake3_is_followed_saved_and_stepped_back(tmp_path: Path) -> None:
    learner = FakeLearner(state_hash="blake3")
    learner.publish_many(6, anchor_every=4)
    follower = learner.follower()
    for envelope in learner.envelopes[:5]:
        follower.advance([envelope])
    follower.save(tmp_path)
    again = learner.follower()
    assert again.load(tmp_path)
    assert again.catch_up(learner.head(), learner.clock.now_ms())
    assert same_bits(again.state, learner.states[5])
    for version in (4, 2, 0):
        assert same_bits(again.state_at(version), learner.states[version])
    sha = FakeLearner()
    sha.publish_many(6)
    assert not {m.state_root for m in sha.manifests} & {m.state_root for m in learner.manifests}


def test_a_checkpoint_by_another_hash_than_the_runs_is_refused() -> None:
    learner = two_versions("blake3")
    learner.state_hash = "sha-256"  # what the follower is told of the run
    with pytest.raises(PeerFault) as caught:
        learner.follower().advance(learner.envelopes)
    assert caught.value.code == "E_CHECKPOINT_HASH"
    unknown = learner.manifests[0].model_copy(update={"state_hash": "md5"}).sign(LEARNER)
    with pytest.raises(PeerFault) as caught:
        learner.follower().advance([unknown])
    assert (caught.value.code, caught.value.got) == ("E_HASH_UNKNOWN", "md5")
    assert "blake3" in str(caught.value.expected)
    learner.state_hash = "sha-1"
    with pytest.raises(AssayError) as refused:
        learner.publish()
    assert refused.value.code == "E_HASH_UNKNOWN"


def test_a_leaf_list_is_an_object_of_its_own() -> None:
    learner = two_versions()
    for manifest, state in zip(learner.manifests, learner.states, strict=True):
        assert manifest.leaves is not None
        data = learner.store.get(manifest.leaves.sha256)
        assert len(data) == manifest.leaves.size_bytes == 50 + 32 * 6
        assert data[50:] == b"".join(leaf_list(LAYOUT, state))
        assert hashlib.sha256(data).hexdigest() == manifest.leaves.sha256
        assert manifest.leaves in manifest.objects
