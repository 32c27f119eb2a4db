"""Chunks: the immutable objects a checkpoint is made of, each a few independent segments of the state.

A segment says how a byte range of the canonical state follows from the parent's (SAME, GAP, XC) or what it is (FULL).
Everything is checked and counted before anything is allocated. Spec: ``docs/spec/weight-diff.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PeerFault
from protocol.weights import steps, xc
from protocol.weights.classes import MAX_CLASSES, Changes
from protocol.weights.coder import Coder
from protocol.weights.streams import (
    E_CHUNK,
    E_CHUNK_LIMIT,
    Cursor,
    decode_planes,
    encode_planes,
    planes_needed,
    skip_streams,
)

#: Largest chunk a decoder takes, in bytes.
MAX_CHUNK_BYTES: Final = 8 * 2**20
#: Most bytes one chunk may decode to (positions as 4 bytes and one word per change; whole words for FULL).
MAX_CHUNK_OUTPUT: Final = 256 * 2**20
#: Longest byte range of state one segment may describe.
MAX_SEGMENT_BYTES: Final = 64 * 2**20
#: Size an encoder aims at, so that a lost transfer costs little.
TARGET_CHUNK_BYTES: Final = 4 * 2**20
_TARGET_OUTPUT: Final = 64 * 2**20
_MAX_SEGMENTS: Final = 65_535

_MAGIC: Final = b"ASWC"
_HEADER: Final = struct.Struct("<4sBBH")
_SEGMENT: Final = struct.Struct("<QQBBBBI")
_GAP_WORDS: Final = np.dtype("<u4")
_WORDS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class Kind(IntEnum):
    """What a chunk is part of."""

    DIFF = 0
    ANCHOR = 1


class Method(IntEnum):
    """How a segment is coded."""

    SAME = 0
    FULL = 1
    GAP = 2
    XC = 3


@dataclass(frozen=True)
class Segment:
    """Bytes ``start`` to ``end`` of the state.

    SAME: nothing else. FULL: ``words`` holds the new patterns. GAP: ``positions`` (word index within the segment,
    ascending) and ``words`` (folded steps, see :mod:`protocol.weights.steps`) of the changed words. XC: ``changes``
    says where among the words of which class; its positions can only be had from the old state. ``words`` as for GAP.
    """

    method: Method
    start: int
    end: int
    width: int  #: bytes of a word
    positions: NDArray[Any] | None = None
    words: NDArray[Any] | None = None
    changes: Changes | None = None


@dataclass(frozen=True)
class Encoded:
    """One segment as bytes, and how many bytes it decodes to."""

    data: bytes
    output: int


def encode_same(start: int, end: int, width: int) -> Encoded:
    """A segment without changes."""
    return Encoded(_SEGMENT.pack(start, end - start, Method.SAME, width, 0, 0, 0), 0)


def encode_full(start: int, words: NDArray[Any], entropy: Coder = Coder.ZSTD) -> Encoded:
    """A segment that holds the new patterns themselves, exponents in a plane of their own."""
    rotated = steps.rotate_left(words)
    planes = planes_needed(rotated)
    head = _SEGMENT.pack(start, words.nbytes, Method.FULL, words.itemsize, planes, 0, len(words))
    return Encoded(head + encode_planes(rotated, planes, entropy), words.nbytes)


def encode_gap(
    start: int, end: int, positions: NDArray[Any], folded: NDArray[Any], entropy: Coder = Coder.ZSTD
) -> Encoded:
    """A segment as gaps between changed words and folded steps; ``positions`` ascending, not empty."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    columns = gaps.astype(_GAP_WORDS), folded
    planes = [planes_needed(column) for column in columns]
    head = _SEGMENT.pack(start, end - start, Method.GAP, folded.itemsize, *planes, len(folded))
    streams = b"".join(encode_planes(c, p, entropy) for c, p in zip(columns, planes, strict=True))
    return Encoded(head + streams, len(folded) * (_GAP_WORDS.itemsize + folded.itemsize))


def encode_xc(start: int, end: int, changes: Changes, entropy: Coder = Coder.ZSTD) -> Encoded:
    """A segment as gaps and folded steps within classes of the old exponent; at least one change."""
    count, width = len(changes.folded), changes.folded.itemsize
    head = _SEGMENT.pack(start, end - start, Method.XC, width, len(changes.firsts), 0, count)
    return Encoded(head + xc.encode_body(changes, entropy), count * (_GAP_WORDS.itemsize + width))


class ChunkWriter:
    """Packs segments, given in order, into chunks of about ``TARGET_CHUNK_BYTES``."""

    def __init__(self, kind: Kind):
        self._kind = kind
        self._done: list[bytes] = []
        self._open: list[Encoded] = []
        self._size = self._output = 0

    def add(self, segment: Encoded) -> None:
        """Append a segment."""
        size, output = self._size + len(segment.data), self._output + segment.output
        if self._open and (size > TARGET_CHUNK_BYTES or output > _TARGET_OUTPUT or len(self._open) == _MAX_SEGMENTS):
            self._flush()
        self._open.append(segment)
        self._size += len(segment.data)
        self._output += segment.output

    def finish(self) -> list[bytes]:
        """All chunks; at least one, even if it holds no segment."""
        if self._open or not self._done:
            self._flush()
        return self._done

    def _flush(self) -> None:
        head = _HEADER.pack(_MAGIC, 1, self._kind, len(self._open))
        self._done.append(head + b"".join(segment.data for segment in self._open))
        self._open, self._size, self._output = [], 0, 0


@dataclass(frozen=True)
class Head:
    """A segment's header: what it describes and how much it decodes to."""

    start: int
    end: int
    method: Method
    width: int
    planes: tuple[int, int]
    count: int

    @property
    def population(self) -> int:
        """Words of state it describes."""
        return (self.end - self.start) // self.width

    @property
    def output(self) -> int:
        """Bytes it decodes to."""
        if self.method in (Method.GAP, Method.XC):
            return self.count * (_GAP_WORDS.itemsize + self.width)
        return self.count * self.width


@dataclass(frozen=True)
class Sealed:
    """A segment whose header is checked and whose streams are not decoded yet."""

    head: Head
    body: Cursor  #: behind ``classes``
    classes: xc.Classes | None = None  #: of an XC segment

    def decode(self) -> Segment:
        """The segment; once only, and on any thread.

        Raises:
            PeerFault: ``E_CHUNK``.
        """
        return _decode_segment(self)


def chunk_output(data: bytes) -> int:
    """How many bytes ``data`` says it decodes to; nothing is decoded.

    Raises:
        PeerFault: ``E_CHUNK`` or ``E_CHUNK_LIMIT``.
    """
    return sum(segment.head.output for segment in _walk(data)[1])


def open_chunk(data: bytes, kind: Kind, max_output: int = MAX_CHUNK_OUTPUT) -> list[Sealed]:
    """The segments of a chunk that keeps its limits, none of them decoded.

    Raises:
        PeerFault: ``E_CHUNK`` malformed, ``E_CHUNK_LIMIT`` larger than allowed or decodes to more than ``max_output``.
    """
    got, segments = _walk(data)
    output = sum(segment.head.output for segment in segments)
    if output > max_output:
        raise PeerFault(
            E_CHUNK_LIMIT, "chunk decodes to more than its manifest says", expected=f"<= {max_output}", got=output
        )
    if got is not kind:
        raise PeerFault(E_CHUNK, "chunk of the wrong kind", expected=kind.name, got=got.name)
    return segments


def decode_chunk(data: bytes, kind: Kind, max_output: int = MAX_CHUNK_OUTPUT) -> Iterator[Segment]:
    """The segments of a chunk, decoded one at a time once the whole chunk is known to keep its limits.

    Raises:
        PeerFault: as :func:`open_chunk`.
    """
    for segment in open_chunk(data, kind, max_output):
        yield segment.decode()


def _walk(data: bytes) -> tuple[Kind, list[Sealed]]:
    """All segments, from their headers and the sizes of their streams alone."""
    cursor, count, kind = _open(data)
    segments: list[Sealed] = []
    output = 0
    for _ in range(count):
        head = _read_head(cursor)
        classes = None
        if head.method is Method.XC:
            classes = xc.read_classes(cursor, head.planes[0], head.count, head.population)
        segments.append(Sealed(head, cursor.copy(), classes))
        skip_streams(cursor, sum(head.planes) if classes is None else classes.streams)
        output += head.output
        if output > MAX_CHUNK_OUTPUT:
            raise PeerFault(E_CHUNK_LIMIT, "chunk decodes to too much", expected=f"<= {MAX_CHUNK_OUTPUT}", got=output)
    cursor.finish()
    return kind, segments


def _open(data: bytes) -> tuple[Cursor, int, Kind]:
    if len(data) > MAX_CHUNK_BYTES:
        raise PeerFault(E_CHUNK_LIMIT, "chunk too large", expected=f"<= {MAX_CHUNK_BYTES} bytes", got=len(data))
    cursor = Cursor(data)
    magic, version, kind, count = _HEADER.unpack(cursor.take(_HEADER.size))
    if magic != _MAGIC or version != 1 or kind not in tuple(Kind):
        raise PeerFault(E_CHUNK, "not a chunk of version 1", expected="ASWC, 1, kind 0 or 1", got=data[:6].hex())
    return cursor, count, Kind(kind)


def _read_head(cursor: Cursor) -> Head:
    """The next segment header, every number in it checked against the others."""
    start, length, method, width, first, second, count = cursor.unpack(_SEGMENT)
    if method not in tuple(Method) or width not in _WORDS:
        raise PeerFault(
            E_CHUNK, "unknown segment method or word size", expected="method 0-3, width 2 or 4",
            got=f"{method}, {width}",
        )
    head = Head(start, start + length, Method(method), width, (first, second), count)
    if not 0 < length <= MAX_SEGMENT_BYTES or length % width:
        raise PeerFault(
            E_CHUNK, "segment of a wrong length", expected=f"1 to {MAX_SEGMENT_BYTES}, whole words", got=length
        )
    words = head.population
    counts, most = {
        Method.SAME: ((0, 0), (0, 0)), Method.FULL: ((words, words), (width, 0)), Method.GAP: ((1, words), (4, width)),
        Method.XC: ((1, words), (MAX_CLASSES, 0)),
    }[head.method]
    if not counts[0] <= count <= counts[1] or first > most[0] or second > most[1]:
        raise PeerFault(
            E_CHUNK, f"counts of a {head.method.name} segment do not fit", expected=f"count {counts}, planes <= {most}",
            got=f"count {count}, planes {first}, {second}",
        )
    return head


def _decode_segment(sealed: Sealed) -> Segment:
    head, cursor = sealed.head, sealed.body
    words = _WORDS[head.width]
    if head.method is Method.SAME:
        return Segment(head.method, head.start, head.end, head.width)
    if head.method is Method.FULL:
        rotated = decode_planes(cursor, head.count, head.planes[0], words)
        return Segment(head.method, head.start, head.end, head.width, words=steps.rotate_right(rotated))
    if sealed.classes is not None:
        changes = xc.decode_body(cursor, sealed.classes, words)
        return Segment(head.method, head.start, head.end, head.width, words=changes.folded, changes=changes)
    gaps = decode_planes(cursor, head.count, head.planes[0], _GAP_WORDS)
    folded = decode_planes(cursor, head.count, head.planes[1], words)
    positions = np.cumsum(gaps, dtype=np.uint64) + np.arange(head.count, dtype=np.uint64)
    if int(positions[-1]) >= head.population:
        raise PeerFault(
            E_CHUNK, "a gap leads out of the segment", expected=f"position < {head.population}", got=int(positions[-1])
        )
    if (folded == words.type(2 ** (8 * head.width) - 1)).any():
        raise PeerFault(E_CHUNK, "a step of zero", expected="only changed words listed")
    return Segment(head.method, head.start, head.end, head.width, positions.astype(_GAP_WORDS), folded)
