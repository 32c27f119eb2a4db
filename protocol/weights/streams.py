"""Streams: byte planes of columns of numbers, each stored raw, as one bounded zstd frame, by rANS, or as one byte.

Plane p holds byte p (least significant first) of every number. Planes above the last one that is not all zero are
left out. Spec: ``docs/spec/weight-diff.md``, "Streams".
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.errors import PeerFault, code
from protocol.weights import kernels, rans
from protocol.weights.coder import STREAM_HEAD, Coder

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


class Cursor:
    """Reads a buffer front to back and refuses to go past its end."""

    def __init__(self, data: bytes):
        self._data, self._at = memoryview(data), 0

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes.

        Raises:
            PeerFault: ``E_CHUNK`` when fewer are left.
        """
        self.skip(count)
        return self._data[self._at - count : self._at]

    def skip(self, count: int) -> None:
        """Go past the next ``count`` bytes.

        Raises:
            PeerFault: ``E_CHUNK`` when fewer are left.
        """
        self._at += count
        if self._at > len(self._data):
            self._at -= count
            raise PeerFault(
                E_CHUNK, "chunk ends too early", expected=f"{count} more bytes", got=len(self._data) - self._at
            )

    @property
    def place(self) -> int:
        """Bytes of the buffer before the next one."""
        return self._at

    @property
    def whole(self) -> NDArray[np.uint8]:
        """The buffer from its beginning."""
        return np.frombuffer(self._data, np.uint8)

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        """The next struct of integers.

        Raises:
            PeerFault: ``E_CHUNK``.
        """
        self.skip(form.size)
        return form.unpack_from(self._data, self._at - form.size)

    def skip_sized(self, head: struct.Struct, count: int) -> None:
        """Go past ``count`` parts, each led by a head whose last number tells how many bytes follow it.

        Raises:
            PeerFault: ``E_CHUNK`` when the buffer ends before they do.
        """
        data, at = self._data, self._at
        for _ in range(count):
            if at + head.size > len(data):
                break
            at += head.size + head.unpack_from(data, at)[-1]
        else:
            self.skip(at - self._at)
            return
        self.skip(at + head.size - self._at)

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


def encode_streams(
    data: NDArray[np.uint8], counts: NDArray[np.int64], entropy: Coder = Coder.ZSTD
) -> list[bytes]:
    """One stream for each of the (S,) ``counts`` bytes that lie end to end in ``data``.

    By ``entropy`` (ZSTD or RANS), or simpler where that is as short.
    """
    packed = kernels.rans_encode(data, counts) if entropy is Coder.RANS else [b""] * len(counts)
    ends = np.cumsum(counts).tolist()
    return [
        _shortest(data[end - count : end].tobytes(), entropy, body)
        for end, count, body in zip(ends, counts.tolist(), packed, strict=True)
    ]


def _shortest(raw: bytes, entropy: Coder, packed: bytes) -> bytes:
    """The stream of ``raw``, which is ``packed`` by rANS where that is wanted."""
    if len(raw) >= _SHORTEST_FILL and raw[0] == raw[-1] and raw.count(raw[:1]) == len(raw):
        return STREAM_HEAD.pack(Coder.FILL, 1) + raw[:1]
    if entropy is Coder.ZSTD or len(packed) < len(raw) * _SKEWED:  # long runs: rANS frequencies are too coarse
        zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
        entropy, packed = min((Coder.ZSTD, zstd), (entropy, packed or zstd), key=lambda option: len(option[1]))
    coder, data = (entropy, packed) if len(packed) < len(raw) else (Coder.RAW, raw)
    return STREAM_HEAD.pack(coder, len(data)) + data


def encode_raw_stream(raw: bytes) -> bytes:
    """One stream that is stored as it is, because nothing would make it shorter."""
    return STREAM_HEAD.pack(Coder.RAW, len(raw)) + raw


def decode_streams(cursor: Cursor, counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The (S,) ``counts`` bytes of the next streams, end to end.

    Raises:
        PeerFault: ``E_CHUNK`` when one is malformed or of another length.
    """
    out, place = np.empty(int(counts.sum()), np.uint8), 0
    done, end = kernels.decode_streams(cursor.whole, cursor.place, counts, out)
    if done.all():
        cursor.skip(end - cursor.place)
        return out
    for count, decoded in zip(counts.tolist(), done.tolist(), strict=True):
        coder, size = cursor.unpack(STREAM_HEAD)
        data = cursor.take(size)
        if not decoded:
            out[place : place + count] = _decode(coder, data, count)
        place += count
    return out


def take_raw_stream(cursor: Cursor) -> NDArray[np.uint8]:
    """The bytes of the next stream, which must be stored as they are.

    Raises:
        PeerFault: ``E_CHUNK``.
    """
    coder, size = cursor.unpack(STREAM_HEAD)
    if coder != Coder.RAW:
        raise PeerFault(E_CHUNK, "a stream of extra bits is coded", expected=int(Coder.RAW), got=coder)
    return np.frombuffer(cursor.take(size), np.uint8)


def skip_streams(cursor: Cursor, count: int) -> None:
    """Go past the next ``count`` streams without decoding them.

    Raises:
        PeerFault: ``E_CHUNK`` when the chunk ends before they do.
    """
    cursor.skip_sized(STREAM_HEAD, count)


def encode_planes(column: NDArray[Any], planes: int, entropy: Coder = Coder.ZSTD) -> bytes:
    """The first ``planes`` byte planes of an unsigned column, each as one stream (see :func:`encode_streams`)."""
    matrix = np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize)
    columns = np.ascontiguousarray(matrix.T[:planes]).reshape(-1)
    return b"".join(encode_streams(columns, np.full(planes, len(column)), entropy))


def decode_planes(cursor: Cursor, count: int, planes: int, words: np.dtype[Any]) -> NDArray[Any]:
    """A column of ``count`` numbers of type ``words`` from its next ``planes`` streams.

    Raises:
        PeerFault: ``E_CHUNK`` when a stream is malformed or not exactly ``count`` bytes long.
    """
    matrix = np.zeros((count, words.itemsize), np.uint8)
    matrix[:, :planes] = decode_streams(cursor, np.full(planes, count)).reshape(planes, count).T
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
        raw = rans.unpack(np.frombuffer(data, np.uint8), count)
        if isinstance(raw, str):
            raise PeerFault(E_CHUNK, raw)
        return raw
    raise PeerFault(E_CHUNK, "unknown stream coder", expected="0 to 3", got=coder)


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
