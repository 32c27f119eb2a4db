"""The checkpoint manifests of a run that a verifier has checked: signature, run, layout, chain by hash."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.envelope import Envelope
from protocol.errors import PeerFault
from protocol.messages import CheckpointManifest, RunManifest
from protocol.weights.link import E_CHECKPOINT_LAYOUT, E_CHECKPOINT_MIX, Link, check_follows, check_hash
from protocol.weights.state_root import HashId, hash_named


class CheckpointBook:
    """Checked manifests by version, perhaps with gaps. ``verifier.states`` makes their weights."""

    def __init__(self, run: RunManifest):
        self._run = run
        self._links: dict[int, Link] = {}

    @property
    def newest(self) -> int:
        """Newest version in the book; -1 when it is empty."""
        return max(self._links, default=-1)

    @property
    def hash_id(self) -> HashId:
        """The hash function of all its state roots."""
        return hash_named(self._run.model.state_hash)

    def get(self, version: int) -> CheckpointManifest | None:
        """The manifest of a version, None when the book does not have it."""
        link = self._links.get(version)
        return None if link is None else link.manifest

    def envelope(self, version: int) -> Envelope | None:
        """The signed form of a version's manifest, None when the book does not have it."""
        link = self._links.get(version)
        return None if link is None else link.envelope

    def nearest_anchor(self, version: int) -> int | None:
        """Newest anchor from which an unbroken chain of diffs leads to ``version``; None if there is none."""
        for candidate in range(version, -1, -1):
            manifest = self.get(candidate)
            if manifest is None or manifest.anchor:
                return None if manifest is None else candidate
        return None

    def add(self, envelopes: Iterable[Envelope]) -> None:
        """Check manifests and take them in.

        Raises:
            PeerFault: codes of ``Message.open``; ``E_CHECKPOINT_LAYOUT`` for another layout; ``E_CHECKPOINT_HASH`` for
                another hash function; ``E_CHECKPOINT_MIX`` for a second manifest of a version or a parent that is not
                the version before. All are the learner's doing.
        """
        for envelope in envelopes:
            manifest = CheckpointManifest.open(envelope, self._run.roles.learner, run_id=self._run.run_id)
            self._take(Link(manifest, envelope))

    def _take(self, link: Link) -> None:
        expected = self._run.model.layout_sha256
        if link.manifest.layout_sha256 != expected:
            raise PeerFault(
                E_CHECKPOINT_LAYOUT, f"version {link.version} is of another layout", expected=expected,
                got=link.manifest.layout_sha256,
            )
        check_hash(link, self._run.model.state_hash)
        known = self._links.get(link.version)
        if known is not None and known.digest != link.digest:
            raise PeerFault(
                E_CHECKPOINT_MIX, f"two manifests for version {link.version}", expected=known.digest, got=link.digest
            )
        if link.version - 1 in self._links:
            check_follows(self._links[link.version - 1], link)
        if link.version + 1 in self._links:
            check_follows(link, self._links[link.version + 1])
        self._links[link.version] = link
