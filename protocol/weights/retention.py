"""What may be deleted of a run's weights: nothing that a lease, an audit, the staleness bound or a joiner can ask for.

All of them ask for versions from some oldest one on, and a version is reached from the nearest anchor at or below it.
So everything from that anchor on is kept. Spec: ``docs/spec/weights.md``, "Retention".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.messages import CheckpointManifest
from protocol.weights.skips import CheckpointSkip


@dataclass(frozen=True)
class Retention:
    """Objects by hash; ``sizes`` in bytes. Nothing that is kept is among ``delete``."""

    anchor: int | None  #: the anchor from which everything is kept; None: nothing may be deleted
    keep: frozenset[str]
    delete: dict[str, int]

    @property
    def freed_bytes(self) -> int:
        """Bytes that deleting sets free."""
        return sum(self.delete.values())


def retention(
    manifests: Sequence[CheckpointManifest], skips: Iterable[CheckpointSkip], oldest_needed: int,
    protected: Iterable[str] = (),
) -> Retention:
    """What to keep so that every version from ``oldest_needed`` on can be had, in any order and by anybody.

    ``manifests`` are all of the chain, checked; ``protected`` are hashes of objects that other parts need. Chunks of
    skips that lead to versions before the anchor go with it; those that end at or after it stay.
    """
    anchor = max((m.version for m in manifests if m.anchor and m.version <= oldest_needed), default=None)
    first = 0 if anchor is None else anchor
    keep = set(protected)
    rest: dict[str, int] = {}
    for manifest in manifests:
        rest.update((ref.sha256, ref.size_bytes) for ref in manifest.objects)
        if manifest.version >= first:
            keep.update(ref.sha256 for ref in [*manifest.anchor, *([manifest.leaves] if manifest.leaves else [])])
        if manifest.version > first:
            keep.update(ref.sha256 for ref in manifest.diff)
    for skip in skips:
        rest.update((ref.sha256, ref.size_bytes) for ref in skip.chunks)
        if skip.from_version >= first:
            keep.update(ref.sha256 for ref in skip.chunks)
    delete = {} if anchor is None else {sha256: size for sha256, size in rest.items() if sha256 not in keep}
    return Retention(anchor, frozenset(keep), delete)
