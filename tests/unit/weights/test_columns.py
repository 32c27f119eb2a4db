"""What the streams of a segment hold, before and after they are coded: compiled and in numpy the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import PeerFault
from protocol.weights import columns, kernels, rans, tokens
from protocol.weights.coder import Coder
from protocol.weights.streams import E_CHUNK, Cursor, decode_streams, encode_streams

_NUMBERS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)), max_size=50)


@pytest.mark.parametrize("words", ["<u2", "<u4"])
@pytest.mark.parametrize("counts", [[1], [0, 5, 0, 8, 16, 7], [9, 0, 1000], []])
def test_columns_come_back(rng: np.random.Generator, words: str, counts: list[int]) -> None:
    sizes, n = np.array(counts, np.int64), sum(counts)
    gaps = rng.integers(0, 2**20, n).astype(np.uint32)
    folded = rng.integers(0, 2 ** (8 * np.dtype(words).itemsize) - 1, n, dtype=np.uint64).astype(words)
    numbers, named, laid = columns.split(gaps, folded, sizes)
    assert len(laid) == columns.sizes_of(sizes).sum()
    for got, wanted in zip(kernels.split(gaps, folded, sizes), (numbers, named, laid), strict=True):
        assert got.dtype == wanted.dtype
        assert got.tolist() == wanted.tolist()
    assert numbers.tolist() == [*gaps.tolist(), *(folded >> 1).tolist()]
    assert named.tolist() == tokens.tokens_of(numbers).tolist()
    for gather in (columns.gather, kernels.gather):
        gathered = gather(laid, sizes)
        assert gathered is not None
        assert gathered[0].tolist() == named.tolist()
        assert gathered[1].tolist() == (folded & 1).tolist()


def test_padding_of_directions_is_looked_at_in_every_class() -> None:
    counts = np.array([3, 0, 8, 5], np.int64)
    _, _, laid = columns.split(np.zeros(16, np.uint32), np.zeros(16, np.uint16), counts)
    last_of_first, last_of_third = 6, len(laid) - 1
    for gather in (columns.gather, kernels.gather):
        assert gather(laid, counts) is not None
        for at, bit in ((last_of_first, 3), (last_of_first, 7), (last_of_third, 5)):
            bad = laid.copy()
            bad[at] |= 1 << bit
            assert gather(bad, counts) is None


@given(_NUMBERS)
def test_tokens_and_bits_hold_every_number(numbers: list[int]) -> None:
    values = np.array(numbers, np.uint32)
    named = tokens.tokens_of(values)
    packed = tokens.pack_extras(values, named)
    assert len(packed) == tokens.extra_bytes(named)[0]
    assert kernels.split(values, np.zeros(len(values), np.uint16), np.array([len(values)]))[1].tolist() == [
        *named.tolist(), *len(values) * [0]
    ]
    assert (kernels.pack_extras(values, named) == packed).all()
    for numbers_of in (tokens.numbers_of, kernels.numbers_of):
        assert (numbers_of(named, packed) == values).all()
    assert (named < tokens.MAX_TOKENS).all()


def test_every_token_begins_where_the_one_before_ends() -> None:
    bases, bits = tokens.BASES[: tokens.MAX_TOKENS], tokens.EXTRA_BITS[: tokens.MAX_TOKENS]
    ends = bases.astype(np.int64) + (1 << bits.astype(np.int64))
    assert ends[:-1].tolist() == bases[1:].tolist()
    assert ends[-1] == 2**32
    assert tokens.tokens_of(bases).tolist() == list(range(tokens.MAX_TOKENS))


def _body(table: list[int], states: list[int], refills: list[int], last: int | None = None) -> bytes:
    ends = bytes([len(table) - 1 if last is None else last])
    return ends + bytes(table) + np.array(states, "<u4").tobytes() + np.array(refills, "<u2").tobytes()


def _stream(body: bytes, coder: Coder = Coder.RANS) -> bytes:
    return bytes([coder]) + len(body).to_bytes(4, "little") + body


def _decoded(body: bytes, count: int) -> tuple[list[bool], np.ndarray[Any, Any]]:
    """What the kernel makes of one body among two good ones."""
    good = _stream(rans.pack(np.array([1, 2, 1], np.uint8)))
    chunk = np.frombuffer(b"?" + good + _stream(body) + good, np.uint8)
    out = np.zeros(6 + count, np.uint8)
    done, end = kernels.decode_streams(chunk, 1, np.array([3, count, 3]), out)
    assert end == len(chunk)
    return done.tolist(), out


@pytest.mark.parametrize("count", [1, 5, 4095, 16_384, 140_000, 270_000])
@pytest.mark.parametrize("peak", [0.01, 0.5, 0.99])
def test_rans_comes_back_and_is_the_same_compiled(rng: np.random.Generator, count: int, peak: float) -> None:
    data = np.minimum(rng.geometric(peak, count) - 1, 255).astype(np.uint8)
    body = rans.pack(data)
    assert kernels.rans_encode(data, np.array([count])) == [body]
    if count > 20_000:
        shares = np.bincount(data) / count
        entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum() * count / 8
        assert len(body) < 1.01 * entropy + 400
    back = rans.unpack(np.frombuffer(body, np.uint8), count)
    assert not isinstance(back, str)
    assert (back == data).all()
    done, out = _decoded(body, count)
    assert done == [True, True, True]
    assert out.tolist() == [1, 2, 1, *data.tolist(), 1, 2, 1]
    assert rans.lanes_of(count) == max(1, min(32, 1 << (count // 8192).bit_length() >> 1))


_GOOD = _body([9, 9], [2**16], [])
_MALFORMED = {
    "nothing": (b"", 4, "too short"),
    "a table cut off": (_body([9], [], [], last=200), 4, "too short"),
    "half a state": (_body([9, 9], [2**16], [])[:-2], 4, "too short"),
    "an odd byte": (_body([9, 9], [2**16], []) + b"x", 4, "too short"),
    "no bytes to decode": (_body([9, 9], [2**16], []), 0, "too short"),
    "a table of zeros": (_body([0, 0], [2**16], []), 4, "table is malformed"),
    "a zero at the table's end": (_body([9, 0], [2**16], []), 4, "table is malformed"),
    "a number that is none": (_body([128, 9], [2**16], []), 4, "table is malformed"),
    "a state too small": (_body([9, 9], [2**16 - 1], []), 4, "state too small"),
    "refills left over": (_body([9, 9], [2**16], [1, 2, 3]), 4, "end where it must"),
    "refills missing": (_body([9, 9], [2**32 - 1], []), 4000, "end where it must"),
    "a state that ends elsewhere": (_body([9, 9], [2**31 + 5], []), 1, "end where it must"),
}


@pytest.mark.parametrize("name", _MALFORMED)
@pytest.mark.parametrize("compiled", [True, False])
def test_malformed_streams_are_refused_alike(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body, count, wrong = _MALFORMED[name]
    if not compiled:
        monkeypatch.setattr(kernels, "compiled", lambda: None)
    if compiled:
        assert _decoded(body, count)[0] == [True, False, True]
    reason = rans.unpack(np.frombuffer(body, np.uint8), count)
    assert isinstance(reason, str)
    assert wrong in reason
    cursor = Cursor(b"before" + _stream(body))
    cursor.take(6)
    with pytest.raises(PeerFault, match=wrong) as caught:
        decode_streams(cursor, np.array([count]))
    assert caught.value.code == E_CHUNK


@pytest.mark.parametrize("entropy", [Coder.ZSTD, Coder.RANS])
def test_streams_of_every_kind_side_by_side(rng: np.random.Generator, entropy: Coder) -> None:
    parts = [
        rng.integers(0, 256, 500), np.zeros(0), np.full(40, 7), rng.geometric(0.3, 3000) % 256, np.array([1]),
        np.arange(500_000) // 499_999, rng.geometric(0.9, 200_000) % 256,
    ]
    counts = np.array([len(part) for part in parts])
    data = np.concatenate(parts).astype(np.uint8)
    streams = encode_streams(data, counts, entropy)
    kinds = [Coder(stream[0]) for stream in streams]
    assert kinds == [Coder.RAW, Coder.RAW, Coder.FILL, entropy, Coder.RAW, Coder.ZSTD, entropy]
    cursor = Cursor(b"".join(streams))
    assert (decode_streams(cursor, counts) == data).all()
    cursor.finish()


@pytest.mark.parametrize("cut", [1, 4, 5, 20])
def test_streams_that_end_too_early(cut: int) -> None:
    """In the header of the last one, or in its body: nothing behind the chunk is read."""
    good = _stream(rans.pack(np.arange(16, dtype=np.uint8)))
    chunk = (good + good)[: len(good) + cut]
    done, _ = kernels.decode_streams(np.frombuffer(chunk, np.uint8), 0, np.array([16, 16]), np.zeros(32, np.uint8))
    assert done.tolist() == [True, False]
    with pytest.raises(PeerFault, match="ends too early"):
        decode_streams(Cursor(chunk), np.array([16, 16]))


@given(st.lists(st.integers(0, 127), min_size=1, max_size=256).filter(any))
def test_every_table_adds_up_and_keeps_rare_bytes(table: list[int]) -> None:
    frequency = rans.frequencies(np.array(table, np.uint8))
    compiled, found = kernels.compiled(), np.empty(256, np.uint32)
    assert compiled is not None
    compiled.entropy.frequencies(np.array(table, np.uint8), rans.WEIGHTS, found)
    assert (found == frequency).all()
    assert frequency.sum() == 2**rans.PROBABILITY_BITS
    assert (frequency[: len(table)] > 0).tolist() == [number > 0 for number in table]


@given(st.lists(st.integers(0, 2**26), min_size=1, max_size=256).filter(any))
def test_every_count_gets_the_same_table(counts: list[int]) -> None:
    padded = np.array(counts + [0] * (256 - len(counts)), np.int64)
    table = rans.table_for(padded)
    compiled, found = kernels.compiled(), np.empty(len(table), np.uint8)
    assert compiled is not None
    compiled.entropy.table_for(padded, rans.WEIGHTS, found)
    assert found.tolist() == table.tolist()
    assert (table > 0).tolist() == [n > 0 for n in counts][: len(table)]


def test_rans_weights_ascend() -> None:
    assert (np.diff(rans.WEIGHTS) > 0).all()
