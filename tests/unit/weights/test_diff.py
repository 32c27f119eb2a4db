"""Diffs and anchors: lossless for any bits at any density, and applied as a transaction."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalFault
from protocol.messages import ChunkRef
from protocol.weights import chunk as chunk_module
from protocol.weights import diff as diff_module
from protocol.weights import kernels
from protocol.weights.chunk import MAX_CHUNK_BYTES, Kind, Method, chunk_output, decode_chunk
from protocol.weights.coder import Coder
from protocol.weights.diff import apply_patch, decode_anchor, decode_diff, encode_anchor, encode_diff
from protocol.weights.layout import Layout, State, copy_state
from protocol.weights.state_root import state_root
from protocol.weights.steps import fold
from tests.fakes.checkpoints import LAYOUT, changed, random_bits, same_bits
from tests.fakes.waiting import until


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


@pytest.mark.parametrize("method", [Method.GAP, Method.XC])
def test_sampled_pairs_of_all_patterns(rng: np.random.Generator, method: Method) -> None:
    """Every 16-bit pattern before, a random one after; then the other way round, with zeros and NaNs among both."""
    layout = Layout.of({"a": ("BF16", (2**16 + 8,)), "b": ("F32", (2000,))})
    for _ in range(4):
        every = np.concatenate([np.arange(2**16), [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF]])
        other = random_bits(layout, rng)
        other["a"][-8:] = rng.permutation(every[-8:])
        pair = {"a": every.astype("<u2"), "b": random_bits(layout, rng)["b"]}, other
        for old, new in (pair, pair[::-1]):
            decoded = decode_diff(layout, encode_diff(layout, old, new, method=method))
            live = copy_state(old)
            undo = apply_patch(layout, live, decoded)
            assert same_bits(live, new)
            undo.revert(live)
            assert same_bits(live, old)


def test_bytes_do_not_depend_on_threads_or_kernels(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "DIFF_SEGMENT_BYTES", 2**18)
    monkeypatch.setattr(diff_module, "_THREADED_BYTES", 0)
    layout = Layout.of({"a": ("BF16", (300, 1000)), "b": ("F32", (50_001,))})
    old = {"a": _gaussian(rng, 300_000).reshape(300, 1000), "b": random_bits(layout, rng)["b"]}
    for density, any_bits in ((0.01, False), (0.3, True)):
        new = changed(old, rng, density, any_bits=any_bits)
        chunks = encode_diff(layout, old, new)
        assert encode_diff(layout, old, new, entropy=Coder.ZSTD) != chunks
        assert {s.method for data in chunks for s in decode_chunk(data, Kind.DIFF)} >= {Method.XC}
        for threads, compiled in ((1, True), (3, True), (1, False), (3, False)):
            with monkeypatch.context() as patched:
                if not compiled:
                    patched.setattr(kernels, "compiled", lambda: None)
                assert encode_diff(layout, old, new, threads=threads) == chunks
                live = copy_state(old)
                patch = decode_diff(layout, chunks, threads=threads)
                undo = apply_patch(layout, live, patch, threads=threads)
                assert same_bits(live, new)
                undo.revert(live)
                assert same_bits(live, old)


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


def _follow_a_random_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    live = random_bits(LAYOUT, rng)
    truth = copy_state(live)
    for _ in range(int(rng.integers(1, 8))):
        new = changed(truth, rng, float(rng.random()), any_bits=bool(rng.integers(2)))
        apply_patch(LAYOUT, live, decode_diff(LAYOUT, encode_diff(LAYOUT, truth, new, method=_any_method(rng))))
        truth = new
    assert state_root(LAYOUT, live) == state_root(LAYOUT, truth)


def _any_method(rng: np.random.Generator) -> Method | None:
    return [None, Method.GAP, Method.XC][int(rng.integers(3))]


@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_random_chains_end_at_the_right_root(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        _follow_a_random_chain(seed)


def test_large_states_are_cut_into_chunks_that_can_be_fetched_again(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_module, "TARGET_CHUNK_BYTES", 4000)
    monkeypatch.setattr(chunk_module, "TARGET_CHUNK_BYTES", 4000)
    monkeypatch.setattr(diff_module, "ANCHOR_SEGMENT_BYTES", 4096)
    monkeypatch.setattr(diff_module, "DIFF_SEGMENT_BYTES", 65_536)
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


def _bound(differs: np.ndarray, folded: np.ndarray) -> float:
    """Bytes of order-0 entropy: which words change, and by what steps."""
    n, counts = len(differs), np.unique(folded, return_counts=True)[1]
    bits = sum(-c * np.log2(c / len(folded)) for c in counts)
    for part in (len(folded), n - len(folded)):
        bits -= part * np.log2(max(part, 1) / n)
    return float(bits / 8)


def _drifted(rng: np.random.Generator, count: int, step: float) -> tuple[np.ndarray, np.ndarray]:
    """BF16 before and after an optimiser's steps on masters whose rounding position is uniform."""
    words = _gaussian(rng, count).astype("<u4") << np.uint32(16)
    masters = (words | rng.integers(0, 2**16, count, dtype="<u4")).view("<f4")
    moved = (masters + np.float32(step) * rng.choice(np.array([-1, 1], "<f4"), count)).view("<u4")
    return ((masters.view("<u4") >> np.uint32(16)).astype("<u2"), (moved >> np.uint32(16)).astype("<u2"))


def test_sparse_diffs_are_small(rng: np.random.Generator) -> None:
    """GAP against the order-0 entropy of positions and steps, XC against that per exponent."""
    layout = Layout.of({"a": ("BF16", (2_000_000,))})
    for step in (1e-7, 4e-7, 1.6e-6):
        before, after = _drifted(rng, 2_000_000, step)
        differs, exponents = before != after, before >> 7 & 0xFF
        folded = np.zeros_like(before)
        folded[differs] = fold(before[differs], after[differs])
        whole = _bound(differs, folded[differs])
        classes = [exponents == e for e in np.unique(exponents)]
        split = sum(_bound(differs[c], folded[c & differs]) for c in classes)
        sizes = {
            method: sum(map(len, encode_diff(layout, {"a": before}, {"a": after}, method=method)))
            for method in (Method.GAP, Method.XC, None)
        }
        zstd = sum(map(len, encode_diff(layout, {"a": before}, {"a": after}, entropy=Coder.ZSTD)))
        assert sizes[Method.GAP] < 1.15 * whole
        assert sizes[Method.XC] < 1.03 * split + 800  # tables, which larger segments pay once, too
        assert zstd < 1.15 * split
        assert sizes[None] == sizes[Method.XC] < 0.8 * sizes[Method.GAP]


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


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, whatever the test runner made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_leaves_no_trace_either(rng: np.random.Generator, interrupts: None, threads: int) -> None:
    """At random moments, of which some come while kernels write and some while one thread waits for another."""
    layout = Layout.of(dict.fromkeys("abcd", ("BF16", (8 * 2**20,))))
    old = random_bits(layout, rng)
    new = changed(old, rng, 0.01)
    patch = decode_diff(layout, encode_diff(layout, old, new))
    live, applying = copy_state(old), list[float]()
    for _ in range(3):
        started = time.perf_counter()
        undo = apply_patch(layout, live, patch, threads=threads)
        applying.append(time.perf_counter() - started)
        undo.revert(live)
    before, rounds, interrupted = set(threading.enumerate()), 0, 0
    while rounds < 12 or not interrupted:  # a busy machine may let many an interrupt come too late
        delay_s, rounds = rng.uniform(0, min(applying)) / (1 + rounds // 12), rounds + 1
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        undo = None
        try:
            timer.start()
            undo = apply_patch(layout, live, patch, threads=threads)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupted += undo is None
        timer.join()
        until(lambda: set(threading.enumerate()) <= before)  # threads that are done need not be gone yet
        if undo is not None:
            assert same_bits(live, new)
            undo.revert(live)
        assert same_bits(live, old)


@dataclass
class _Job:
    """Work on numbers, some of which fail."""

    bad: set[int]
    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def __call__(self, item: int) -> int:
        self.begun.append(item)
        time.sleep(0.001 * (item % 3))
        self.ended.append(item)
        if item in self.bad:
            raise _Fault(item)
        return -item


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_nobody_is_at_work_once_a_failure_is_told(rng: np.random.Generator, threads: int) -> None:
    for _ in range(20):
        job = _Job(set(rng.choice(20, 3, replace=False).tolist()))
        with pytest.raises(_Fault):
            diff_module._spread(job, list(range(20)), 2**30, threads)
        assert sorted(job.begun) == sorted(job.ended) == sorted(set(job.begun))
        assert diff_module._spread(_Job(set()), list(range(20)), 2**30, threads) == [-item for item in range(20)]


def test_a_tensor_that_may_not_be_written_is_named_before_anything_is(rng: np.random.Generator) -> None:
    layout = Layout.of({"a": ("BF16", (1000,)), "b": ("BF16", (1000,))})
    old = random_bits(layout, rng)
    patch = decode_diff(layout, encode_diff(layout, old, changed(old, rng, 0.5)))
    live = copy_state(old)
    live["b"].flags.writeable = False
    with pytest.raises(LocalFault, match=r"read-only; got b"):
        apply_patch(layout, live, patch)
    assert same_bits(live, old)


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
