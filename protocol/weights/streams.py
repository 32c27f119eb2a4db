"""Streams: the byte planes of a column of numbers, each stored raw or as one bounded zstd frame.

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

E_CHUNK = code("E_CHUNK", "a chunk of a checkpoint is malformed")
E_CHUNK_LIMIT = code("E_CHUNK_LIMIT", "a chunk of a checkpoint is larger, or decodes to more, than it may")

#: Level of the encoder. Higher levels cost CPU and save next to nothing on these streams.
ZSTD_LEVEL: Final = 1
#: Largest zstd window a decoder allows, in bytes.
MAX_WINDOW: Final = 2**27
_STREAM: Final = struct.Struct("<BI")


class Coder(IntEnum):
    """How a stream's bytes are stored; 2 is set aside for rANS."""

    RAW = 0
    ZSTD = 1


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


def encode_planes(column: NDArray[Any], planes: int) -> bytes:
    """The first ``planes`` byte planes of an unsigned column, each as one stream."""
    parts: list[bytes] = []
    matrix = np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize)
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    for plane in range(planes):
        raw = matrix[:, plane].tobytes()
        packed = compressor.compress(raw)
        coder, data = (Coder.ZSTD, packed) if len(packed) < len(raw) else (Coder.RAW, raw)
        parts += [_STREAM.pack(coder, len(data)), data]
    return b"".join(parts)


def decode_planes(cursor: Cursor, count: int, planes: int, words: np.dtype[Any]) -> NDArray[Any]:
    """A column of ``count`` numbers of type ``words`` from its next ``planes`` streams.

    Raises:
        PeerFault: ``E_CHUNK`` when a stream is malformed or not exactly ``count`` bytes long.
    """
    matrix = np.zeros((count, words.itemsize), np.uint8)
    for plane in range(planes):
        coder, size = cursor.unpack(_STREAM)
        matrix[:, plane] = np.frombuffer(_decode(coder, cursor.take(size), count), np.uint8)
    column: NDArray[Any] = matrix.reshape(-1).view(words)
    return column


def _decode(coder: int, data: memoryview, count: int) -> bytes | memoryview:
    """Exactly ``count`` bytes; nothing larger is ever allocated."""
    if coder == Coder.RAW:
        if len(data) != count:
            raise PeerFault(E_CHUNK, "raw stream of the wrong length", expected=f"{count} bytes", got=len(data))
        return data
    if coder != Coder.ZSTD:
        raise PeerFault(E_CHUNK, "unknown stream coder", expected="0 or 1", got=coder)
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
