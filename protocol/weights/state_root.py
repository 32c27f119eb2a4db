"""State root: one hash that names a whole state, with its tensors' names, types and shapes.

A Merkle tree over 1 MiB leaves of the canonical bytes; the leaf list is enough to find out where two states differ.
Spec: ``docs/spec/weights.md``, "State root".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.weights.layout import Layout, check_state

#: Bytes of state under one leaf. Changing it changes every state root.
LEAF_BYTES: Final = 2**20
#: Fewest leaves for which a second thread pays.
_THREADED_LEAVES: Final = 8
_LEAF: Final = b"\x00assay.state.v1"
_NODE: Final = b"\x01assay.state.v1"
_ROOT: Final = b"\x02assay.state.v1"


def state_root(layout: Layout, state: Mapping[str, NDArray[Any]], *, threads: int = 2) -> str:
    """Hex state root of ``state``.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout.
    """
    return root_of(layout, leaf_list(layout, state, threads=threads))


def leaf_list(layout: Layout, state: Mapping[str, NDArray[Any]], *, threads: int = 2) -> list[bytes]:
    """The 32-byte hashes of all leaves, in order.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout.
    """
    check_state(layout, state)
    leaves = list(_leaf_buffers(layout, state))
    if threads == 1 or len(leaves) < _THREADED_LEAVES:
        return [_hash_leaf(buffers) for buffers in leaves]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_hash_leaf, leaves))


def root_of(layout: Layout, leaves: Sequence[bytes]) -> str:
    """Hex state root from the leaf list; binds the layout and the length of the state."""
    return hashlib.sha256(
        _ROOT + bytes.fromhex(layout.sha256) + layout.nbytes.to_bytes(8, "little") + _merkle(list(leaves))
    ).hexdigest()


def damaged_leaves(expected: Sequence[bytes], got: Sequence[bytes]) -> list[int]:
    """Indices of the 1 MiB leaves in which two states of one layout differ."""
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]


def _merkle(level: list[bytes]) -> bytes:
    """Root of the tree whose leaves are ``level``; an odd last node moves up unchanged."""
    if not level:
        return hashlib.sha256(_NODE).digest()
    while len(level) > 1:
        paired = [hashlib.sha256(_NODE + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = paired + level[2 * len(paired) :]
    return level[0]


def _hash_leaf(buffers: list[memoryview]) -> bytes:
    digest = hashlib.sha256(_LEAF)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


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
