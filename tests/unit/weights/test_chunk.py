"""Hostile chunks: everything is refused with a code of ours, before memory is spent on it."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import AssayError, PeerFault
from protocol.messages import ChunkRef
from protocol.weights.chunk import MAX_CHUNK_BYTES, ChunkWriter, Kind, Method, chunk_output, encode_full
from protocol.weights.diff import apply_patch, decode_anchor, decode_diff, encode_anchor, encode_diff
from protocol.weights.layout import Layout, copy_state
from tests.fakes.checkpoints import LAYOUT, changed, random_bits, same_bits

TINY = Layout.of({"a": ("BF16", (100,))})
_OLD = random_bits(LAYOUT, np.random.default_rng(7))
_DIFF = encode_diff(LAYOUT, _OLD, changed(_OLD, np.random.default_rng(8), 0.4, any_bits=True))
_XC = encode_diff(LAYOUT, _OLD, changed(_OLD, np.random.default_rng(9), 0.3, any_bits=True), method=Method.XC)
_ANCHOR = encode_anchor(LAYOUT, _OLD)


def chunk(*segments: bytes, magic: bytes = b"ASWC", version: int = 1, kind: int = 0, count: int | None = None) -> bytes:
    head = struct.pack("<4sBBH", magic, version, kind, len(segments) if count is None else count)
    return head + b"".join(segments)


def segment(
    start: int, length: int, method: int, width: int, planes: tuple[int, int], count: int, *streams: bytes
) -> bytes:
    return struct.pack("<QQBBBBI", start, length, method, width, *planes, count) + b"".join(streams)


def stream(data: bytes, coder: int = 0) -> bytes:
    return struct.pack("<BI", coder, len(data)) + data


def rans(table: bytes = b"\1", state: bytes = b"\0\0\1\0", refills: bytes = b"") -> bytes:
    """Two bytes by rANS; as given, two zeros."""
    return stream(bytes([len(table) - 1]) + table + state + refills, 2)


def zstd(data: bytes, **options: object) -> bytes:
    return stream(zstandard.ZstdCompressor(**options).compress(data), 1)  # type: ignore[arg-type]


def classes(*records: tuple[int, int, int]) -> bytes:
    """First key, population and changed words of each class."""
    return b"".join(struct.pack("<BII", *record) for record in records)


def xc2(
    *records: tuple[int, int, int], gaps: bytes = b"\0\0", magnitudes: bytes = b"\0\0", away: bytes = b"\0",
    extras: bytes = b"", extras_coder: int = 0,
) -> bytes:
    """A chunk with two changes among the 100 words of TINY, both in one class or in two."""
    at, streams = 0, []
    for _, _, count in records:
        if count:
            streams += [stream(gaps[at : at + count]), stream(magnitudes[at : at + count]), stream(away)]
            at += count
    body = segment(0, 200, 3, 2, (len(records), 0), 2, classes(*records), *streams, stream(extras, extras_coder))
    return chunk(body)


GAP2 = (0, 200, 2, 2, (1, 1), 2)  # two changes among the 100 words of TINY
_TWO = stream(b"\0\0")
#: name -> (chunk, what the refusal says)
BAD = {
    "empty": (b"", "ends too early"),
    "short header": (b"ASWC\1", "ends too early"),
    "magic": (chunk(magic=b"ASWD"), "not a chunk"),
    "version": (chunk(version=2), "not a chunk"),
    "kind": (chunk(kind=2), "not a chunk"),
    "anchor as diff": (chunk(kind=1), "wrong kind"),
    "segments missing": (chunk(count=1), "ends too early"),
    "trailing bytes": (chunk(segment(0, 200, 0, 2, (0, 0), 0)) + b"\0", "after the end"),
    "unknown method": (chunk(segment(0, 200, 4, 2, (0, 0), 0)), "unknown segment method"),
    "unknown width": (chunk(segment(0, 200, 0, 1, (0, 0), 0)), "word size"),
    "no length": (chunk(segment(0, 0, 0, 2, (0, 0), 0)), "wrong length"),
    "odd length": (chunk(segment(0, 199, 0, 2, (0, 0), 0)), "wrong length"),
    "huge length": (chunk(segment(0, 2**63, 0, 2, (0, 0), 0)), "wrong length"),
    "hole at the start": (chunk(segment(2, 198, 0, 2, (0, 0), 0)), "do not tile"),
    "beyond the state": (chunk(segment(0, 202, 0, 2, (0, 0), 0)), "do not tile"),
    "does not reach the end": (chunk(segment(0, 198, 0, 2, (0, 0), 0)), "do not cover"),
    "overlap": (chunk(segment(0, 198, 0, 2, (0, 0), 0), segment(196, 4, 0, 2, (0, 0), 0)), "do not tile"),
    "same with streams": (chunk(segment(0, 200, 0, 2, (1, 0), 0, stream(b""))), "do not fit"),
    "same with a count": (chunk(segment(0, 200, 0, 2, (0, 0), 1)), "do not fit"),
    "full with wrong count": (chunk(segment(0, 200, 1, 2, (0, 0), 99)), "do not fit"),
    "full with 3 planes": (chunk(segment(0, 200, 1, 2, (3, 0), 100, *[stream(bytes(100))] * 3)), "do not fit"),
    "gap without changes": (chunk(segment(0, 200, 2, 2, (0, 0), 0)), "do not fit"),
    "more changes than words": (chunk(segment(0, 200, 2, 2, (0, 0), 101)), "do not fit"),
    "5 gap planes": (chunk(segment(0, 200, 2, 2, (5, 0), 1, *[stream(b"\0")] * 5)), "do not fit"),
    "gap out of the segment": (chunk(segment(*GAP2, stream(b"\x63\0"), _TWO)), "leads out"),
    "gap far out": (chunk(segment(0, 200, 2, 2, (4, 0), 1, *[stream(b"\xff")] * 4)), "leads out"),
    "step of zero": (chunk(segment(0, 200, 2, 2, (1, 2), 1, stream(b"\0"), *[stream(b"\xff")] * 2)), "step of zero"),
    "raw stream too long": (chunk(segment(*GAP2, stream(b"\0\0\0"), _TWO)), "raw stream"),
    "raw stream too short": (chunk(segment(*GAP2, stream(b"\0"), _TWO)), "raw stream"),
    "stream beyond the chunk": (chunk(segment(*GAP2, struct.pack("<BI", 0, 2**32 - 1))), "ends too early"),
    "unknown coder": (chunk(segment(*GAP2, stream(b"\0\0", 4), _TWO)), "unknown stream coder"),
    "not zstd": (chunk(segment(*GAP2, stream(b"junk", 1), _TWO)), "not one zstd frame"),
    "zstd of another length": (chunk(segment(*GAP2, zstd(bytes(3)), _TWO)), "zstd frame of the wrong length"),
    "zstd bomb": (chunk(segment(*GAP2, zstd(bytes(2**26)), _TWO)), "zstd frame of the wrong length"),
    "zstd without length": (
        chunk(segment(*GAP2, zstd(bytes(2), write_content_size=False), _TWO)), "zstd frame of the wrong length"
    ),
    "empty rans": (chunk(segment(*GAP2, stream(b"", 2), _TWO)), "rANS stream too short"),
    "rans without states": (chunk(segment(*GAP2, rans(state=b"\0\0\1"), _TWO)), "rANS stream too short"),
    "rans with half a refill": (chunk(segment(*GAP2, rans(refills=b"\0"), _TWO)), "rANS stream too short"),
    "rans table too long": (chunk(segment(*GAP2, stream(b"\xff\1\1\1\1\1\1\1\1", 2), _TWO)), "rANS stream too short"),
    "rans weight unknown": (chunk(segment(*GAP2, rans(table=b"\x80"), _TWO)), "rANS table"),
    "rans table of zeros": (chunk(segment(*GAP2, rans(table=b"\0\0"), _TWO)), "rANS table"),
    "rans table ends in 0": (chunk(segment(*GAP2, rans(table=b"\1\0"), _TWO)), "rANS table"),
    "rans state too small": (chunk(segment(*GAP2, rans(state=b"\xff\xff\0\0"), _TWO)), "state too small"),
    "rans refills left over": (chunk(segment(*GAP2, rans(refills=b"\0\0"), _TWO)), "does not end"),
    "rans refills missing": (chunk(segment(*GAP2, rans(table=b"\1\1"), _TWO)), "does not end"),
    "rans ends elsewhere": (chunk(segment(*GAP2, rans(state=b"\1\0\1\0"), _TWO)), "does not end"),
    "empty fill": (chunk(segment(*GAP2, stream(b"", 3), _TWO)), "fill stream"),
    "long fill": (chunk(segment(*GAP2, stream(b"\0\0", 3), _TWO)), "fill stream"),
    "xc without changes": (chunk(segment(0, 200, 3, 2, (1, 0), 0, classes((0, 100, 0)), stream(b""))), "do not fit"),
    "xc without classes": (chunk(segment(0, 200, 3, 2, (0, 0), 1, stream(b"\0"))), "not ascending"),
    "17 classes": (chunk(segment(0, 200, 3, 2, (17, 0), 1, classes(*[(0, 0, 0)] * 17))), "do not fit"),
    "xc with a second column": (chunk(segment(0, 200, 3, 2, (1, 1), 1, classes((0, 100, 1)))), "do not fit"),
    "first class not from 0": (xc2((1, 100, 2)), "not ascending"),
    "classes out of order": (xc2((0, 50, 1), (0, 50, 1)), "not ascending"),
    "populations short": (xc2((0, 50, 1), (128, 49, 1)), "do not add up"),
    "populations long": (xc2((0, 50, 1), (128, 2**32 - 1, 1)), "do not add up"),
    "counts short": (xc2((0, 50, 1), (128, 50, 0)), "do not add up"),
    "more changes than members": (xc2((0, 99, 0), (128, 1, 2)), "do not add up"),
    "gap out of the class": (xc2((0, 3, 2), (128, 97, 0), gaps=b"\1\1"), "out of the class"),
    "unknown gap token": (xc2((0, 100, 2), gaps=b"\0\x80"), "unknown token"),
    "unknown magnitude token": (xc2((0, 100, 2), magnitudes=b"\xff\0"), "unknown token"),
    "extra bits missing": (xc2((0, 100, 2), gaps=b"\x2b\0"), "extra bits"),
    "extra bits left over": (xc2((0, 100, 2), extras=b"\0"), "extra bits"),
    "padding of extras set": (xc2((0, 100, 2), gaps=b"\x10\0", extras=b"\x04"), "padding"),
    "extras coded": (xc2((0, 100, 2), extras=b"\0", extras_coder=3), "extra bits is coded"),
    "padding of directions set": (xc2((0, 100, 2), away=b"\x04"), "padding"),
    "directions too long": (xc2((0, 100, 2), away=b"\0\0"), "raw stream"),
    "step beyond half a circle": (xc2((0, 100, 2), magnitudes=b"\x40\0", extras=bytes(2)), "step of zero"),
    "xc step of zero": (xc2((0, 100, 2), magnitudes=b"\x3b\0", away=b"\1", extras=b"\xff\x0f"), "step of zero"),
    "two zstd frames": (
        chunk(segment(*GAP2, stream(2 * zstandard.ZstdCompressor().compress(bytes(2)), 1), _TWO)), "not one zstd frame"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_chunks_are_refused(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PeerFault, match=BAD[name][1]) as caught:
            decode_diff(TINY, [BAD[name][0]])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.code == "E_CHUNK"


def test_the_same_by_hand_is_accepted() -> None:
    good = chunk(segment(*GAP2, zstd(b"\x05\x03"), stream(b"\x01\x00")))
    assert decode_diff(TINY, [chunk(segment(*GAP2, rans(), _TWO))]).changed == 2
    patch = decode_diff(TINY, [good])
    assert patch.segments[0].positions is not None
    assert patch.segments[0].positions.tolist() == [5, 9]


def test_exponent_classes_by_hand() -> None:
    """Words 0, 2, 4 ... are 1.0, the others 2^-10; the second 1.0 and the third and fifth 2^-10 change."""
    layout = Layout.of({"a": ("BF16", (10,))})
    old = {"a": np.array([0x3F80, 0x3A80] * 5, "<u2")}
    records = classes((0, 5, 2), (120, 5, 1))
    body = segment(
        0, 20, 3, 2, (2, 0), 3, records, stream(b"\2\1"), stream(b"\0\1"), stream(b"\0"), stream(b"\1"),
        stream(b"\x10"), stream(b"\1"), stream(b"\1"),
    )
    assert struct.unpack("<I", body[20:24]) == (3,)
    new = {"a": old["a"].copy()}
    apply_patch(layout, new, decode_diff(layout, [chunk(body)]))
    assert [int(x) for x in new["a"] - old["a"]] == [0, 0, 18, 0, 0, 0xFFFF, 0, 0, 0, 0xFFFE]


def test_a_diff_for_another_state_is_refused_before_anything_is_written() -> None:
    old = {"a": np.array([0x3F80, 0x3A80] * 50, "<u2")}
    data = xc2((0, 50, 1), (120, 50, 1))
    apply_patch(TINY, {"a": old["a"].copy()}, decode_diff(TINY, [data]))
    for other in (old["a"] + np.uint16(0x600) * (np.arange(100) == 7), np.zeros(100, "<u2")):
        live = {"a": other.astype("<u2")}
        with pytest.raises(PeerFault) as caught:
            apply_patch(TINY, live, decode_diff(TINY, [data]))
        assert caught.value.code == "E_CHUNK"
        assert (live["a"] == other).all()


def test_a_lying_zstd_header_is_refused() -> None:
    """A frame that states 2 bytes and holds 16 MiB of zeros in its blocks."""
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(2**24))
    content = zstandard.get_frame_parameters(frame)
    assert content.content_size == 2**24
    at = frame.index((2**24).to_bytes(4, "little"))
    lying = frame[:at] + (2).to_bytes(4, "little") + frame[at + 4 :]
    with pytest.raises(PeerFault) as caught:
        decode_diff(TINY, [chunk(segment(*GAP2, stream(lying, 1), _TWO))])
    assert caught.value.code == "E_CHUNK"


def test_segments_may_not_cross_word_sizes() -> None:
    layout = Layout.of({"a": ("BF16", (2,)), "b": ("F32", (1,))})
    for bad in (
        chunk(segment(0, 8, 0, 2, (0, 0), 0)),
        chunk(segment(0, 4, 0, 4, (0, 0), 0), segment(4, 4, 0, 4, (0, 0), 0)),
        chunk(segment(0, 4, 0, 2, (0, 0), 0), segment(4, 2, 0, 2, (0, 0), 0), segment(6, 2, 0, 2, (0, 0), 0)),
    ):
        with pytest.raises(PeerFault) as caught:
            decode_diff(layout, [bad])
        assert caught.value.code == "E_CHUNK"
    good = chunk(segment(0, 4, 0, 2, (0, 0), 0), segment(4, 4, 0, 4, (0, 0), 0))
    assert decode_diff(layout, [good]).changed == 0


def test_limits_hold() -> None:
    tall = [segment(at, 2**26, 2, 2, (0, 0), 2**25) for at in (0, 2**26)]  # every word changed, in 24 bytes each
    assert chunk_output(chunk(tall[0])) == 6 * 2**25
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: chunk_output(bytes(MAX_CHUNK_BYTES + 1)), "chunk too large"),
        (lambda: decode_diff(TINY, [chunk(*tall)]), "decodes to too much"),
        (lambda: decode_diff(TINY, [_full()], [_ref(199)]), "more than its manifest says"),
    ]
    for call, message in cases:
        with pytest.raises(PeerFault, match=message) as caught:
            call()
        assert caught.value.code == "E_CHUNK_LIMIT"
    assert decode_diff(TINY, [_full()], [_ref(200)]).changed == 100


def _full() -> bytes:
    writer = ChunkWriter(Kind.DIFF)
    writer.add(encode_full(0, np.arange(100, dtype="<u2")))
    return writer.finish()[0]


def _ref(max_output: int) -> ChunkRef:
    return ChunkRef(sha256="0" * 64, size_bytes=1, max_output_bytes=max_output)


@pytest.mark.parametrize("method", [0, 2])
def test_an_anchor_never_leans_on_another_state(method: int) -> None:
    body = segment(0, 200, method, 2, (0, 0), 1 if method else 0)
    with pytest.raises(PeerFault) as caught:
        decode_anchor([chunk(body, kind=1)], TINY)
    assert caught.value.code == "E_CHUNK"


def test_chunks_out_of_order_missing_or_twice_are_refused() -> None:
    parts = [chunk(segment(at, 100, 0, 2, (0, 0), 0)) for at in (0, 100)]
    assert decode_diff(TINY, parts).changed == 0
    for bad in (parts[::-1], parts[:1], parts[1:], [*parts, parts[1]], [parts[0], parts[0]], []):
        with pytest.raises(PeerFault) as caught:
            decode_diff(TINY, bad)
        assert caught.value.code == "E_CHUNK"


def _attempt(diff: bytes | None, anchor: bytes | None) -> None:
    """Decoding and applying may fail, but only in our words, and nothing is left half written."""
    live = copy_state(_OLD)
    try:
        if diff is not None:
            patch = decode_diff(LAYOUT, [diff])
            try:
                apply_patch(LAYOUT, live, patch).revert(live)
            finally:
                assert same_bits(live, _OLD)
        if anchor is not None:
            decode_anchor([anchor], LAYOUT)
    except AssayError as error:
        assert isinstance(error, PeerFault)  # noqa: PT017


@given(st.data())
def test_mutated_chunks_raise_only_our_errors(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from([_DIFF[0], _XC[0], _ANCHOR[0]]))
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(mutated)))
    mutated = mutated[:cut] if data.draw(st.booleans()) else mutated
    _attempt(bytes(mutated), bytes(mutated))


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_our_errors(data: bytes) -> None:
    _attempt(data, data)
    _attempt(chunk(data, count=3), chunk(data, count=3, kind=1))


def test_every_single_byte_flip_raises_only_our_errors() -> None:
    for original in (_DIFF[0], _XC[0], _ANCHOR[0]):
        for at in range(len(original)):
            _attempt(original[:at] + bytes([original[at] ^ 0x55]) + original[at + 1 :], None)
            _attempt(None, original[:at] + bytes([original[at] ^ 0x55]) + original[at + 1 :])
