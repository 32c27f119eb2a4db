"""Streams: byte planes of columns of numbers, each stored raw, as one bounded zstd frame, or by rANS.

Plane p holds byte p (least significant first) of every number. Planes above the last one that is not all zero are
left out. Spec: ``docs/spec/weight-diff.md``, "Streams".
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.errors import PeerFault, code
from protocol.weights import kernels, rans

E_CHUNK = code("E_CHUNK", "a chunk of a checkpoint is malformed")
E_CHUNK_LIMIT = code("E_CHUNK_LIMIT", "a chunk of a checkpoint is larger, or decodes to more, than it may")

#: Level of the encoder. Higher levels cost CPU and save next to nothing on these streams.
ZSTD_LEVEL: Final = 1
#: Largest zstd window a decoder allows, in bytes.
MAX_WINDOW: Final = 2**27
#: Fewest equal bytes for which the encoder uses FILL. Decoders take any number.
_SHORTEST_FILL: Final = 16
#: Share of a stream's bytes that rANS leaves below which zstd is tried as well.
_SKEWED: Final = 0.1
_STREAM: Final = struct.Struct("<BI")


class Coder(IntEnum):
    """How a stream's bytes are stored."""

    RAW = 0
    ZSTD = 1
    RANS = 2
    FILL = 3  #: one byte, as often as needed


class Cursor:
    """Reads a buffer front to back and refuses to go past its end."""

    def __init__(self, data: bytes):
        self._data, self._at = memoryview(data), 0

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes.

        Raises:
            PeerFault: ``E_CHUNK`` when fewer are left.
        """
        if count > len(self._data) - self._at:
            raise PeerFault(
                E_CHUNK, "chunk ends too early", expected=f"{count} more bytes", got=len(self._data) - self._at
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        """The next struct of integers.

        Raises:
            PeerFault: ``E_CHUNK``.
        """
        return form.unpack(self.take(form.size))

    def copy(self) -> Cursor:
        """Another cursor at the same place of the same buffer."""
        other = Cursor.__new__(Cursor)
        other._data, other._at = self._data, self._at
        return other

    def finish(self) -> None:
        """Refuse bytes that are left over.

        Raises:
            PeerFault: ``E_CHUNK``.
        """
        if self._at != len(self._data):
            raise PeerFault(E_CHUNK, "bytes after the end of the chunk", got=len(self._data) - self._at)


def planes_needed(column: NDArray[Any]) -> int:
    """How many byte planes hold the largest number of ``column``."""
    return (int(column.max()).bit_length() + 7) // 8 if len(column) else 0


def encode_stream(raw: bytes, entropy: Coder = Coder.ZSTD) -> bytes:
    """One stream that decodes to ``raw``: by ``entropy`` (ZSTD or RANS), or simpler where that is as short."""
    if len(raw) >= _SHORTEST_FILL and raw[0] == raw[-1] and raw.count(raw[:1]) == len(raw):
        return _STREAM.pack(Coder.FILL, 1) + raw[:1]
    packed = _rans(raw) if entropy is Coder.RANS else b""
    if entropy is Coder.ZSTD or len(packed) < len(raw) * _SKEWED:  # long runs: rANS frequencies are too coarse
        zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
        entropy, packed = min((Coder.ZSTD, zstd), (entropy, packed or zstd), key=lambda option: len(option[1]))
    coder, data = (entropy, packed) if len(packed) < len(raw) else (Coder.RAW, raw)
    return _STREAM.pack(coder, len(data)) + data


def encode_raw_stream(raw: bytes) -> bytes:
    """One stream that is stored as it is, because nothing would make it shorter."""
    return _STREAM.pack(Coder.RAW, len(raw)) + raw


def decode_stream(cursor: Cursor, count: int) -> NDArray[np.uint8]:
    """The ``count`` bytes of the next stream.

    Raises:
        PeerFault: ``E_CHUNK`` when it is malformed or of another length.
    """
    coder, size = cursor.unpack(_STREAM)
    return _decode(coder, cursor.take(size), count)


def take_raw_stream(cursor: Cursor) -> NDArray[np.uint8]:
    """The bytes of the next stream, which must be stored as they are.

    Raises:
        PeerFault: ``E_CHUNK``.
    """
    coder, size = cursor.unpack(_STREAM)
    if coder != Coder.RAW:
        raise PeerFault(E_CHUNK, "a stream of extra bits is coded", expected=int(Coder.RAW), got=coder)
    return np.frombuffer(cursor.take(size), np.uint8)


def skip_streams(cursor: Cursor, count: int) -> None:
    """Go past the next ``count`` streams without decoding them.

    Raises:
        PeerFault: ``E_CHUNK`` when the chunk ends before they do.
    """
    for _ in range(count):
        _, size = cursor.unpack(_STREAM)
        cursor.take(size)


def encode_planes(column: NDArray[Any], planes: int, entropy: Coder = Coder.ZSTD) -> bytes:
    """The first ``planes`` byte planes of an unsigned column, each as one stream (see :func:`encode_stream`)."""
    matrix = np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize)
    return b"".join(encode_stream(matrix[:, plane].tobytes(), entropy) for plane in range(planes))


def decode_planes(cursor: Cursor, count: int, planes: int, words: np.dtype[Any]) -> NDArray[Any]:
    """A column of ``count`` numbers of type ``words`` from its next ``planes`` streams.

    Raises:
        PeerFault: ``E_CHUNK`` when a stream is malformed or not exactly ``count`` bytes long.
    """
    matrix = np.zeros((count, words.itemsize), np.uint8)
    for plane in range(planes):
        matrix[:, plane] = decode_stream(cursor, count)
    column: NDArray[Any] = matrix.reshape(-1).view(words)
    return column


def _decode(coder: int, data: memoryview, count: int) -> NDArray[np.uint8]:
    """Exactly ``count`` bytes; nothing larger is ever allocated."""
    if coder == Coder.RAW:
        if len(data) != count:
            raise PeerFault(E_CHUNK, "raw stream of the wrong length", expected=f"{count} bytes", got=len(data))
        return np.frombuffer(data, np.uint8)
    if coder == Coder.FILL:
        if len(data) != 1 or not count:
            raise PeerFault(E_CHUNK, "fill stream of the wrong length", expected="1 byte", got=len(data))
        return np.full(count, data[0], np.uint8)
    if coder == Coder.ZSTD:
        return np.frombuffer(_unzstd(data, count), np.uint8)
    if coder == Coder.RANS:
        return _unrans(data, count)
    raise PeerFault(E_CHUNK, "unknown stream coder", expected="0 to 3", got=coder)


def _rans(raw: bytes) -> bytes:
    """Last byte of the table, the table, the states, the refills; nothing for nothing."""
    if not raw:
        return b""
    data = np.frombuffer(raw, np.uint8)
    table = kernels.table_for(kernels.count_bytes(data))
    states, refills = kernels.rans_encode(data, kernels.frequencies(table))
    return b"".join([
        bytes([len(table) - 1]), table.tobytes(), states.astype("<u4").tobytes(), refills.astype("<u2").tobytes()
    ])


def _unrans(data: memoryview, count: int) -> NDArray[np.uint8]:
    size = data[0] + 2 if len(data) else 0
    lanes = rans.lanes_of(count)
    table, rest = np.frombuffer(data[1:size], np.uint8), data[size:]
    if not size or len(table) != size - 1 or len(rest) < 4 * lanes or len(rest) % 2 or not count:
        raise PeerFault(E_CHUNK, "rANS stream too short", expected=f"a table and {lanes} states", got=len(data))
    if int(table.max()) >= len(rans.WEIGHTS) or not table[-1]:
        raise PeerFault(
            E_CHUNK, "rANS table is malformed", expected=f"numbers below {len(rans.WEIGHTS)}, the last not 0"
        )
    states = np.frombuffer(rest[: 4 * lanes], "<u4")
    if (states < rans.LOWEST_STATE).any():
        raise PeerFault(E_CHUNK, "rANS state too small", expected=f">= {rans.LOWEST_STATE}", got=int(states.min()))
    refills = np.frombuffer(bytes(rest[4 * lanes :]), "<u2")
    raw = kernels.rans_decode(states, refills, kernels.frequencies(table), count)
    if raw is None:
        raise PeerFault(E_CHUNK, "rANS stream does not end where it must")
    return raw


def _unzstd(data: memoryview, count: int) -> bytes:
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        if stated != count:
            raise PeerFault(E_CHUNK, "zstd frame of the wrong length", expected=f"{count} bytes", got=stated)
        raw = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompress(
            data, max_output_size=count, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise PeerFault(E_CHUNK, "stream is not one zstd frame", got=str(error)) from None
    if len(raw) != count:
        raise PeerFault(E_CHUNK, "zstd frame of the wrong length", expected=f"{count} bytes", got=len(raw))
    return raw
