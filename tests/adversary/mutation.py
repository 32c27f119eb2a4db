"""Bytes nobody foresaw: seeded damage to good messages, in front of and behind their compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import zstandard

_ZSTD: Final = b"\x28\xb5\x2f\xfd"
#: Words that decoders tend to trip over: extremes of every width, in both byte orders.
_NASTY: Final = tuple(
    value.to_bytes(width, order) for width in (1, 2, 4, 8) for order in ("little", "big")
    for value in (0, 1, (1 << (8 * width - 1)) - 1, 1 << (8 * width - 1), (1 << (8 * width)) - 1)
)


def damaged(good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    """One of ``good`` after one to four changes."""
    data = good[int(rng.integers(len(good)))]
    inner = _inner(data) if rng.random() < 0.6 else None
    if inner is not None:
        return zstandard.ZstdCompressor(level=1).compress(_changed(inner, good, rng))
    return _changed(data, good, rng)


def _inner(data: bytes) -> bytes | None:
    """What is behind the compression; None when there is none or it is damaged already."""
    if not data.startswith(_ZSTD):
        return None
    try:
        return zstandard.ZstdDecompressor().stream_reader(data).read(1 << 20)
    except zstandard.ZstdError:
        return None


def _changed(data: bytes, good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    for _ in range(int(rng.integers(1, 5))):
        data = _CHANGES[int(rng.integers(len(_CHANGES)))](data, good, rng)
    return data


def _span(data: bytes, rng: np.random.Generator) -> tuple[int, int]:
    start = int(rng.integers(len(data) + 1))
    return start, min(len(data), start + int(rng.geometric(0.05)))


def _flip(data: bytes, _good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    if not data:
        return rng.bytes(1)
    at = int(rng.integers(len(data)))
    return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]


def _nasty(data: bytes, _good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    word = _NASTY[int(rng.integers(len(_NASTY)))]
    at = int(rng.integers(len(data) + 1))
    return data[:at] + word + data[at + len(word) :]


def _cut(data: bytes, _good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _repeat(data: bytes, _good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * int(rng.integers(1, 5)) + data[end:]


def _truncate(data: bytes, _good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data) + 1))]


def _graft(data: bytes, good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    """The head of one message on the body of another."""
    other = good[int(rng.integers(len(good)))]
    at = int(rng.integers(min(len(data), len(other)) + 1))
    return data[:at] + other[at:]


def _noise(data: bytes, _good: Sequence[bytes], rng: np.random.Generator) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + rng.bytes(end - start) + data[end:]


_CHANGES: Final = (_flip, _flip, _nasty, _cut, _repeat, _truncate, _graft, _noise)
