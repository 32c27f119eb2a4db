"""What a joiner pays: bytes of the cheapest way from the last anchor to each version after it.

It decides when an anchor is due. Spec: ``docs/spec/weights.md``, "The cheapest way".
"""

from __future__ import annotations

from protocol.messages import CheckpointManifest
from protocol.weights.skips import CheckpointSkip


class CatchUpCost:
    """Follows the chain as it is published, from any anchor on."""

    def __init__(self) -> None:
        self.anchor: int | None = None  #: version of the last anchor; None before the first that was seen
        self._anchor_bytes = 0
        self._cost: dict[int, int] = {}

    def add(self, manifest: CheckpointManifest) -> None:
        """A version was published."""
        if manifest.anchor:
            self.anchor, self._anchor_bytes = manifest.version, sum(ref.size_bytes for ref in manifest.anchor)
            self._cost = {manifest.version: 0}
        elif manifest.version - 1 in self._cost:
            diff = sum(ref.size_bytes for ref in manifest.diff)
            self._cost[manifest.version] = self._cost[manifest.version - 1] + diff

    def add_skip(self, skip: CheckpointSkip) -> None:
        """A skip was announced."""
        if skip.from_version in self._cost and skip.to_version in self._cost:
            self._cost[skip.to_version] = min(
                self._cost[skip.to_version], self._cost[skip.from_version] + skip.nbytes
            )

    def share(self, version: int, diff_bytes: int) -> float | None:
        """Cost of ``version``, reached by a diff of so many bytes, as a share of the last anchor; None if unknown."""
        if version - 1 not in self._cost:
            return None
        return (self._cost[version - 1] + diff_bytes) / self._anchor_bytes
