"""State root: what it binds, and that threads and tensor borders do not matter."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocol.errors import LocalFault, PeerFault
from protocol.weights.layout import Layout, copy_state
from protocol.weights.state_root import (
    LEAF_BYTES,
    HashId,
    damaged_leaves,
    decode_leaves,
    encode_leaves,
    leaf_list,
    root_of,
    state_root,
)
from tests.fakes.checkpoints import LAYOUT, random_bits


def _reference(layout: Layout, data: bytes, new: Callable[[bytes], Any] = hashlib.sha256, tag: bytes = b"v1") -> str:
    """The spec page, written down once more without any of the code under test."""
    level = [
        new(b"\x00assay.state." + tag + data[i : i + 2**20]).digest() for i in range(0, len(data), 2**20)
    ] or [new(b"\x01assay.state." + tag).digest()]

    def tree(nodes: list[bytes]) -> bytes:
        if len(nodes) == 1:
            return nodes[0]
        half = 1 << (len(nodes) - 1).bit_length() - 1
        return new(b"\x01assay.state." + tag + tree(nodes[:half]) + tree(nodes[half:])).digest()

    head = b"\x02assay.state." + tag + bytes.fromhex(layout.sha256) + len(data).to_bytes(8, "little")
    return str(new(head + tree(level)).hexdigest())


@pytest.mark.parametrize("words", [0, 1, 100, 2**19 - 1, 2**19, 2**19 + 1, 3 * 2**19, 5 * 2**19 + 7, 9 * 2**19])
def test_root_follows_the_spec(words: int) -> None:
    layout = Layout.of({"a": ("BF16", (words // 3,)), "b": ("BF16", (words - words // 3,)), "e": ("F32", (0,))})
    state = random_bits(layout, np.random.default_rng(words))
    data = b"".join(state[n].tobytes() for n in ("a", "b"))
    assert state_root(layout, state, threads=1) == state_root(layout, state, threads=3) == _reference(layout, data)
    assert len(leaf_list(layout, state)) == -(-len(data) // LEAF_BYTES)


def test_every_bit_counts() -> None:
    state = random_bits(LAYOUT, np.random.default_rng(3))
    roots = {state_root(LAYOUT, state)}
    for array in state.values():
        words = array.reshape(-1)
        for bit in range(8 * words.itemsize if words.size else 0):
            words[-1] ^= words.dtype.type(1 << bit)
            roots.add(state_root(LAYOUT, state))
            words[-1] ^= words.dtype.type(1 << bit)
    assert len(roots) == 1 + 16 * 4 + 32 * 2


def test_signed_zeros_and_nans_differ() -> None:
    layout = Layout.of({"a": ("BF16", (1,))})
    patterns = [0x0000, 0x8000, 0x7FC0, 0xFFC0, 0x7FC1]
    assert len({state_root(layout, {"a": np.array([p], "<u2")}) for p in patterns}) == len(patterns)


def test_exchanged_tensors_change_the_root() -> None:
    layout = Layout.of({"a": ("BF16", (4,)), "b": ("BF16", (4,))})
    state = random_bits(layout, np.random.default_rng(4))
    assert state_root(layout, state) != state_root(layout, {"a": state["b"], "b": state["a"]})


def test_leaf_list_finds_the_damage() -> None:
    layout = Layout.of({"a": ("F32", (4 * 2**18,))})
    state = random_bits(layout, np.random.default_rng(5))
    before = leaf_list(layout, state)
    damaged = copy_state(state)
    damaged["a"][2**18 + 5] ^= 1
    damaged["a"][3 * 2**18] ^= 1
    after = leaf_list(layout, damaged)
    assert damaged_leaves(before, after) == [1, 3]
    assert root_of(layout, before) == state_root(layout, state) != root_of(layout, after)


def test_blake3_makes_another_tree_of_the_same_shape() -> None:
    blake3 = pytest.importorskip("blake3")
    layout = Layout.of({"a": ("BF16", (5 * 2**19 + 7,))})
    state = random_bits(layout, np.random.default_rng(6))
    expected = _reference(layout, state["a"].tobytes(), blake3.blake3, b"b3")
    assert state_root(layout, state, hash_id=HashId.BLAKE3) == expected != state_root(layout, state)


def test_without_its_package_a_hash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(LocalFault) as caught:
        state_root(LAYOUT, random_bits(LAYOUT, np.random.default_rng(1)), hash_id=HashId.BLAKE3)
    assert caught.value.code == "E_HASH_MISSING"


def test_a_leaf_list_travels() -> None:
    layout = Layout.of({"a": ("F32", (2**18 + 1,)), "b": ("BF16", (2**19,)), "c": ("BF16", (0,)), "d": ("BF16", (9,))})
    state = random_bits(layout, np.random.default_rng(7))
    leaves, root = leaf_list(layout, state), state_root(layout, state)
    data = encode_leaves(layout, leaves)
    assert decode_leaves(layout, data, root) == (HashId.SHA256, leaves)
    state["d"][3] ^= np.uint16(1)
    damaged = damaged_leaves(leaves, leaf_list(layout, state))
    assert damaged == [2]
    others = Layout.of({"a": ("F32", (2**18 + 1,))})
    bad = [(layout, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], root) for at in (0, 4, 5, 6, 40, 46, 60)]
    bad += [(layout, short, root) for short in (data[:-1], data[:20], b"", data + data[-32:])]
    bad += [(others, data, root), (layout, data, "00" * 32)]
    for of, sent, named in bad:
        with pytest.raises((PeerFault, LocalFault)) as caught:
            decode_leaves(of, sent, named)
        assert caught.value.code in {"E_LEAVES", "E_HASH_MISSING"}


def test_a_state_of_another_layout_has_no_root() -> None:
    with pytest.raises(LocalFault):
        state_root(LAYOUT, {})
