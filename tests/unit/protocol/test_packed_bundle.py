"""Packed bundles say the same as simple ones in fewer bytes; whatever else arrives is a peer's fault."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import bit_coder, packed_tokens
from protocol.bundle import decode, encode, encode_simple
from protocol.bundle_packed import MAGIC, encode_packed
from protocol.errors import PeerFault
from protocol.rollout import NO_CODE, Bundle, Finish, Segment, SwapMode
from tests.fakes.rollouts import edited, make_bundle, make_rollout, make_rules, make_seed

COLUMNS = ("tokens", "head_lengths", "head_ids", "head_codes", "tail_codes", "token_codes")
RULES = make_rules()
#: Bytes before the stream: magic, bits of an id, four counts; none of this bundle's counts needs more than two bytes.
COUNTS_AT = len(MAGIC) + 1


def _same(a: Bundle, b: Bundle) -> None:
    assert len(a.rollouts) == len(b.rollouts)
    for x, y in zip(a.rollouts, b.rollouts, strict=True):
        assert (x.sample, x.segments, x.finish) == (y.sample, y.segments, y.finish)
        for name in COLUMNS:
            assert getattr(x, name).dtype == getattr(y, name).dtype, name
            assert np.array_equal(getattr(x, name), getattr(y, name)), name


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    first, second, third = make_bundle(np.random.default_rng(0), RULES).rollouts
    return Bundle((
        replace(first, segments=(Segment(0, 3), Segment(16, 4), Segment(32, 9, SwapMode.REPREFILL))),
        replace(second, finish=Finish.EOS), third,
    ))


@pytest.fixture(scope="module")
def data(bundle: Bundle) -> bytes:
    return encode(bundle)


def test_a_bundle_comes_back_as_it_was(bundle, data):
    assert data.startswith(MAGIC)
    back = decode(data, RULES)
    _same(bundle, back)
    assert encode(back) == data
    assert len(data) < len(encode_simple(bundle))
    assert any(np.any(r.token_codes != NO_CODE) for r in bundle.rollouts)


def test_wide_values_come_back():
    rules = make_rules(vocab_size=2**24, head_size=255, max_new_tokens=131_072)
    rng = np.random.default_rng(1)
    lengths = np.array([255, 1, 7], np.uint8)
    entries = int(lengths.sum())
    ids = rng.integers(0, 2**32, entries, dtype=np.uint32)
    ids[0] = 2**32 - 1
    codes = rng.integers(0, 2**16, entries, dtype=np.uint16)
    codes[0], codes[1] = 65_535, 65_534
    rollout = replace(
        make_rollout(rng, RULES, make_seed(0), length=3), sample=2**32 - 1,
        tokens=np.array([ids[254], 5, ids[256]], np.uint32), head_lengths=lengths, head_ids=ids, head_codes=codes,
        tail_codes=np.array([0, 65_535, 1], np.uint16), token_codes=np.array([NO_CODE, 77, NO_CODE], np.uint16),
        segments=(Segment(0, 2**48 - 2),),
    )
    packed = encode_packed(Bundle((rollout, replace(rollout, sample=0))))
    assert packed is not None
    _same(Bundle((rollout, replace(rollout, sample=0))), decode(packed, rules))


def test_without_numba_the_bytes_are_the_same(monkeypatch):
    """The kernels as plain Python: what a machine without numba runs."""
    small = make_bundle(np.random.default_rng(4), RULES, samples=2, length=6)
    packed = encode(small)
    for module in (bit_coder, packed_tokens):
        for name, function in list(vars(module).items()):
            if hasattr(function, "py_func"):
                monkeypatch.setattr(module, name, function.py_func)
    assert encode(small) == packed
    _same(small, decode(packed, RULES))


def test_repetition_costs_next_to_nothing(bundle):
    """Samples of one prompt share heads until they part; the same rollout again is the extreme."""
    one = encode(Bundle((bundle.rollouts[0],)))
    twice = encode(Bundle((bundle.rollouts[0], bundle.rollouts[0])))
    assert len(twice) < 1.5 * len(one)


def test_streams_end_where_their_tokens_end(data):
    for bad in (data[:-3], data[:-10], data + b"\0", data + b"\1", data[:-1] + b"\1\1", data[: COUNTS_AT + 6]):
        with pytest.raises(PeerFault) as caught:
            decode(bad, RULES)
        assert caught.value.code in ("E_BUNDLE_PACKED", "E_BUNDLE_COLUMNS", "E_SEGMENTS", "E_BUNDLE_CANONICAL")
    with pytest.raises(PeerFault, match="E_BUNDLE_PACKED"):
        decode(data + b"\0", RULES)


def test_first_bytes_and_counts_are_checked(data):
    counts = b"\1\1\1\1"
    bad = [
        MAGIC[:4], MAGIC, MAGIC[:4] + b"\2" + data[5:], MAGIC + b"\0" + data[COUNTS_AT:], MAGIC + b"\x21" + data[6:],
        MAGIC + b"\5" + b"\x80\x80\x80\x80\x80\x01" + counts, MAGIC + b"\5" + b"\x81\x00" + counts, MAGIC + b"\5\1\1",
    ]
    for case in bad:
        with pytest.raises(PeerFault, match="E_BUNDLE_PACKED"):
            decode(case, RULES)


@pytest.mark.parametrize("counts", [
    (0, 1, 1, 1), (1025, 1, 1025, 1025), (1, 1, 0, 0), (1, 1, 129, 129), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 13),
    (2, 1, 1, 1),
])
def test_counts_beyond_the_limits_are_refused_before_anything_is_allocated(counts):
    from protocol.bundle_packed import _varint

    with pytest.raises(PeerFault, match="E_BUNDLE_COLUMNS"):
        decode(MAGIC + b"\6" + b"".join(map(_varint, counts)) + bytes(9), RULES)


def test_a_bomb_costs_no_memory():
    from protocol.bundle_packed import _varint

    rules = make_rules(max_new_tokens=131_072, head_size=255)
    counts = (1000, 1000, 131_000_000, 33_000_000_000)
    tracemalloc.start()
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        decode(MAGIC + b"\6" + b"".join(map(_varint, counts)) + bytes(99), rules)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    with pytest.raises(PeerFault, match="E_TOO_LARGE"):
        decode(MAGIC + bytes(2000), RULES, max_bytes=1000)


def test_memory_stays_within_a_small_multiple_of_the_limit():
    limit = 2**20
    rules = make_rules(max_new_tokens=131_072, vocab_size=2, head_size=1)
    rollout = make_rollout(np.random.default_rng(0), rules, make_seed(0), length=4)
    many = replace(rollout, **{name: np.tile(getattr(rollout, name)[:1], 40_000) for name in COLUMNS})
    big = encode(Bundle((many,)))
    assert len(big) < 2_000
    tracemalloc.start()
    decode(big, rules, max_bytes=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * limit


def test_a_head_token_disguised_as_a_tail_draw_is_refused(bundle):
    rollout = bundle.rollouts[0]
    tail = int(np.flatnonzero(rollout.token_codes != NO_CODE)[0])
    inside = int(rollout.head_ids[np.cumsum(rollout.head_lengths)[tail] - 1])
    lied = edited(rollout, tokens={tail: inside})
    packed = _packed_as_it_is(Bundle((lied,)), tail)
    with pytest.raises(PeerFault, match="E_BUNDLE_CANONICAL"):
        decode(packed, RULES)


def _packed_as_it_is(bundle: Bundle, drawn: int) -> bytes:
    """The packed form in which token ``drawn`` claims to be a tail draw, whatever its head holds."""
    from protocol import bundle_packed
    from protocol.bundle_columns import Draws, Frame

    frame = Frame.of(bundle)
    blank = edited(bundle.rollouts[0], token_codes={drawn: NO_CODE})
    draws = Draws.of(Bundle((blank,)))
    draws.rank[drawn], draws.token_code[drawn] = 255, 9_000
    coder = bit_coder.writer(10_000, bundle_packed._slot_bits(len(draws.head_id)))
    for kind, column in enumerate(bundle_packed._frame_columns(frame)):
        packed_tokens.code_column(coder, kind, column)
    packed_tokens.code_tokens(coder, 6, bundle_packed._token_columns(frame, draws))
    packed_tokens.code_end(coder, packed_tokens.END)
    counts = (1, len(frame.segment_start), len(draws.rank), len(draws.head_id))
    stream = bit_coder.written(coder)
    assert stream is not None
    return MAGIC + b"\6" + b"".join(map(bundle_packed._varint, counts)) + stream


def test_a_writer_without_room_says_so():
    coder = bit_coder.writer(4, 12)
    packed_tokens.code_column(coder, 0, np.random.default_rng(0).integers(0, 2**40, 50))
    assert bit_coder.written(coder) is None


def test_the_logistic_table_is_the_logistic_function():
    logits = np.arange(-2047, 2048) / 256
    assert np.abs(bit_coder.SQUASH / 65_536 - 1 / (1 + np.exp(-logits))).max() < 1 / 60_000
    middles = (np.arange(4096) + 0.5) / 4096
    inside = np.abs(np.log(middles / (1 - middles))) < 7.9
    assert np.abs(bit_coder.STRETCH / 256 - np.log(middles / (1 - middles)))[inside].max() < 1 / 32


def _decode_or_peer_fault(data: bytes) -> None:
    try:
        bundle = decode(data, RULES, max_bytes=2**20)
    except PeerFault:
        return
    _same(decode(encode(bundle), RULES), bundle)


@settings(max_examples=80)
@given(st.data())
def test_mutated_bytes_are_a_bundle_or_a_peer_fault(data, drawn):
    changed = bytearray(data)
    for _ in range(drawn.draw(st.integers(1, 3))):
        at = drawn.draw(st.integers(0, len(changed) - 1))
        if drawn.draw(st.booleans()):
            changed[at] = drawn.draw(st.integers(0, 255))
        else:
            del changed[at : at + drawn.draw(st.integers(1, 8))]
            changed += b"\0"
    _decode_or_peer_fault(bytes(changed))


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_noise_is_a_peer_fault(noise):
    _decode_or_peer_fault(MAGIC + b"\6\3\3\x30\x7f" + noise)
    with pytest.raises(PeerFault):
        decode(MAGIC + noise, RULES)


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 60))
def test_any_honest_bundle_comes_back(number, samples, length):
    bundle = make_bundle(np.random.default_rng(number), RULES, samples=samples, length=length)
    _same(bundle, decode(encode(bundle), RULES))


# -- limits -------------------------------------------------------------------------------------------------


def committed(bundle: Bundle) -> tuple[int, int]:
    return len(bundle.rollouts), sum(map(len, bundle.rollouts))


@pytest.mark.parametrize("form", [encode, encode_simple])
def test_more_than_was_committed_to_is_refused_before_it_is_decoded(bundle, form, monkeypatch):
    (rollouts, tokens), made = committed(bundle), form(bundle)
    _same(bundle, decode(made, RULES, most=(rollouts, tokens)))
    _same(bundle, decode(made, RULES, most=(rollouts + 1, tokens + 1)))  # that is for T0.4

    def never(*_):
        raise AssertionError("work was spent")

    for name in ("code_column", "code_tokens"):
        monkeypatch.setattr(packed_tokens, name, never)
    for most in ((rollouts - 1, tokens), (rollouts, tokens - 1), (0, 0)):
        with pytest.raises(PeerFault, match="E_COUNTS"):
            decode(made, RULES, most=most)


def test_a_stream_that_is_cut_off_ends_the_work():
    """Past its end a reader reads zeros, which may go on for long; nothing that follows can be right."""
    coder, column = bit_coder.reader(b"", 12), np.zeros(200_000, np.int64)
    packed_tokens.code_column(coder, 0, column)
    assert bit_coder.past(coder)
    assert 0 < np.count_nonzero(column) < len(column) / 2
