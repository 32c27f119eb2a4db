"""How others ship a weight update, written down once more from the layouts of their bytes, for ``weight_codec.py``.

Each codec is a pair of functions on states of bf16 bit patterns: ``encode(old, new)`` gives the bytes that travel,
``apply(state, data)`` changes a state in place. Only what costs bytes or time is here: no hashes, no transport.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.weights.layout import State

_LEVEL = 1


@dataclass(frozen=True)
class Rival:
    """A way to ship the change from one state to the next."""

    encode: Callable[[State, State], bytes]
    apply: Callable[[State, bytes], None]


def _pack(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _unpack(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _changes(old: State, new: State) -> list[tuple[str, NDArray[np.int64]]]:
    """Flat positions of the words that differ, for each tensor that has any."""
    found = ((name, np.flatnonzero(old[name].reshape(-1) != new[name].reshape(-1))) for name in sorted(old))
    return [(name, where) for name, where in found if len(where)]


def _frame(headers: list[Any], parts: list[bytes]) -> bytes:
    header = json.dumps(headers, separators=(",", ":")).encode()
    return struct.pack("<I", len(header)) + header + b"".join(parts)


def _unframe(data: bytes) -> tuple[list[Any], memoryview]:
    (size,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + size]), memoryview(data)[4 + size :]


# -- the whole state, compressed -------------------------------------------------------------------------


def full_encode(_old: State, new: State) -> bytes:
    """All words, zstd."""
    return _pack(b"".join(new[name].tobytes() for name in sorted(new)))


def full_apply(state: State, data: bytes) -> None:
    """Overwrite everything."""
    raw, at = np.frombuffer(_unpack(data), "<u2"), 0
    for name in sorted(state):
        words = state[name].reshape(-1)
        words[:] = raw[at : at + len(words)]
        at += len(words)


# -- positions as int32 and new words, as they are (TRL, verl, vLLM) -------------------------------------


def int32_encode(old: State, new: State) -> bytes:
    """Per tensor: int32 positions, then the new words; not compressed."""
    headers, parts = [], []
    for name, where in _changes(old, new):
        headers.append([name, len(where)])
        parts += [where.astype("<i4").tobytes(), new[name].reshape(-1)[where].tobytes()]
    return _frame(headers, parts)


def int32_apply(state: State, data: bytes) -> None:
    """Scatter the words."""
    headers, body = _unframe(data)
    for name, count in headers:
        state[name].reshape(-1)[np.frombuffer(body[: 4 * count], "<i4")] = np.frombuffer(
            body[4 * count : 6 * count], "<u2"
        )
        body = body[6 * count :]


# -- grail v3.1: rows and columns as differences in the smallest type, new words, one zstd frame ---------


def grail_encode(old: State, new: State) -> bytes:
    """Sorted coordinates; row differences; column differences, absolute where a row begins; uint8, uint16 or int32."""
    headers, parts = [], []
    for name, where in _changes(old, new):
        columns_per_row = int(np.prod(old[name].shape[1:])) if old[name].ndim > 1 else 1
        rows, columns = np.divmod(where, columns_per_row)
        row_steps = np.diff(rows, prepend=0)
        fresh = np.append(True, row_steps[1:] != 0)
        column_steps = np.where(fresh, columns, np.diff(columns, prepend=0))
        row_steps, column_steps = _smallest(row_steps), _smallest(column_steps)
        words = new[name].reshape(-1)[where]
        headers.append({
            "name": name, "shape": list(old[name].shape), "num_nonzero": len(where), "value_dtype": "bfloat16",
            "row_dtype": row_steps.dtype.name, "col_dtype": column_steps.dtype.name,
        })
        parts += [row_steps.tobytes(), column_steps.tobytes(), words.tobytes()]
    return _pack(_frame(headers, parts))


def grail_apply(state: State, data: bytes) -> None:
    """Sum up rows, and columns within each row; scatter."""
    headers, body = _unframe(_unpack(data))
    for header in headers:
        count, name = header["num_nonzero"], header["name"]
        row_steps, body = _take(body, header["row_dtype"], count)
        column_steps, body = _take(body, header["col_dtype"], count)
        words, body = _take(body, "uint16", count)
        rows = np.cumsum(row_steps, dtype=np.int64)
        fresh = np.append(True, row_steps[1:] != 0)
        sums = np.cumsum(column_steps, dtype=np.int64)
        first = np.flatnonzero(fresh)
        base = (sums - column_steps)[first]
        columns = sums - np.repeat(base, np.diff(np.append(first, count)))
        columns_per_row = int(np.prod(header["shape"][1:])) if len(header["shape"]) > 1 else 1
        state[name].reshape(-1)[rows * columns_per_row + columns] = words


def _smallest(values: NDArray[np.int64]) -> NDArray[Any]:
    largest = int(values.max())
    return values.astype("uint8" if largest < 2**8 else "uint16" if largest < 2**16 else "int32")


def _take(body: memoryview, dtype: str, count: int) -> tuple[NDArray[Any], memoryview]:
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer(body[:size], dtype), body[size:]


# -- slime: bytewise XOR of each changed tensor, zstd ----------------------------------------------------


def slime_encode(old: State, new: State) -> bytes:
    """Per tensor that changed: the XOR of all its bytes, one zstd frame."""
    headers, parts = [], []
    for name in sorted(old):
        xor = old[name].reshape(-1) ^ new[name].reshape(-1)
        if xor.any():
            parts.append(_pack(xor.view(np.uint8).tobytes()))
            headers.append([name, len(parts[-1])])
    return _frame(headers, parts)


def slime_apply(state: State, data: bytes) -> None:
    """XOR in place."""
    headers, body = _unframe(data)
    for name, size in headers:
        words = state[name].reshape(-1)
        words ^= np.frombuffer(_unpack(bytes(body[:size])), "<u2")
        body = body[size:]


# -- NeMo RL: gaps in the smallest type and XORed words, one zstd frame ----------------------------------


def nemo_encode(old: State, new: State) -> bytes:
    """Per tensor: differences of sorted positions in uint16 or uint32, then old XOR new; zstd over all."""
    headers, gaps, words = [], [], []
    for name, where in _changes(old, new):
        steps = np.diff(where, prepend=0)
        steps = steps.astype("uint16" if steps.max() < 2**16 else "uint32")
        headers.append([name, len(where), steps.dtype.name])
        gaps.append(steps.tobytes())
        words.append((old[name].reshape(-1)[where] ^ new[name].reshape(-1)[where]).tobytes())
    return _pack(_frame(headers, gaps + words))


def nemo_apply(state: State, data: bytes) -> None:
    """XOR the words at the summed gaps."""
    headers, body = _unframe(_unpack(data))
    places = []
    for name, count, dtype in headers:
        steps, body = _take(body, dtype, count)
        places.append((name, count, np.cumsum(steps, dtype=np.int64)))
    for name, count, where in places:
        words, body = _take(body, "uint16", count)
        state[name].reshape(-1)[where] ^= words


RIVALS = {
    "full_zstd": Rival(full_encode, full_apply),
    "int32_values": Rival(int32_encode, int32_apply),
    "grail_v31": Rival(grail_encode, grail_apply),
    "slime_xor": Rival(slime_encode, slime_apply),
    "nemo_gaps": Rival(nemo_encode, nemo_apply),
}
