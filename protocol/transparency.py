"""Proofs over an append-only log: the Merkle tree of RFC 6962, section 2.1, with the checks of RFC 9162, section 2.1.

Pure functions. Whoever *keeps* a log hands in a :class:`Subtrees`, which looks up the hash of a complete subtree, so
that a root or a proof over n entries costs few look-ups (tens, for millions of entries) and no entry is hashed twice.
Whoever *checks* one needs a proof and two heads, or a :class:`Peaks` when it reads all entries.
Spec: ``docs/spec/log.md``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, Protocol

from protocol.errors import PeerFault, code
from protocol.merkle import check_inclusion, node_hash

E_LOG_INCLUSION = code("E_LOG_INCLUSION", "a proof does not show that an entry is in the log")
E_LOG_CONSISTENCY = code("E_LOG_CONSISTENCY", "a proof does not show that the log only grew from one head to the next")
E_LOG_ROLLBACK = code("E_LOG_ROLLBACK", "a log head is smaller than one that was signed before")
E_LOG_FORK = code("E_LOG_FORK", "two histories of one log: what was signed before is not part of what is shown now")

#: Most entries a log may have; bounds every loop here to 48 rounds.
MAX_SIZE: Final = 2**48
#: Root of a log without entries.
EMPTY_ROOT: Final = hashlib.sha256().digest()


class Subtrees(Protocol):
    """Looks up the hash of a complete subtree: of entries ``index * 2**level`` up to ``(index + 1) * 2**level``."""

    def __call__(self, level: int, index: int) -> bytes:
        """The hash, 32 bytes. Only subtrees that lie within the log are asked for."""
        ...


def complete(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """(level, index) of the largest complete subtrees that tile entries ``begin`` to ``end``, left to right."""
    while begin < end:
        aligned = (begin & -begin).bit_length() - 1 if begin else end.bit_length()
        level = min(aligned, (end - begin).bit_length() - 1)
        yield level, begin >> level
        begin += 1 << level


def root(subtree: Subtrees, size: int) -> bytes:
    """Root over the first ``size`` entries."""
    return _range_hash(subtree, 0, size) if size else EMPTY_ROOT


def grown(subtree: Subtrees, size: int, leaf: bytes) -> list[tuple[int, int, bytes]]:
    """(level, index, hash) of the subtrees that become complete when the leaf hash ``leaf`` follows ``size`` entries.

    The leaf itself is the first. Over a log's life there are two per entry.
    """
    added = [(0, size, leaf)]
    level, index = 0, size
    while index & 1:
        leaf = node_hash(subtree(level, index - 1), leaf)
        level, index = level + 1, index >> 1
        added.append((level, index, leaf))
    return added


def inclusion_proof(subtree: Subtrees, index: int, size: int) -> list[bytes]:
    """Siblings of entry ``index`` up to the root over ``size`` entries (RFC 9162, 2.1.3.1).

    Raises:
        IndexError: there is no such entry (our own bug).
    """
    if not 0 <= index < size <= MAX_SIZE:
        raise IndexError(f"entry {index} of {size}")
    begin, end, proof = 0, size, []
    while end - begin > 1:
        middle = begin + _split(end - begin)
        if index < middle:
            proof.append(_range_hash(subtree, middle, end))
            end = middle
        else:
            proof.append(_range_hash(subtree, begin, middle))
            begin = middle
    return proof[::-1]


def consistency_proof(subtree: Subtrees, old: int, new: int) -> list[bytes]:
    """Hashes that lead from the root over ``old`` entries to the root over ``new`` (RFC 9162, 2.1.4.1).

    Raises:
        IndexError: ``old`` is more than ``new`` (our own bug).
    """
    if not 0 <= old <= new <= MAX_SIZE:
        raise IndexError(f"{old} of {new} entries")
    if old in (0, new):
        return []
    begin, end, proof = 0, new, []
    while old < end:
        middle = begin + _split(end - begin)
        if old <= middle:
            proof.append(_range_hash(subtree, middle, end))
            end = middle
        else:
            proof.append(_range_hash(subtree, begin, middle))
            begin = middle
    if begin:  # otherwise the node both roots have in common is the old root, which the checker knows
        proof.append(_range_hash(subtree, begin, end))
    return proof[::-1]


def check_entry(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that the leaf hash ``leaf`` is entry ``index`` of the log of ``size`` entries (RFC 9162, 2.1.3.2).

    Raises:
        PeerFault: ``E_LOG_INCLUSION``.
    """
    try:
        check_inclusion(leaf, index, size, proof, root)
    except PeerFault as error:
        raise PeerFault(
            E_LOG_INCLUSION, f"entry {index} is not shown to be in the log", expected=error.expected, got=error.got
        ) from None


def check_consistency(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Check that the log of ``new`` entries begins with the log of ``old`` entries (RFC 9162, 2.1.4.2).

    Raises:
        PeerFault: ``E_LOG_ROLLBACK`` when there are fewer than before, ``E_LOG_FORK`` when there are as many under
            another root, else ``E_LOG_CONSISTENCY``.
    """
    if not 0 <= old <= MAX_SIZE or not 0 <= new <= MAX_SIZE or any(len(node) != 32 for node in proof):
        raise _inconsistent("sizes below 2^48, 32-byte hashes", f"{old} and {new} entries, {len(proof)} hashes")
    if new < old:
        raise PeerFault(E_LOG_ROLLBACK, "the log became shorter", expected=f"at least {old} entries", got=new)
    if new == old and old_root != new_root:
        raise PeerFault(E_LOG_FORK, f"two roots over {old} entries", expected=old_root.hex(), got=new_root.hex())
    if old == 0 and old_root != EMPTY_ROOT:
        raise _inconsistent(f"the root of no entries, {EMPTY_ROOT.hex()}", old_root.hex())
    if old in (0, new):
        if proof:
            raise _inconsistent("no hashes", len(proof))
        return
    path = list(proof) if old & (old - 1) else [old_root, *proof]
    if not path:
        raise _inconsistent("at least one hash", "none")
    _climb(path, old, new, old_root, new_root)


def _climb(path: list[bytes], old: int, new: int, old_root: bytes, new_root: bytes) -> None:
    """Recompute both roots from the node they have in common, steps 3 to 7 of RFC 9162, 2.1.4.2."""
    first, second = old - 1, new - 1
    while first & 1:
        first, second = first >> 1, second >> 1
    old_node = new_node = path[0]
    for sibling in path[1:]:
        if second == 0:
            raise _inconsistent("fewer hashes", len(path))
        if first & 1 or first == second:
            old_node, new_node = node_hash(sibling, old_node), node_hash(sibling, new_node)
            while first and not first & 1:
                first, second = first >> 1, second >> 1
        else:
            new_node = node_hash(new_node, sibling)
        first, second = first >> 1, second >> 1
    if second:
        raise _inconsistent("more hashes", len(path))
    if old_node != old_root:
        raise _inconsistent(f"a proof from {old_root.hex()}", old_node.hex())
    if new_node != new_root:
        raise _inconsistent(f"a proof to {new_root.hex()}", new_node.hex())


@dataclass
class Peaks:
    """The root of a log that is read entry by entry, in O(log n) memory: the complete subtrees at its right edge."""

    size: int = 0
    _nodes: list[bytes] = field(default_factory=list)  #: hash per set bit of ``size``, largest subtree first

    def append(self, leaf: bytes) -> None:
        """Add a leaf hash."""
        carry = self.size
        while carry & 1:
            leaf = node_hash(self._nodes.pop(), leaf)
            carry >>= 1
        self._nodes.append(leaf)
        self.size += 1

    @property
    def root(self) -> bytes:
        """Root over all entries so far."""
        return _fold(self._nodes) if self._nodes else EMPTY_ROOT


def _range_hash(subtree: Subtrees, begin: int, end: int) -> bytes:
    return _fold([subtree(level, index) for level, index in complete(begin, end)])


def _fold(nodes: Sequence[bytes]) -> bytes:
    """Hash over subtrees of falling size: the right edge of the tree is bound from the right."""
    return reduce(lambda right, left: node_hash(left, right), reversed(nodes))


def _split(count: int) -> int:
    """Largest power of two below ``count`` (> 1)."""
    return 1 << ((count - 1).bit_length() - 1)


def _inconsistent(expected: str, got: object) -> PeerFault:
    return PeerFault(E_LOG_CONSISTENCY, "the log is not shown to have only grown", expected=expected, got=got)
