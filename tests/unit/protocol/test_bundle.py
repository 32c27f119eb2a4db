"""Bundles in the simple form survive the wire; whatever else arrives is a peer's fault, found in bounded memory."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.bundle import decode, encode_simple
from protocol.commitment import bundle_root
from protocol.errors import PeerFault
from protocol.rollout import NO_CODE, Bundle, Finish, Segment, SwapMode
from tests.fakes.rollouts import edited, make_bundle, make_rollout, make_rules, make_seed

COLUMNS = ("tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes")
RULES = make_rules()


def _same(a: Bundle, b: Bundle) -> None:
    assert len(a.rollouts) == len(b.rollouts)
    for x, y in zip(a.rollouts, b.rollouts, strict=True):
        assert (x.sample, x.segments, x.finish) == (y.sample, y.segments, y.finish)
        for name in COLUMNS:
            assert getattr(x, name).dtype == getattr(y, name).dtype, name
            assert np.array_equal(getattr(x, name), getattr(y, name)), name


def _content(data: bytes) -> bytearray:
    return bytearray(zstandard.ZstdDecompressor().decompress(data))


def _frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(content))


def _columns(content: bytes) -> dict[str, slice]:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return {
        name: slice(8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items() if name != "__metadata__"
    }


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    made = make_bundle(np.random.default_rng(0), RULES)
    first, second, third = made.rollouts
    return Bundle((
        replace(first, segments=(Segment(0, 3), Segment(16, 4), Segment(32, 9, SwapMode.REPREFILL))),
        replace(second, finish=Finish.EOS), third,
    ))


@pytest.fixture(scope="module")
def data(bundle: Bundle) -> bytes:
    return encode_simple(bundle)


def test_a_bundle_comes_back_as_it_was(bundle, data):
    back = decode(data, RULES)
    _same(bundle, back)
    assert encode_simple(back) == data
    assert bundle_root(back, "00" * 32) == bundle_root(bundle, "00" * 32)
    assert any(np.any(r.token_codes != NO_CODE) for r in bundle.rollouts)


def test_wide_values_come_back():
    rules = make_rules(vocab_size=2**24, head_size=255, max_new_tokens=131_072)
    rng = np.random.default_rng(1)
    lengths = np.array([255, 1, 7], np.uint8)
    entries = int(lengths.sum())
    ids = rng.integers(0, 2**32, entries, dtype=np.uint32)
    codes = rng.integers(0, 2**16, entries, dtype=np.uint16)
    tokens = np.array([ids[254], 5, ids[255 + 1]], np.uint32)
    rollout = replace(
        make_rollout(rng, RULES, make_seed(0), length=3), sample=2**32 - 1, tokens=tokens, head_lengths=lengths,
        head_ids=ids, head_codes=codes, tail_codes=np.array([0, 65_535, 1], np.uint16),
        token_codes=np.array([NO_CODE, 77, NO_CODE], np.uint16), segments=(Segment(0, 2**48 - 1),),
    )
    _same(Bundle((rollout,)), decode(encode_simple(Bundle((rollout,))), rules))


def test_the_content_is_a_safetensors_file(bundle, data):
    columns = safetensors.numpy.load(bytes(_content(data)))
    assert columns["length"].tolist() == [len(r) for r in bundle.rollouts]
    assert columns["segment_version"].tolist() == [3, 4, 9, 3, 3]


def test_any_zstd_level_of_the_same_content_is_the_same_bundle(bundle, data):
    _same(bundle, decode(_frame(_content(data)), RULES))


def test_what_cannot_be_said_is_our_own_bug(bundle):
    rollout = bundle.rollouts[0]
    inside = int(np.flatnonzero(rollout.token_codes == NO_CODE)[0])
    with pytest.raises(ValueError, match="token code"):
        encode_simple(Bundle((edited(rollout, token_codes={inside: 5}),)))
    with pytest.raises(ValueError, match="at least one"):
        encode_simple(Bundle(()))


def test_frames_must_be_one_of_a_declared_size(data):
    content = bytes(_content(data))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    bad_frames = [b"", data[:-1], data[: len(data) // 2], data + b"\0", data + data, content, unsized, data[:4]]
    for bad in bad_frames:
        with pytest.raises(PeerFault, match="E_BUNDLE_FRAME"):
            decode(bad, RULES)


def test_a_zstd_bomb_costs_no_memory():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(100 * 2**20))
    assert len(bomb) < 20_000
    tracemalloc.start()
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        decode(bomb, RULES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        decode(bytes(2000), RULES, max_bytes=1000)


def test_memory_stays_within_a_small_multiple_of_the_limit():
    """Worst content found: one-entry heads, which cost the most bookkeeping per byte."""
    limit = 2**20
    rules = make_rules(max_new_tokens=131_072, vocab_size=2, head_size=1)
    rollout = make_rollout(np.random.default_rng(0), rules, make_seed(0), length=4)
    many = replace(rollout, **{name: np.tile(getattr(rollout, name)[:1], 60_000) for name in COLUMNS})
    big = encode_simple(Bundle((many,)))
    tracemalloc.start()
    decode(big, rules, max_bytes=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * limit


def test_headers_must_be_the_ones_their_counts_call_for(data):
    content = _content(data)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    rest = bytes(content[8 + length :])

    def rebuilt(text: bytes) -> bytes:
        return _frame(len(text).to_bytes(8, "little") + text + rest)

    def with_change(name: str, **change: object) -> bytes:
        return rebuilt(json.dumps(header | {name: header[name] | change}, separators=(",", ":")).encode())

    bad = [
        _frame(b""), _frame(b"\xff" * 8), _frame((2**63).to_bytes(8, "little") + bytes(100)), rebuilt(b"{}"),
        rebuilt(b"[1,2]"), rebuilt(b"\xff\xfe"), rebuilt(b"null"), rebuilt(b"[" * 3000), rebuilt(b" " * 5000),
        with_change("rank", shape=[10**9]), with_change("rank", shape=[-1]), with_change("rank", shape=[1.5]),
        with_change("rank", shape=[True]), with_change("rank", shape=[]), with_change("rank", shape="12"),
        with_change("rank", shape=[int("9" * 4000)]), with_change("head_id", shape=[4, 1]),
        with_change("head_id", dtype="F32"), with_change("length", data_offsets=[0, 12]),
        with_change("sample", shape=[2]), rebuilt(json.dumps(header).encode()),
        rebuilt(json.dumps(header | {"extra": header["rank"]}, separators=(",", ":")).encode()),
        _frame(bytes(content) + b"\0"), _frame(bytes(content)[:-1]),
    ]
    for case in bad:
        with pytest.raises(PeerFault, match="E_BUNDLE_HEADER"):
            decode(case, RULES)


def _set(content: bytearray, column: str, index: int, value: int, dtype: str) -> bytes:
    where = _columns(content)[column]
    values = np.frombuffer(bytes(content[where]), dtype).copy()
    values[index] = value
    changed = bytearray(content)
    changed[where] = values.tobytes()
    return _frame(changed)


@pytest.mark.parametrize(("column", "index", "value", "dtype", "code"), [
    ("length", 0, 0, "<u4", "E_BUNDLE_COLUMNS"),
    ("length", 0, 129, "<u4", "E_BUNDLE_COLUMNS"),
    ("length", 0, 41, "<u4", "E_BUNDLE_COLUMNS"),
    ("length", 0, 2**32 - 1, "<u4", "E_BUNDLE_COLUMNS"),
    ("head_length", 5, 0, "u1", "E_BUNDLE_COLUMNS"),
    ("head_length", 5, 13, "u1", "E_BUNDLE_COLUMNS"),
    ("head_length", 5, 3, "u1", "E_BUNDLE_COLUMNS"),
    ("rank", 0, 254, "u1", "E_BUNDLE_COLUMNS"),
    ("finish", 1, 2, "u1", "E_BUNDLE_COLUMNS"),
    ("head_id", 0, 255, "u1", "E_BUNDLE_COLUMNS"),
    ("segments", 0, 0, "<u2", "E_SEGMENTS"),
    ("segments", 0, 2, "<u2", "E_SEGMENTS"),
    ("segments", 0, 65_535, "<u2", "E_SEGMENTS"),
    ("segment_start", 0, 16, "<u4", "E_SEGMENTS"),
    ("segment_start", 1, 17, "<u4", "E_SEGMENTS"),
    ("segment_start", 1, 32, "<u4", "E_SEGMENTS"),
    ("segment_start", 2, 48, "<u4", "E_SEGMENTS"),
    ("segment_version", 1, 3, "<u8", "E_SEGMENTS"),
    ("segment_version", 2, 2**48, "<u8", "E_SEGMENTS"),
    ("segment_mode", 2, 2, "u1", "E_SEGMENTS"),
    ("dictionary", 0, 63, "u1", "E_BUNDLE_CANONICAL"),
])
def test_columns_that_contradict_are_refused(data, column, index, value, dtype, code):
    with pytest.raises(PeerFault) as caught:
        decode(_set(_content(data), column, index, value, dtype), RULES)
    assert caught.value.code == code


def test_a_head_token_disguised_as_a_tail_draw_is_not_canonical(bundle):
    rollout = bundle.rollouts[0]
    tail = int(np.flatnonzero(rollout.token_codes != NO_CODE)[0])
    content = _content(encode_simple(Bundle((rollout,))))
    head_id = int(rollout.head_ids[np.cumsum(rollout.head_lengths)[tail] - 1])
    with pytest.raises(PeerFault, match="E_BUNDLE_CANONICAL"):
        decode(_set(content, "drawn_id", 0, head_id, "u1"), RULES)


def test_lists_of_rollouts_are_bounded():
    rollout = make_rollout(np.random.default_rng(0), RULES, make_seed(0), length=1)
    decode(encode_simple(Bundle((rollout,) * 1024)), RULES)
    with pytest.raises(PeerFault, match="E_BUNDLE_COLUMNS"):
        decode(encode_simple(Bundle((rollout,) * 1025)), RULES)


def test_rules_bound_what_is_read(data):
    for changes in ({"max_new_tokens": 41}, {"head_size": 11}):
        with pytest.raises(PeerFault, match="E_BUNDLE_COLUMNS"):
            decode(data, make_rules(**changes))
    with pytest.raises(PeerFault, match="E_SEGMENTS"):
        decode(data, make_rules(swap_grid=32))
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        decode(data, RULES, max_bytes=len(_content(data)) - 1)


def _decode_or_peer_fault(data: bytes) -> None:
    try:
        bundle = decode(data, RULES, max_bytes=2**20)
    except PeerFault:
        return
    assert bytes(_content(encode_simple(bundle))) == bytes(_content(data))


@settings(max_examples=80)
@given(st.data())
def test_mutated_content_is_the_same_bundle_or_a_peer_fault(data, drawn):
    content = _content(data)
    for _ in range(drawn.draw(st.integers(1, 3))):
        kind = drawn.draw(st.sampled_from(["set", "cut", "insert", "swap"]))
        at = drawn.draw(st.integers(0, len(content) - 1))
        if kind == "set":
            content[at] = drawn.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at : at + drawn.draw(st.integers(1, 8))]
        elif kind == "insert":
            content[at:at] = drawn.draw(st.binary(min_size=1, max_size=8))
        else:
            other = drawn.draw(st.integers(0, len(content) - 1))
            content[at], content[other] = content[other], content[at]
        if not content:
            break
    _decode_or_peer_fault(_frame(content))


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_noise_is_a_peer_fault(noise):
    with pytest.raises(PeerFault):
        decode(noise, RULES)
    with pytest.raises(PeerFault):
        decode(_frame(noise), RULES)


@settings(max_examples=60)
@given(st.data())
def test_mutated_frames_are_the_same_bundle_or_a_peer_fault(data, drawn):
    frame = bytearray(data)
    at = drawn.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= drawn.draw(st.integers(1, 255))
    _decode_or_peer_fault(bytes(frame))


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 60))
def test_any_honest_bundle_comes_back(number, samples, length):
    bundle = make_bundle(np.random.default_rng(number), RULES, samples=samples, length=length)
    _same(bundle, decode(encode_simple(bundle), RULES))
