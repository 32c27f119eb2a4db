"""Diffs and anchors: lossless for any bits at any density, and applied as a transaction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalFault
from protocol.messages import ChunkRef
from protocol.weights import chunk as chunk_module
from protocol.weights import diff as diff_module
from protocol.weights.chunk import MAX_CHUNK_BYTES, Kind, Method, chunk_output, decode_chunk
from protocol.weights.diff import apply_patch, decode_anchor, decode_diff, encode_anchor, encode_diff
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.state_root import state_root
from tests.fakes.checkpoints import LAYOUT, changed, random_bits, same_bits


def _round_trip(layout: Layout, old: State, new: State) -> list[bytes]:
    """Diff, apply, compare, revert, compare; the chunks."""
    chunks = encode_diff(layout, old, new)
    refs = [
        ChunkRef(sha256="0" * 64, size_bytes=len(data), max_output_bytes=chunk_output(data)) for data in chunks
    ]
    live = copy_state(old)
    undo = apply_patch(layout, live, decode_diff(layout, chunks, refs))
    assert same_bits(live, new)
    undo.revert(live)
    assert same_bits(live, old)
    return chunks


@pytest.mark.parametrize("density", [0.0, 0.001, 0.01, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("any_bits", [False, True])
def test_round_trip_at_all_densities(rng: np.random.Generator, density: float, any_bits: bool) -> None:
    layout = Layout.of({"a": ("BF16", (301, 67)), "b": ("F32", (5003,)), "c": ("F16", (999,))})
    old = random_bits(layout, rng)
    _round_trip(layout, old, changed(old, rng, density, any_bits=any_bits))


@given(st.data())
def test_round_trip_of_arbitrary_layouts(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    tensors = data.draw(st.dictionaries(
        st.text("abc.", min_size=1, max_size=4), st.tuples(st.sampled_from(["BF16", "F16", "F32"]), shapes),
        min_size=1, max_size=6,
    ))
    layout = Layout.of(tensors)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = random_bits(layout, rng)
    new = changed(old, rng, data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), any_bits=True)
    _round_trip(layout, old, new)
    assert same_bits(decode_anchor(encode_anchor(layout, new), layout), new)


@pytest.mark.parametrize(("old", "new"), [(0x0000, 0x8000), (0x8000, 0x0000), (0x7FC0, 0x7FC1), (0xFFFF, 0x0000)])
def test_sign_flips_of_zero_and_nan_payloads_are_changes(old: int, new: int) -> None:
    layout = Layout.of({"a": ("BF16", (100,))})
    before, after = layout.new_state(), layout.new_state()
    before["a"][50], after["a"][50] = old, new
    assert decode_diff(layout, _round_trip(layout, before, after)).changed == 1


def test_no_change_is_one_tiny_chunk() -> None:
    state = random_bits(LAYOUT, np.random.default_rng(1))
    chunks = encode_diff(LAYOUT, state, copy_state(state))
    assert len(chunks) == 1
    assert len(chunks[0]) < 200
    assert decode_diff(LAYOUT, chunks).changed == 0


def test_an_empty_state_has_a_diff_and_an_anchor() -> None:
    layout = Layout.of({"a": ("BF16", (0,))})
    assert len(_round_trip(layout, layout.new_state(), layout.new_state())) == 1
    assert same_bits(decode_anchor(encode_anchor(layout, layout.new_state()), layout), layout.new_state())


def test_random_chains_end_at_the_right_root() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        live = random_bits(LAYOUT, rng)
        truth = copy_state(live)
        for _ in range(int(rng.integers(1, 8))):
            new = changed(truth, rng, float(rng.random()), any_bits=bool(rng.integers(2)))
            apply_patch(LAYOUT, live, decode_diff(LAYOUT, encode_diff(LAYOUT, truth, new)))
            truth = new
        assert state_root(LAYOUT, live) == state_root(LAYOUT, truth)


def test_large_states_are_cut_into_chunks_that_can_be_fetched_again(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_module, "TARGET_CHUNK_BYTES", 4000)
    monkeypatch.setattr(chunk_module, "TARGET_CHUNK_BYTES", 4000)
    monkeypatch.setattr(diff_module, "ANCHOR_SEGMENT_BYTES", 4096)
    monkeypatch.setattr(diff_module, "MAX_SEGMENT_BYTES", 65_536)
    layout = Layout.of({"a": ("BF16", (70_001,)), "b": ("F32", (9_001,))})
    old = random_bits(layout, rng)
    for density in (0.01, 0.5, 1.0):
        chunks = _round_trip(layout, old, changed(old, rng, density, any_bits=True))
        assert max(map(len, chunks)) < 4400
    anchor = encode_anchor(layout, old)
    assert len(anchor) > 40
    assert same_bits(decode_anchor(anchor, layout), old)


def test_dense_random_change_costs_no_more_than_the_state(rng: np.random.Generator) -> None:
    layout = Layout.of({"a": ("BF16", (3_000_000,))})
    old, new = random_bits(layout, rng), random_bits(layout, rng)
    chunks = encode_diff(layout, old, new)
    assert sum(map(len, chunks)) < layout.nbytes * 1.001
    assert max(map(len, chunks)) < MAX_CHUNK_BYTES
    assert {s.method for data in chunks for s in decode_chunk(data, Kind.DIFF)} == {Method.FULL}


def _gaussian(rng: np.random.Generator, count: int) -> np.ndarray:
    bits = rng.normal(0, 0.02, count).astype("<f4").view("<u4")
    return (bits >> np.uint32(16)).astype("<u2")


def test_sparse_diffs_are_small(rng: np.random.Generator) -> None:
    """At most 1.15 times the order-0 entropy of positions and steps, from 0.3 % density on."""
    layout = Layout.of({"a": ("BF16", (2_000_000,))})
    old = {"a": _gaussian(rng, 2_000_000)}
    for density in (0.003, 0.0125, 0.05):
        new = changed(old, rng, density)
        count = int((old["a"] != new["a"]).sum())
        p = count / 2_000_000
        bound = (2_000_000 * (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) + count) / 8
        size = sum(map(len, _round_trip(layout, old, new)))
        assert size < 1.15 * bound
        assert size < layout.nbytes * 2.2 * density


def test_anchor_packs_the_exponents(rng: np.random.Generator) -> None:
    layout = Layout.of({"a": ("BF16", (1_000_000,))})
    assert sum(map(len, encode_anchor(layout, {"a": _gaussian(rng, 1_000_000)}))) < layout.nbytes / 1.4


class _Fault(Exception):
    pass


@pytest.mark.parametrize("fail_at", range(6))
def test_apply_leaves_no_trace_when_it_fails(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    old = random_bits(LAYOUT, rng)
    patch = decode_diff(LAYOUT, encode_diff(LAYOUT, old, changed(old, rng, 0.5)))
    calls = 0
    original = diff_module._write_segment

    def failing(layout: Layout, state: State, segment: object, undo: object) -> None:
        nonlocal calls
        calls += 1
        original(layout, state, segment, undo)  # type: ignore[arg-type]
        if calls > fail_at:
            raise _Fault

    monkeypatch.setattr(diff_module, "_write_segment", failing)
    live = copy_state(old)
    if fail_at < len(patch.segments):
        with pytest.raises(_Fault):
            apply_patch(LAYOUT, live, patch)
        assert same_bits(live, old)
    else:
        apply_patch(LAYOUT, live, patch)
        assert not same_bits(live, old)


def test_apply_refuses_a_state_of_another_layout(rng: np.random.Generator) -> None:
    old = random_bits(LAYOUT, rng)
    patch = decode_diff(LAYOUT, encode_diff(LAYOUT, old, changed(old, rng, 0.5)))
    with pytest.raises(LocalFault):
        apply_patch(LAYOUT, {**old, "scale": np.zeros(2, "<u4")}, patch)


def test_undo_logs_are_small(rng: np.random.Generator) -> None:
    layout = Layout.of({"a": ("BF16", (100_000,))})
    old = random_bits(layout, rng)
    patch = decode_diff(layout, encode_diff(layout, old, changed(old, rng, 0.01)))
    assert apply_patch(layout, old, patch).nbytes == patch.changed * 6
