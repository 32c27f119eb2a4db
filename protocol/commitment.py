"""What a node commits to: the Merkle root over the rollouts of a lease.

Leaves hold 32 tokens each, so that any position can be shown to anybody with one chunk and a short proof.
Spec: ``docs/spec/rollout-bundle.md``, "Commitment".
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.head import offsets
from protocol.merkle import counted_root, leaf_hash
from protocol.rollout import Bundle, Rollout

#: Tokens per Merkle leaf. Part of every commitment: changing it changes every root.
CHUNK_TOKENS: Final = 32


def rollout_leaves(rollout: Rollout, unit: bytes) -> list[bytes]:
    """Leaf hashes of a rollout: its frame (sample, finish, length, segments), then chunks of 32 tokens.

    Args:
        unit: what the rollout belongs to; every leaf is bound to it.
    """
    starts = np.append(offsets(rollout), len(rollout.head_ids))
    leaves = [leaf_hash(unit + (0).to_bytes(4, "little") + _frame_bytes(rollout))]
    for index, first in enumerate(range(0, len(rollout), CHUNK_TOKENS), start=1):
        last = min(first + CHUNK_TOKENS, len(rollout))
        chunk = _chunk_bytes(rollout, first, last, int(starts[first]), int(starts[last]))
        leaves.append(leaf_hash(unit + index.to_bytes(4, "little") + chunk))
    return leaves


def rollout_root(rollout: Rollout, unit: bytes) -> bytes:
    """32-byte counted Merkle root of ``rollout_leaves``."""
    return counted_root(rollout_leaves(rollout, unit))


def bundle_root(bundle: Bundle, lease_sha256: str) -> str:
    """Hex root that a commitment names: the counted Merkle root over the roots of the rollouts, in their order.

    Args:
        lease_sha256: digest of the lease's payload. A rollout's unit is this digest and its sample index.
    """
    lease = bytes.fromhex(lease_sha256)
    units = [lease + rollout.sample.to_bytes(4, "little") for rollout in bundle.rollouts]
    roots = [rollout_root(rollout, unit) for rollout, unit in zip(bundle.rollouts, units, strict=True)]
    return counted_root([leaf_hash(root) for root in roots]).hex()


def _frame_bytes(rollout: Rollout) -> bytes:
    parts = [
        rollout.sample.to_bytes(4, "little"), len(rollout).to_bytes(4, "little"), bytes([rollout.finish]),
        len(rollout.segments).to_bytes(4, "little"),
    ]
    for segment in rollout.segments:
        parts += [segment.start.to_bytes(4, "little"), segment.version.to_bytes(8, "little"), bytes([segment.mode])]
    return b"".join(parts)


def _chunk_bytes(rollout: Rollout, first: int, last: int, start: int, end: int) -> bytes:
    """Number of tokens, then columns of tokens ``first`` to ``last``, whose head entries are ``start`` to ``end``."""
    columns: list[tuple[NDArray[Any], str]] = [
        (rollout.tokens[first:last], "<u4"), (rollout.token_codes[first:last], "<u2"),
        (rollout.tail_codes[first:last], "<u2"), (rollout.head_lengths[first:last], "u1"),
        (rollout.head_ids[start:end], "<u4"), (rollout.head_codes[start:end], "<u2"),
    ]
    if rollout.routes is not None:
        columns.append((rollout.routes[first:last], "u1"))
    return bytes([last - first]) + b"".join(column.astype(dtype, copy=False).tobytes() for column, dtype in columns)
