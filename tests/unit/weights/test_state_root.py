"""State root: what it binds, and that threads and tensor borders do not matter."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from protocol.errors import LocalFault
from protocol.weights.layout import Layout, copy_state
from protocol.weights.state_root import LEAF_BYTES, damaged_leaves, leaf_list, root_of, state_root
from tests.fakes.checkpoints import LAYOUT, random_bits


def _reference(layout: Layout, data: bytes) -> str:
    """The spec page, written down once more without any of the code under test."""
    level = [
        hashlib.sha256(b"\x00assay.state.v1" + data[i : i + 2**20]).digest() for i in range(0, len(data), 2**20)
    ] or [hashlib.sha256(b"\x01assay.state.v1").digest()]

    def tree(nodes: list[bytes]) -> bytes:
        if len(nodes) == 1:
            return nodes[0]
        half = 1 << (len(nodes) - 1).bit_length() - 1
        return hashlib.sha256(b"\x01assay.state.v1" + tree(nodes[:half]) + tree(nodes[half:])).digest()

    head = b"\x02assay.state.v1" + bytes.fromhex(layout.sha256) + len(data).to_bytes(8, "little")
    return hashlib.sha256(head + tree(level)).hexdigest()


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


def test_a_state_of_another_layout_has_no_root() -> None:
    with pytest.raises(LocalFault):
        state_root(LAYOUT, {})
