"""State root: one hash that names a whole state, with its tensors' names, types and shapes.

A Merkle tree over 1 MiB leaves of the canonical bytes. The leaf list, an object of its own, is enough to find out where
two states differ. Spec: ``docs/spec/weights.md``, "State root".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalFault, PeerFault, code
from protocol.weights.layout import Layout, check_state

E_LEAVES = code("E_LEAVES", "a leaf list is malformed or is not that of the state root")
E_HASH_MISSING = code("E_HASH_MISSING", "the package of a hash function is not installed")
E_HASH_UNKNOWN = code("E_HASH_UNKNOWN", "a manifest names a hash function that this release does not know")

#: Bytes of state under one leaf. Changing it changes every state root.
LEAF_BYTES: Final = 2**20
#: Fewest leaves for which a second thread pays.
_THREADED_LEAVES: Final = 8
_MAGIC: Final = b"ASWL"
_HEADER: Final = struct.Struct("<4sBB32sQI")
_HASH_BYTES: Final = 32


class HashId(IntEnum):
    """The hash function of a tree; a run's manifest names one for all its checkpoints."""

    SHA256 = 0
    BLAKE3 = 1


#: Hash functions by their ids in manifests.
HASH_NAMES: Final = {"sha-256": HashId.SHA256, "blake3": HashId.BLAKE3}


def hash_named(name: str) -> HashId:
    """The hash function that a manifest names.

    Raises:
        PeerFault: ``E_HASH_UNKNOWN``.
    """
    if name not in HASH_NAMES:
        raise PeerFault(
            E_HASH_UNKNOWN, "state roots by an unknown hash function", expected=" or ".join(HASH_NAMES), got=name,
            hint="a newer release may know it",
        )
    return HASH_NAMES[name]


def usable_hash(name: str) -> HashId:
    """The same, once it is known to be installed here.

    Raises:
        PeerFault: ``E_HASH_UNKNOWN``. LocalFault: ``E_HASH_MISSING``.
    """
    hash_id = hash_named(name)
    _new(hash_id, b"")
    return hash_id


class _Digest(Protocol):
    def update(self, data: Any, /) -> object: ...
    def digest(self) -> bytes: ...


def state_root(
    layout: Layout, state: Mapping[str, NDArray[Any]], *, threads: int = 2, hash_id: HashId = HashId.SHA256
) -> str:
    """Hex state root of ``state``.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout; ``E_HASH_MISSING``.
    """
    return root_of(layout, leaf_list(layout, state, threads=threads, hash_id=hash_id), hash_id)


def leaf_list(
    layout: Layout, state: Mapping[str, NDArray[Any]], *, threads: int = 2, hash_id: HashId = HashId.SHA256
) -> list[bytes]:
    """The 32-byte hashes of all leaves, in order; computed on several threads.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout; ``E_HASH_MISSING``.
    """
    check_state(layout, state)
    start = _tag(0, hash_id)

    def leaf(buffers: list[memoryview]) -> bytes:
        digest = _new(hash_id, start)
        for buffer in buffers:
            digest.update(buffer)
        return digest.digest()

    leaves = list(_leaf_buffers(layout, state))
    if threads == 1 or len(leaves) < _THREADED_LEAVES:
        return [leaf(buffers) for buffers in leaves]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(leaf, leaves))


def root_of(layout: Layout, leaves: Sequence[bytes], hash_id: HashId = HashId.SHA256) -> str:
    """Hex state root from the leaf list; binds the layout and the length of the state."""
    top = _merkle(list(leaves), hash_id)
    return _new(
        hash_id, _tag(2, hash_id) + bytes.fromhex(layout.sha256) + layout.nbytes.to_bytes(8, "little") + top
    ).digest().hex()


def damaged_leaves(expected: Sequence[bytes], got: Sequence[bytes]) -> list[int]:
    """Indices of the 1 MiB leaves in which two states of one layout differ."""
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]


def leaf_list_bytes(layout: Layout) -> int:
    """Size of a leaf list of this layout."""
    return _HEADER.size + _HASH_BYTES * _leaf_count(layout)


def encode_leaves(layout: Layout, leaves: Sequence[bytes], hash_id: HashId = HashId.SHA256) -> bytes:
    """A leaf list as an object to store or send."""
    return b"".join([_leaf_header(layout, hash_id), *leaves])


def decode_leaves(layout: Layout, data: bytes, root: str) -> tuple[HashId, list[bytes]]:
    """The hash function and the leaves of ``data``, which are those of the state named ``root``.

    Raises:
        PeerFault: ``E_LEAVES``. LocalFault: ``E_HASH_MISSING``.
    """
    head, body = data[: _HEADER.size], data[_HEADER.size :]
    hash_id = next((known for known in HashId if head == _leaf_header(layout, known)), None)
    if hash_id is None:
        expected = _leaf_header(layout, HashId.SHA256).hex()
        raise PeerFault(E_LEAVES, "not a leaf list of this layout", expected=expected, got=head.hex())
    size = _HASH_BYTES * _leaf_count(layout)
    if len(body) != size:
        raise PeerFault(E_LEAVES, "leaf list of the wrong length", expected=f"{size} bytes", got=len(body))
    leaves = [body[i : i + _HASH_BYTES] for i in range(0, len(body), _HASH_BYTES)]
    if (got := root_of(layout, leaves, hash_id)) != root:
        raise PeerFault(E_LEAVES, "leaf list of another state", expected=root, got=got)
    return hash_id, leaves


def _leaf_count(layout: Layout) -> int:
    return -(-layout.nbytes // LEAF_BYTES)


def _leaf_header(layout: Layout, hash_id: HashId) -> bytes:
    return _HEADER.pack(_MAGIC, 1, hash_id, bytes.fromhex(layout.sha256), layout.nbytes, _leaf_count(layout))


def _tag(kind: int, hash_id: HashId) -> bytes:
    """What a leaf (0), node (1) or root (2) begins with."""
    return bytes([kind]) + (b"assay.state.v1" if hash_id is HashId.SHA256 else b"assay.state.b3")


def _new(hash_id: HashId, data: bytes) -> _Digest:
    if hash_id is HashId.SHA256:
        return hashlib.sha256(data)
    try:
        import blake3
    except ImportError:
        raise LocalFault(E_HASH_MISSING, "package blake3 is missing", hint="pip install 'assay-rl[blake3]'") from None
    digest: _Digest = blake3.blake3(data)
    return digest


def _merkle(level: list[bytes], hash_id: HashId) -> bytes:
    """Root of the tree whose leaves are ``level``; an odd last node moves up unchanged."""
    node = _tag(1, hash_id)
    if not level:
        return _new(hash_id, node).digest()
    while len(level) > 1:
        paired = [_new(hash_id, node + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = paired + level[2 * len(paired) :]
    return level[0]


def _leaf_buffers(layout: Layout, state: Mapping[str, NDArray[Any]]) -> Iterator[list[memoryview]]:
    """For each leaf, views of the parts of tensors that fill it."""
    buffers: list[memoryview] = []
    room = LEAF_BYTES
    for entry in layout.entries:
        if not entry.nbytes:
            continue
        data = state[entry.name].reshape(-1).view(np.uint8).data
        while len(data) >= room:
            yield [*buffers, data[:room]]
            data, buffers, room = data[room:], [], LEAF_BYTES
        if len(data):
            buffers.append(data)
            room -= len(data)
    if buffers:
        yield buffers
