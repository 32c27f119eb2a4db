"""Links of the checkpoint chain: rules one manifest, or two in a row, must obey."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from protocol.envelope import Envelope
from protocol.errors import PeerFault, code
from protocol.messages import CheckpointManifest
from protocol.weights.layout import Layout
from protocol.weights.state_root import hash_named, leaf_list_bytes

E_CHECKPOINT_ROLLBACK = code("E_CHECKPOINT_ROLLBACK", "a checkpoint head is older than one already seen")
E_CHECKPOINT_GAP = code("E_CHECKPOINT_GAP", "checkpoint manifests do not follow one another without a gap")
E_CHECKPOINT_MIX = code("E_CHECKPOINT_MIX", "a checkpoint manifest belongs to another chain than the one followed")
E_CHECKPOINT_LAYOUT = code("E_CHECKPOINT_LAYOUT", "a checkpoint is of another layout than the run's")
E_CHECKPOINT_HASH = code("E_CHECKPOINT_HASH", "a checkpoint's roots are by another hash function than the run's")
E_CHECKPOINT_MANIFEST = code("E_CHECKPOINT_MANIFEST", "a checkpoint manifest contradicts itself")

#: Manifests of versions first to last, both included; may return anything, what it returns is checked.
Manifests = Callable[[int, int], Sequence[Envelope]]

#: Manifests asked for at once while walking back.
_WINDOW: Final = 64
#: After so many manifests the walk stops at an anchor in any case.
_MAX_WALK: Final = 1024


@dataclass(frozen=True)
class Link:
    """A manifest that is known to be the learner's, with the envelope it came in."""

    manifest: CheckpointManifest
    envelope: Envelope

    @property
    def version(self) -> int:
        """Version it makes."""
        return self.manifest.version

    @property
    def digest(self) -> str:
        """How the next manifest and the head name it."""
        return self.envelope.digest


def open_manifest(envelope: Envelope, learner_key: bytes | str, run_id: str, layout: Layout) -> Link:
    """A manifest on its own: signature, run, layout, and whether it makes sense.

    Raises:
        PeerFault: ``E_PAYLOAD_TYPE``, ``E_SIGNATURE``, ``E_JSON``, ``E_SCHEMA``, ``E_WRONG_RUN``,
            ``E_CHECKPOINT_LAYOUT``, ``E_HASH_UNKNOWN``, ``E_CHECKPOINT_MANIFEST``.
    """
    manifest = CheckpointManifest.open(envelope, learner_key, run_id=run_id)
    if manifest.layout_sha256 != layout.sha256:
        raise PeerFault(
            E_CHECKPOINT_LAYOUT, f"version {manifest.version} is of another layout", expected=layout.sha256,
            got=manifest.layout_sha256,
        )
    hash_named(manifest.state_hash)
    first = manifest.version == 0
    if first != (manifest.parent_sha256 is None) or first != (manifest.base_root is None) or first == bool(
        manifest.diff
    ):
        raise PeerFault(
            E_CHECKPOINT_MANIFEST, f"version {manifest.version} contradicts itself",
            expected="parent, base root and diff exactly when the version is above 0",
        )
    if first and not manifest.anchor:
        raise PeerFault(E_CHECKPOINT_MANIFEST, "version 0 is not an anchor", expected="anchor chunks")
    if manifest.leaves is not None and manifest.leaves.size_bytes != leaf_list_bytes(layout):
        raise PeerFault(
            E_CHECKPOINT_MANIFEST, f"the leaf list of version {manifest.version} is not of this layout",
            expected=f"{leaf_list_bytes(layout)} bytes", got=manifest.leaves.size_bytes,
        )
    return Link(manifest, envelope)


def check_hash(link: Link, run_hash: str) -> None:
    """Refuse a checkpoint whose roots are by another hash function than the run's manifest names.

    Raises:
        PeerFault: ``E_CHECKPOINT_HASH``.
    """
    if link.manifest.state_hash != run_hash:
        raise PeerFault(
            E_CHECKPOINT_HASH, f"version {link.version} has roots by another hash function than the run",
            expected=run_hash, got=link.manifest.state_hash,
        )


def check_follows(parent: Link, child: Link) -> None:
    """Refuse a ``child`` that is not the next version after ``parent``.

    Raises:
        PeerFault: ``E_CHECKPOINT_GAP``, ``E_CHECKPOINT_MIX`` or ``E_CHECKPOINT_HASH``.
    """
    if child.version != parent.version + 1:
        raise PeerFault(
            E_CHECKPOINT_GAP, "a version is missing or repeated", expected=parent.version + 1, got=child.version
        )
    if child.manifest.parent_sha256 != parent.digest:
        raise PeerFault(
            E_CHECKPOINT_MIX, f"version {child.version} names another parent", expected=parent.digest,
            got=child.manifest.parent_sha256,
        )
    if child.manifest.base_root != parent.manifest.state_root:
        raise PeerFault(
            E_CHECKPOINT_MIX, f"the diff of version {child.version} is for another state",
            expected=parent.manifest.state_root, got=child.manifest.base_root,
        )
    check_hash(child, parent.manifest.state_hash)


def open_chain(
    envelopes: Sequence[Envelope], learner_key: bytes | str, run_id: str, layout: Layout
) -> list[Link]:
    """Manifests in ascending order of version, each the child of the one before.

    Raises:
        PeerFault: as :func:`open_manifest` and :func:`check_follows`.
    """
    links = [open_manifest(envelope, learner_key, run_id, layout) for envelope in envelopes]
    for parent, child in pairwise(links):
        check_follows(parent, child)
    return links


def walk_back(
    manifests: Manifests, first: int, last: int, learner_key: bytes | str, run_id: str, layout: Layout,
    *, past_anchors: bool,
) -> list[Envelope]:
    """Envelopes of versions up to ``last``, from ``first`` or from an anchor after it.

    With ``past_anchors`` the walk goes on to ``first`` behind an anchor, for up to 1024 manifests.

    Raises:
        PeerFault: as :func:`open_chain`; ``E_CHECKPOINT_GAP`` when other manifests come than were asked for.
        AssayError: the errors of ``manifests``.
    """
    envelopes: list[Envelope] = []
    while True:
        low = max(first, last - _WINDOW + 1)
        window = list(manifests(low, last))
        links = open_chain(window, learner_key, run_id, layout)
        if [link.version for link in links] != list(range(low, last + 1)):
            raise PeerFault(
                E_CHECKPOINT_GAP, "not the manifests that were asked for", expected=f"versions {low} to {last}",
                got=", ".join(str(link.version) for link in links)[:80] or "none",
            )
        envelopes = window + envelopes
        enough = not past_anchors or len(envelopes) >= _MAX_WALK
        if low == first or (enough and any(link.manifest.anchor for link in links)):
            return envelopes
        last = low - 1
