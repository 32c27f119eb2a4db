"""Merkle trees with the shape and the domain separation of RFC 6962, and a root that also binds the leaf count.

Leaf = SHA-256(0x00 | data), node = SHA-256(0x01 | left | right). A tree of n > 1 leaves splits at the largest power of
two below n, so no leaf is ever doubled. Spec: ``docs/spec/rollout-bundle.md``, "Commitment".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from protocol.errors import PeerFault, code

E_MERKLE_PROOF = code("E_MERKLE_PROOF", "a Merkle proof does not lead to the root")

#: Most siblings a proof may hold: a tree of 2^48 leaves.
MAX_PROOF: Final = 48


def leaf_hash(data: bytes) -> bytes:
    """Hash of a leaf."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Merkle tree hash (RFC 6962, 2.1) over leaf hashes; SHA-256 of nothing for no leaves."""
    if not leaves:
        return hashlib.sha256().digest()
    level = list(leaves)
    while len(level) > 1:
        paired = [node_hash(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def counted_root(leaves: Sequence[bytes]) -> bytes:
    """SHA-256(0x02 | leaf count as uint64 | Merkle root): no two lists of leaves share it, whatever their lengths."""
    return bind_count(merkle_root(leaves), len(leaves))


def bind_count(root: bytes, count: int) -> bytes:
    """The counted root of a tree whose Merkle root and leaf count are known."""
    return hashlib.sha256(b"\x02" + count.to_bytes(8, "little") + root).digest()


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Siblings from the leaf at ``index`` up to the root (RFC 6962, 2.1.1).

    Raises:
        IndexError: there is no such leaf (our own bug).
    """
    if not 0 <= index < len(leaves):
        raise IndexError(f"leaf {index} of {len(leaves)}")
    if len(leaves) == 1:
        return []
    split = _split(len(leaves))
    if index < split:
        return [*inclusion_proof(leaves[:split], index), merkle_root(leaves[split:])]
    return [*inclusion_proof(leaves[split:], index - split), merkle_root(leaves[:split])]


def check_inclusion(leaf: bytes, index: int, count: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that the leaf hash ``leaf`` is number ``index`` of the ``count`` leaves under the Merkle root ``root``.

    Raises:
        PeerFault: ``E_MERKLE_PROOF``.
    """
    if not 0 <= index < count or len(proof) > MAX_PROOF or any(len(sibling) != 32 for sibling in proof):
        raise PeerFault(E_MERKLE_PROOF, "malformed proof", expected=f"an index below {count}, 32-byte siblings",
                        got=f"index {index}, {len(proof)} siblings")
    node, last, used = leaf, count - 1, 0
    while last > 0:
        if index & 1 or index < last:
            if used == len(proof):
                raise PeerFault(E_MERKLE_PROOF, "proof too short", expected="more siblings", got=len(proof))
            node = node_hash(proof[used], node) if index & 1 else node_hash(node, proof[used])
            used += 1
        index, last = index >> 1, last >> 1
    if used != len(proof) or node != root:
        raise PeerFault(E_MERKLE_PROOF, "proof leads elsewhere", expected=root.hex(), got=node.hex())


def _split(count: int) -> int:
    """Largest power of two below ``count`` (> 1)."""
    return 1 << ((count - 1).bit_length() - 1)
