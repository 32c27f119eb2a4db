"""Following the chain: hostile stores and relays get nowhere, and a failure leaves the state bit-identical."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from protocol.envelope import Envelope
from protocol.errors import AssayError, LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import CheckpointManifest, ChunkRef
from protocol.store import CachedFetch, DirectoryStore
from protocol.weights import live
from protocol.weights.chain import publish, sign_head
from protocol.weights.diff import encode_anchor, encode_diff
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout, copy_state
from protocol.weights.state_root import state_root
from tests.fakes.checkpoints import LAYOUT, LEARNER, RUN_ID, FakeLearner, changed, same_bits

OTHER = Identity(hashlib.sha256(b"somebody else").digest())


@pytest.fixture
def learner() -> FakeLearner:
    """Versions 0 to 6 with anchors at 0 and 4."""
    learner = FakeLearner()
    learner.publish_many(7, anchor_every=4)
    return learner


def at(learner: FakeLearner, version: int, **options: int) -> CheckpointFollower:
    """A follower that holds ``version``, having followed every version."""
    follower = learner.follower(**options)
    for v in range(version + 1):
        follower.advance([learner.envelopes[v]])
    return follower


def refused(code: str, call: Callable[[], object]) -> AssayError:
    with pytest.raises(AssayError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def forged(learner: FakeLearner, version: int, identity: Identity = LEARNER, **changes: object) -> Envelope:
    """The manifest of ``version`` with fields changed, signed by ``identity``."""
    value = {**learner.manifests[version].model_dump(), **changes}
    return CheckpointManifest.model_validate(value).sign(identity)


def put_diff(learner: FakeLearner, old: int, new: int) -> list[ChunkRef]:
    chunks = encode_diff(LAYOUT, learner.states[old], learner.states[new])
    return [ChunkRef(sha256=learner.store.put(c), size_bytes=len(c), max_output_bytes=2**20) for c in chunks]


class _Flaky:
    """A source that fails once, at the n-th object."""

    def __init__(self, fetch: Callable[[str, int], bytes], fail_at: int):
        self._fetch, self._left = fetch, fail_at

    def __call__(self, sha256: str, size: int) -> bytes:
        self._left -= 1
        if self._left == -1:
            raise Transient("E_UNREACHABLE", "gone")
        return self._fetch(sha256, size)


# -- the good way ----------------------------------------------------------------------------------------


def test_following_every_version(learner: FakeLearner) -> None:
    follower = learner.follower()
    assert follower.version is None
    for version, envelope in enumerate(learner.envelopes):
        assert follower.advance([envelope]) == version
        assert same_bits(follower.state, learner.states[version])
    assert follower.manifest == learner.manifests[-1]
    assert follower.manifest_envelope == learner.envelopes[-1]
    assert follower.manifest_of(3) == learner.manifests[3]
    assert follower.manifest_of(99) is None


def test_a_joiner_starts_from_the_newest_anchor(learner: FakeLearner) -> None:
    follower = learner.follower()
    assert follower.catch_up(learner.head(), learner.clock.now_ms())
    assert same_bits(follower.state, learner.states[6])
    assert follower.manifest_of(3) is None  # never needed
    assert not follower.catch_up(learner.head(), learner.clock.now_ms())


def test_catch_up_walks_back_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.weights.link._WINDOW", 3)
    learner = FakeLearner()
    learner.publish_many(12)
    asked: list[tuple[int, int]] = []

    def manifests(first: int, last: int) -> list[Envelope]:
        asked.append((first, last))
        return learner.list_manifests(first, last)

    follower = CheckpointFollower(
        learner.store.get, LEARNER.public_key.hex(), RUN_ID, LAYOUT, manifests=manifests, threads=1
    )
    assert follower.catch_up(learner.head(4), learner.clock.now_ms())
    assert asked == [(2, 4), (0, 1)]
    assert follower.plan(follower.verify_head(learner.head(), learner.clock.now_ms())) == (5, 11)
    assert follower.catch_up(learner.head(), learner.clock.now_ms())
    assert asked[2:] == [(9, 11), (6, 8), (5, 5)]
    assert same_bits(follower.state, learner.states[11])


def test_the_cheaper_way_is_taken() -> None:
    learner = FakeLearner(layout=Layout.of({"a": ("BF16", (4000,))}))
    learner.publish_many(3)
    for _ in range(3):
        learner.publish(density=1.0, any_bits=True)
    learner.publish(anchor=True)
    fetched: list[str] = []

    def fetch(sha256: str, size: int) -> bytes:
        fetched.append(sha256)
        return learner.store.get(sha256)

    follower = CheckpointFollower(fetch, LEARNER.public_key, RUN_ID, learner.layout, threads=1)
    follower.advance(learner.envelopes[:3])
    fetched.clear()
    follower.advance(learner.envelopes[3:])
    assert fetched == [ref.sha256 for ref in learner.manifests[6].anchor]
    assert same_bits(follower.state, learner.states[6])


def test_recent_versions_are_stepped_back_and_older_ones_rebuilt(learner: FakeLearner) -> None:
    follower = at(learner, 6, keep_versions=2)
    fetch, asked = follower._fetch, []
    follower._fetch = lambda sha256, size: (asked.append(sha256), fetch(sha256, size))[1]  # type: ignore[func-returns-value]
    for version in (6, 5, 4):
        assert same_bits(follower.state_at(version), learner.states[version])
    assert not asked
    for version in (3, 0, 2, 1):
        assert same_bits(follower.state_at(version), learner.states[version])
    assert asked
    assert follower.version == 6
    assert same_bits(follower.state, learner.states[6])


def test_an_old_state_stays_what_it_is_while_the_live_one_moves(learner: FakeLearner) -> None:
    follower = at(learner, 4)
    old = follower.state_at(3)
    follower.advance(learner.envelopes[5:])
    assert same_bits(old, learner.states[3])
    assert follower.state_at(3) is old
    assert same_bits(follower.state_at(4), learner.states[4])


def test_state_at_refuses_what_cannot_be(learner: FakeLearner) -> None:
    refused("E_NO_VERSION", lambda: learner.follower().state)
    refused("E_NO_VERSION", lambda: learner.follower().manifest)
    refused("E_NO_VERSION", lambda: learner.follower().state_at(0))
    refused("E_NO_VERSION", lambda: at(learner, 2).state_at(3))
    follower = at(learner, 6, keep_versions=1)
    follower._manifests = None
    refused("E_NO_VERSION", lambda: follower.state_at(1))


def test_rebuilding_never_takes_another_history(learner: FakeLearner) -> None:
    follower = at(learner, 6, keep_versions=0)
    other = FakeLearner(seed=9)
    other.publish_many(3)
    follower._manifests, follower._fetch = other.list_manifests, other.store.get
    refused("E_CHECKPOINT_MIX", lambda: follower.state_at(1))


# -- hostile heads ---------------------------------------------------------------------------------------


def test_heads(learner: FakeLearner) -> None:
    follower = at(learner, 3)
    now = learner.clock.now_ms()
    assert follower.verify_head(learner.head(5), now).version == 5
    refused("E_CHECKPOINT_ROLLBACK", lambda: follower.verify_head(learner.head(4), now))
    refused("E_EXPIRED", lambda: follower.verify_head(learner.head(6), now + 3_600_000))
    refused("E_PAYLOAD_TYPE", lambda: follower.verify_head(learner.envelopes[6], now))
    head = learner.head(6)
    refused("E_SIGNATURE", lambda: follower.verify_head(Envelope(head.payload_type, head.payload + b" ", {}), now))
    by_other = sign_head(OTHER, learner.envelopes[6], run_id=RUN_ID, version=6, clock=learner.clock)
    refused("E_SIGNATURE", lambda: follower.verify_head(by_other, now))
    other_run = sign_head(LEARNER, learner.envelopes[6], run_id="00" * 16, version=6, clock=learner.clock)
    refused("E_WRONG_RUN", lambda: follower.verify_head(other_run, now))
    fork = sign_head(LEARNER, learner.envelopes[4], run_id=RUN_ID, version=5, clock=learner.clock)
    refused("E_CHECKPOINT_MIX", lambda: follower.verify_head(fork, now))
    assert follower.head is not None
    assert follower.head.version == 5


def test_a_head_behind_the_state_is_a_rollback(learner: FakeLearner) -> None:
    follower = at(learner, 6)
    refused("E_CHECKPOINT_ROLLBACK", lambda: follower.verify_head(learner.head(5), learner.clock.now_ms()))


def test_a_manifest_other_than_the_heads_is_refused(learner: FakeLearner) -> None:
    follower = at(learner, 4)
    other = forged(learner, 5, beacon="00" * 32)
    follower.verify_head(learner.head(5), learner.clock.now_ms())
    refused("E_CHECKPOINT_MIX", lambda: follower.advance([other]))
    assert follower.version == 4


# -- hostile manifests -----------------------------------------------------------------------------------


def test_bad_manifests_change_nothing(learner: FakeLearner) -> None:
    follower = at(learner, 3)
    manifests = learner.manifests

    def lying(**about: int) -> list[dict[str, object]]:
        return [{**ref.model_dump(), **about} for ref in manifests[4].diff]

    bad: dict[str, list[list[Envelope]]] = {
        "E_SIGNATURE": [[forged(learner, 4, OTHER)]],
        "E_WRONG_RUN": [[forged(learner, 4, run_id="00" * 16)]],
        "E_CHECKPOINT_LAYOUT": [[forged(learner, 4, layout_sha256="00" * 32)]],
        "E_CHECKPOINT_MANIFEST": [
            [forged(learner, 4, parent_sha256=None)],
            [forged(learner, 4, base_root=None)],
            [forged(learner, 4, diff=[])],
            [forged(learner, 0, anchor=[])],
            [forged(learner, 0, base_root="00" * 32)],
        ],
        "E_CHECKPOINT_GAP": [
            [learner.envelopes[5]],
            [learner.envelopes[4], learner.envelopes[6]],
            [learner.envelopes[5], learner.envelopes[4]],
            [learner.envelopes[4], learner.envelopes[4]],
        ],
        "E_CHECKPOINT_MIX": [
            [forged(learner, 4, parent_sha256="00" * 32)],
            [forged(learner, 4, base_root="00" * 32)],
            [forged(learner, 3, beacon="00" * 32)],
            [learner.envelopes[4], forged(learner, 5, parent_sha256=manifests[3].parent_sha256)],
        ],
        "E_STATE_ROOT": [
            [forged(learner, 4, state_root="00" * 32, anchor=[])],
            [forged(learner, 4, diff=put_diff(learner, 3, 5), anchor=[])],
        ],
        "E_CHUNK": [
            [forged(learner, 4, diff=manifests[4].anchor, anchor=[])],
            [forged(learner, 4, diff=manifests[4].diff * 2, anchor=[])],
        ],
        "E_CHUNK_LIMIT": [
            [forged(learner, 4, diff=lying(max_output_bytes=1), anchor=[])],
            [forged(learner, 4, diff=lying(size_bytes=2**40), anchor=[])],
        ],
        "E_TOO_LARGE": [[forged(learner, 4, diff=lying(size_bytes=1), anchor=[])]],
        "E_OBJECT_HASH": [[forged(learner, 4, diff=lying(size_bytes=10_000), anchor=[])]],
    }
    for code, cases in bad.items():
        for envelopes in cases:
            assert isinstance(refused(code, partial(follower.advance, envelopes)), PeerFault)
            assert follower.version == 3
            assert same_bits(follower.state, learner.states[3])
    follower.advance(learner.envelopes[4:])
    assert same_bits(follower.state, learner.states[6])


def test_no_anchor_and_no_state_is_a_gap(learner: FakeLearner) -> None:
    refused("E_CHECKPOINT_GAP", lambda: learner.follower().advance(learner.envelopes[1:3]))


def test_a_source_of_manifests_that_answers_wrongly(learner: FakeLearner) -> None:
    head, now = learner.head(), learner.clock.now_ms()
    answers: list[list[Envelope]] = [[], learner.envelopes[:3], learner.envelopes[5:], learner.envelopes[:6]]
    for answer in answers:
        follower = CheckpointFollower(
            learner.store.get, LEARNER.public_key, RUN_ID, LAYOUT, manifests=lambda *_, given=answer: given
        )
        refused("E_CHECKPOINT_GAP", partial(follower.catch_up, head, now))
        assert follower.version is None


def test_versions_already_held_are_skipped(learner: FakeLearner) -> None:
    follower = at(learner, 5)
    assert follower.advance([]) == 5
    assert follower.advance(learner.envelopes[2:5]) == 5
    assert follower.advance(learner.envelopes[4:7]) == 6
    assert same_bits(follower.state, learner.states[6])


def test_a_long_sleeper_jumps_over_a_gap_to_an_anchor(learner: FakeLearner) -> None:
    follower = at(learner, 1)
    assert follower.advance(learner.envelopes[4:]) == 6
    assert same_bits(follower.state, learner.states[6])
    assert same_bits(follower.state_at(2), learner.states[2])


# -- hostile sources of chunks, and faults of our own ----------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: b"", lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:-1] + bytes([d[-1] ^ 1]),
        lambda d: bytes(2**24),
    ],
    ids=["nothing", "truncated", "longer", "one bit", "oversized"],
)
@pytest.mark.parametrize("start", [None, 3])
def test_bad_chunks_are_caught_before_they_are_decoded(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes], start: int | None
) -> None:
    follower = learner.follower() if start is None else at(learner, start)
    honest = follower._fetch
    follower._fetch = lambda sha256, size: damage(honest(sha256, size))

    def never(*args: object) -> None:
        raise AssertionError("unverified bytes reached the decoder")

    monkeypatch.setattr("protocol.weights.diff.open_chunk", never)
    refused("E_OBJECT_HASH", lambda: follower.advance(learner.envelopes[4:5]))
    assert follower.version == start
    monkeypatch.undo()
    follower._fetch = honest
    assert follower.advance(learner.envelopes[4:]) == 6


def test_swapped_chunks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.weights.chunk.TARGET_CHUNK_BYTES", 1000)
    learner = FakeLearner()
    learner.publish_many(2)
    diff = learner.manifests[1].diff
    learner.publish(density=1, any_bits=True)
    refs = learner.manifests[2].diff
    assert len(refs) > 1
    follower = at(learner, 1)
    swap = {refs[0].sha256: refs[1].sha256, refs[1].sha256: refs[0].sha256}
    honest = follower._fetch
    follower._fetch = lambda sha256, size: honest(swap.get(sha256, sha256), 2**20)
    refused("E_OBJECT_HASH", lambda: follower.advance(learner.envelopes[2:]))
    follower._fetch = honest
    refused("E_CHUNK", lambda: follower.advance([forged(learner, 2, diff=[refs[1], refs[0], *refs[2:]])]))
    refused("E_CHUNK", lambda: follower.advance([forged(learner, 2, diff=diff[:1] + refs[1:])]))
    assert same_bits(follower.state, learner.states[1])
    assert follower.advance(learner.envelopes[2:]) == 2


def test_a_failing_fetch_at_any_chunk_leaves_the_version_before(learner: FakeLearner) -> None:
    assert all(len(manifest.diff) == 1 for manifest in learner.manifests[1:])
    for fail_at in range(3):
        follower = at(learner, 0)
        follower._fetch = _Flaky(follower._fetch, fail_at)
        refused("E_UNREACHABLE", partial(follower.advance, learner.envelopes[1:4]))
        assert follower.version == fail_at
        assert same_bits(follower.state, learner.states[fail_at])
        follower.advance(learner.envelopes[1:])
        assert same_bits(follower.state, learner.states[6])


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_hashing_rolls_back(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    follower = at(learner, 3)

    def interrupted(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(live, "leaf_list", interrupted)
    with pytest.raises(error):
        follower.advance([forged(learner, 4, anchor=[])])
    monkeypatch.undo()
    assert follower.version == 3
    assert same_bits(follower.state, learner.states[3])


def test_our_own_bit_rot_is_never_blamed_on_the_learner(learner: FakeLearner) -> None:
    follower = at(learner, 4)
    follower.state["embed.weight"][0, 0] ^= 1
    error = refused("E_STATE_DAMAGED", lambda: follower.advance(learner.envelopes[5:]))
    assert isinstance(error, LocalFault)
    assert "embed.weight" in str(error)


def test_a_cache_fetches_again_only_what_is_missing(learner: FakeLearner, tmp_path: Path) -> None:
    asked: list[str] = []

    def fetch(sha256: str) -> bytes:
        asked.append(sha256)
        return b"bad" if len(asked) == 1 else learner.store.get(sha256)

    cache = CachedFetch(DirectoryStore(tmp_path / "cache"), fetch)
    for _ in range(2):
        follower = CheckpointFollower(lambda key, size: cache(key), LEARNER.public_key, RUN_ID, LAYOUT, threads=1)
        for _ in range(2):
            try:
                follower.advance(learner.envelopes)
                break
            except PeerFault as error:
                assert error.code == "E_OBJECT_HASH"  # noqa: PT017
    assert len(asked) == 1 + len(set(asked))
    assert same_bits(follower.state, learner.states[6])


def test_random_chains() -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        learner = FakeLearner(seed=seed)
        for version in range(8):
            learner.publish(
                anchor=version == 0 or rng.random() < 0.2, density=float(rng.random()), any_bits=bool(rng.integers(2))
            )
        follower = learner.follower(keep_versions=int(rng.integers(0, 5)))
        position = -1
        while position < 7:
            position = int(rng.integers(position + 1, 8))
            follower.catch_up(learner.head(position), learner.clock.now_ms())
            assert same_bits(follower.state, learner.states[position])
            back = int(rng.integers(0, position + 1))
            assert same_bits(follower.state_at(back), learner.states[back])


# -- publishing ------------------------------------------------------------------------------------------


def test_the_publisher_diffs_only_against_what_it_published(learner: FakeLearner) -> None:
    drifted = changed(learner.states[-1], np.random.default_rng(0), 0.1)
    previous = (learner.manifests[-1], learner.envelopes[-1])
    for pair, old in ((previous, drifted), (previous, None), (None, drifted)):
        refused("E_PUBLISH", partial(
            publish, learner.store, LEARNER, RUN_ID, LAYOUT, pair, old, drifted, anchor=False, clock=learner.clock,
            beacon="00" * 32,
        ))


def test_a_learner_goes_on_after_a_restart_from_what_a_follower_holds(learner: FakeLearner) -> None:
    follower = at(learner, 6)
    new = changed(follower.state, np.random.default_rng(0), 0.1)
    version = publish(
        learner.store, LEARNER, RUN_ID, LAYOUT, (follower.manifest, follower.manifest_envelope), follower.state, new,
        anchor=False, clock=learner.clock, beacon="00" * 32,
    )
    assert version.manifest.version == 7
    assert version.anchor_bytes == 0 < version.diff_bytes
    assert version.full_bytes == LAYOUT.nbytes
    assert learner.store.get(version.object_sha256) == version.envelope.to_bytes()
    assert Layout.from_bytes(learner.store.get(LAYOUT.sha256)) == LAYOUT
    follower.advance([version.envelope])
    assert state_root(LAYOUT, follower.state) == version.manifest.state_root
    assert same_bits(follower.state, new)


def test_publishing_writes_chunks_before_the_manifest(learner: FakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    put = learner.store.put

    def recorded(data: bytes) -> str:
        order.append(put(data))
        return order[-1]

    monkeypatch.setattr(learner.store, "put", recorded)
    envelope = learner.publish(anchor=True)
    manifest = learner.manifests[-1]
    assert order[:-2] == [ref.sha256 for ref in manifest.objects]
    assert order[-1] == hashlib.sha256(envelope.to_bytes()).hexdigest()


def test_an_anchor_that_is_not_the_state_is_refused(learner: FakeLearner) -> None:
    wrong = copy_state(learner.states[0])
    wrong["scale"] ^= 1
    refs = [
        ChunkRef(sha256=learner.store.put(c), size_bytes=len(c), max_output_bytes=2**20)
        for c in encode_anchor(LAYOUT, wrong)
    ]
    follower = learner.follower()
    refused("E_STATE_ROOT", lambda: follower.advance([forged(learner, 0, anchor=refs)]))
    assert follower.version is None
