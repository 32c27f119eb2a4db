"""Where a state is not what its manifest names: the tensors and byte ranges under the leaves that differ.

Spec: ``docs/spec/weights.md``, "Leaf list".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.errors import AssayError
from protocol.messages import CheckpointManifest
from protocol.weights.cache import Fetch, verified_chunks
from protocol.weights.layout import Layout
from protocol.weights.state_root import LEAF_BYTES, damaged_leaves, decode_leaves

logger = logging.getLogger(__name__)

#: Ranges told in words; the rest is counted.
_SPOKEN: Final = 3


@dataclass(frozen=True)
class Damage:
    """Bytes ``start`` to ``end`` of a tensor (row-major, little-endian), among which at least one is wrong.

    Unless the leaf goes on in another tensor: then it is in one of them.
    """

    tensor: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.tensor} bytes {self.start} to {self.end}"


def damages(layout: Layout, expected: Sequence[bytes], got: Sequence[bytes]) -> list[Damage]:
    """What lies under the leaves in which two states of one layout differ, in canonical order."""
    spans, found = list(_spans(damaged_leaves(expected, got))), []
    first = 0
    for entry in layout.entries:
        while first < len(spans) and spans[first][1] <= entry.offset:
            first += 1
        at = first
        while at < len(spans) and spans[at][0] < entry.offset + entry.nbytes:
            start, end = max(spans[at][0], entry.offset), min(spans[at][1], entry.offset + entry.nbytes)
            found.append(Damage(entry.name, start - entry.offset, end - entry.offset))
            at += 1
    return [damage for damage in found if damage.start < damage.end]


def _spans(leaves: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Byte ranges of ascending leaves, neighbours joined."""
    start: int | None = None
    for i, leaf in enumerate(leaves):
        start = leaf if start is None else start
        if i + 1 == len(leaves) or leaves[i + 1] != leaf + 1:
            yield start * LEAF_BYTES, (leaf + 1) * LEAF_BYTES
            start = None


def in_words(found: Sequence[Damage]) -> str:
    """For an error message."""
    more = len(found) - _SPOKEN
    return "; ".join(map(str, found[:_SPOKEN])) + (f"; and {more} more" if more > 0 else "")


def leaves_of(layout: Layout, manifest: CheckpointManifest, fetch: Fetch) -> list[bytes] | None:
    """The leaves of a version's state, verified; None when its manifest names no list.

    Raises:
        PeerFault: ``E_OBJECT_HASH``, ``E_LEAVES``.
        AssayError: the errors of ``fetch``.
    """
    if manifest.leaves is None:
        return None
    (data,) = verified_chunks(fetch, [manifest.leaves])
    return decode_leaves(layout, data, manifest.state_root)[1]


def locate(layout: Layout, manifest: CheckpointManifest, got: Sequence[bytes], fetch: Fetch) -> str:
    """Where a state with the leaves ``got`` is not that of ``manifest``, in words; empty when nobody can tell."""
    try:
        expected = leaves_of(layout, manifest, fetch)
    except AssayError as error:
        logger.info("no leaf list to locate the damage", extra={"version": manifest.version, "code": error.code})
        return ""
    return "" if expected is None else in_words(damages(layout, expected, got))
