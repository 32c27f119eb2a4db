"""The chain of checkpoints: publishing versions, signing heads, and following both.

A version is a signed manifest that names its parent by hash, the state it makes by root, and its chunks by hash.
Spec: ``docs/spec/weights.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.errors import LocalFault, code
from protocol.identity import Identity
from protocol.messages import CheckpointHead, CheckpointManifest, ChunkRef
from protocol.store import Store
from protocol.weights.bound import diff_bound
from protocol.weights.chunk import MAX_CHUNK_BYTES, chunk_output
from protocol.weights.diff import encode_anchor, encode_diff
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout, State
from protocol.weights.link import open_manifest
from protocol.weights.state_root import (
    HashId,
    encode_leaves,
    hash_named,
    leaf_list,
    leaf_list_bytes,
    root_of,
    state_root,
)

__all__ = ["CheckpointFollower", "PublishedVersion", "open_manifest", "publish", "sign_head"]

E_PUBLISH = code("E_PUBLISH", "a version cannot be published: its base is not the state that was published before it")

#: How long a head is valid unless told otherwise, in milliseconds. A reader notices a freeze after this long.
HEAD_TTL_MS: Final = 10 * 60_000


@dataclass(frozen=True)
class PublishedVersion:
    """What :func:`publish` wrote. Sizes in bytes, as stored."""

    envelope: Envelope
    manifest: CheckpointManifest
    object_sha256: str  #: where the envelope's bytes are in the store
    diff_bytes: int
    anchor_bytes: int
    full_bytes: int  #: length of the canonical state, for comparison
    bound_bytes: float  #: entropy of the change, given the old exponents (protocol.weights.bound); 0 for none

    @property
    def ratio_to_bound(self) -> float | None:
        """Bytes of the diff over its bound; None when nothing changed."""
        return self.diff_bytes / self.bound_bytes if self.bound_bytes else None


def publish(
    store: Store,
    identity: Identity,
    run_id: str,
    layout: Layout,
    previous: tuple[CheckpointManifest, Envelope] | None,
    old: State | None,
    new: State,
    *,
    anchor: bool | Callable[[int], bool],
    clock: Clock,
    beacon: str,
    state_hash: str = "sha-256",
) -> PublishedVersion:
    """Write the chunks of ``new``, then its manifest. Announcing it (a head) is a separate step.

    ``anchor`` says whether to publish a whole anchor, too, or decides when told the bytes of the diff.
    ``old`` is the state that ``previous`` published, never what readers are believed to hold; version 0 has neither
    and is always an anchor. ``state_hash`` is the hash function that the run's manifest names. Idempotent for equal
    arguments, apart from the time in the manifest.

    Raises:
        LocalFault: ``E_PUBLISH`` when ``old`` is not the published state; ``E_STATE``; ``E_HASH_MISSING``; the store's
            errors.
        PeerFault: ``E_HASH_UNKNOWN``.
    """
    hash_id = hash_named(state_hash)
    base_root = _check_base(layout, previous, old, hash_id)
    diff = [] if old is None else _put_all(store, encode_diff(layout, old, new))
    bound = 0.0 if old is None else diff_bound(layout, old, new).exponent
    wanted = previous is None or (anchor(_total(diff)) if callable(anchor) else anchor)
    whole = _put_all(store, encode_anchor(layout, new)) if wanted else []
    leaves = leaf_list(layout, new, hash_id=hash_id)
    listed = _put_leaves(store, layout, leaves, hash_id)
    store.put(layout.to_bytes())
    manifest = CheckpointManifest(
        run_id=run_id,
        version=0 if previous is None else previous[0].version + 1,
        parent_sha256=None if previous is None else previous[1].digest,
        layout_sha256=layout.sha256,
        state_hash=state_hash,
        state_root=root_of(layout, leaves, hash_id),
        base_root=base_root,
        diff=diff,
        anchor=whole,
        leaves=listed,
        beacon=beacon,
        published_at_ms=clock.now_ms(),
    )
    envelope = manifest.sign(identity)
    key = store.put(envelope.to_bytes())
    return PublishedVersion(envelope, manifest, key, _total(diff), _total(whole), layout.nbytes, bound)


def sign_head(
    identity: Identity, manifest: Envelope, *, run_id: str, version: int, clock: Clock, ttl_ms: int = HEAD_TTL_MS
) -> Envelope:
    """Say that ``manifest`` (its envelope) of ``version`` is the newest, for the next ``ttl_ms`` milliseconds."""
    now = clock.now_ms()
    return CheckpointHead(
        run_id=run_id, version=version, manifest_sha256=manifest.digest, issued_at_ms=now, expires_at_ms=now + ttl_ms
    ).sign(identity)


def _check_base(
    layout: Layout, previous: tuple[CheckpointManifest, Envelope] | None, old: State | None, hash_id: HashId
) -> str | None:
    """Root of the state to diff against, which must be the one that was published."""
    if previous is None or old is None:
        if previous is not None or old is not None:
            raise LocalFault(E_PUBLISH, "a previous manifest and its state go together", expected="both or neither")
        return None
    root = state_root(layout, old, hash_id=hash_id)
    if root != previous[0].state_root or layout.sha256 != previous[0].layout_sha256:
        raise LocalFault(
            E_PUBLISH, f"the base is not the published version {previous[0].version}",
            expected=previous[0].state_root, got=root, hint="load the published state again, or publish an anchor",
        )
    return root


def _put_all(store: Store, chunks: Sequence[bytes]) -> list[ChunkRef]:
    return [
        ChunkRef(sha256=store.put(chunk), size_bytes=len(chunk), max_output_bytes=chunk_output(chunk))
        for chunk in chunks
    ]


def _put_leaves(store: Store, layout: Layout, leaves: Sequence[bytes], hash_id: HashId) -> ChunkRef | None:
    """The leaf list as an object; None for a state so large that the list would not fit into a chunk."""
    size = leaf_list_bytes(layout)
    if size > MAX_CHUNK_BYTES:
        return None
    sha256 = store.put(encode_leaves(layout, leaves, hash_id))
    return ChunkRef(sha256=sha256, size_bytes=size, max_output_bytes=size)


def _total(refs: Sequence[ChunkRef]) -> int:
    return sum(ref.size_bytes for ref in refs)
