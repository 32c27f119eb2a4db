"""The body of an XC segment: a record per class, token streams of gaps and magnitudes, and one string of verbatim bits.

Spec: ``docs/spec/weight-diff.md``, "Exponent classes".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PeerFault
from protocol.weights import kernels
from protocol.weights.classes import Changes
from protocol.weights.streams import (
    E_CHUNK,
    Coder,
    Cursor,
    decode_stream,
    encode_raw_stream,
    encode_stream,
    take_raw_stream,
)
from protocol.weights.tokens import BASES, EXTRA_BITS, MAX_TOKENS

_CLASS: Final = struct.Struct("<BII")


@dataclass(frozen=True)
class Classes:
    """The class records of a segment, each number checked against the others; (C,) arrays as in ``Changes``."""

    firsts: NDArray[np.uint8]
    populations: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def streams(self) -> int:
        """How many streams follow: two per class with changes, and the verbatim bits."""
        return 2 * int(np.count_nonzero(self.counts)) + 1


def encode_body(changes: Changes, entropy: Coder = Coder.ZSTD) -> bytes:
    """Everything of an XC segment behind its header; ``entropy`` codes the tokens."""
    parts = [
        _CLASS.pack(*numbers)
        for numbers in zip(changes.firsts, changes.populations, changes.counts, strict=True)
    ]
    magnitudes = (changes.folded >> 1).astype(np.uint32)
    away = (changes.folded & 1).astype(np.uint32)
    gap_tokens, magnitude_tokens = kernels.tokens_of(changes.gaps), kernels.tokens_of(magnitudes)
    for lo, hi in _ranges(changes.counts):
        parts += [encode_stream(column[lo:hi].tobytes(), entropy) for column in (gap_tokens, magnitude_tokens)]
    bits = kernels.pack_bits(
        np.concatenate([changes.gaps, magnitudes, away]), _widths(gap_tokens, magnitude_tokens)
    )
    return b"".join([*parts, encode_raw_stream(bits.tobytes())])


def read_classes(cursor: Cursor, classes: int, count: int, population: int) -> Classes:
    """The records of ``classes`` classes of a segment with ``count`` changes among ``population`` words.

    Raises:
        PeerFault: ``E_CHUNK`` when they do not add up.
    """
    records = [cursor.unpack(_CLASS) for _ in range(classes)]
    firsts, populations, counts = (np.array([r[i] for r in records], np.int64) for i in range(3))
    if not classes or firsts[0] or (np.diff(firsts) <= 0).any():
        raise PeerFault(E_CHUNK, "classes are not ascending ranges of keys from 0", got=firsts.tolist())
    if int(populations.sum()) != population or int(counts.sum()) != count or (counts > populations).any():
        raise PeerFault(
            E_CHUNK, "populations and counts of classes do not add up", expected=f"{population} words, {count} changes",
            got=f"{int(populations.sum())} words, {int(counts.sum())} changes",
        )
    return Classes(firsts.astype(np.uint8), populations, counts)


def decode_body(cursor: Cursor, classes: Classes, words: np.dtype[Any]) -> Changes:
    """The changes in a segment of words of type ``words``, every number in them within its bounds.

    Raises:
        PeerFault: ``E_CHUNK``.
    """
    columns: tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]] = ([], [])
    for lo, hi in _ranges(classes.counts):
        for column in columns:
            column.append(decode_stream(cursor, hi - lo))
    tokens = np.concatenate([part for column in columns for part in column])
    if int(tokens.max()) >= MAX_TOKENS:
        raise PeerFault(E_CHUNK, "unknown token", expected=f"< {MAX_TOKENS}", got=int(tokens.max()))
    count = len(tokens) // 2
    numbers = _read_bits(cursor, _widths(tokens[:count], tokens[count:]))
    numbers[: 2 * count] += BASES[tokens]
    gaps, magnitudes, away = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    last = 2 ** (8 * words.itemsize - 1) - 1
    if (magnitudes > last).any() or (away[magnitudes == last] == 1).any():
        raise PeerFault(E_CHUNK, "a step of zero, or of more than half a circle", expected=f"< {last}")
    for c, (lo, hi) in zip(np.flatnonzero(classes.counts), _ranges(classes.counts), strict=True):
        reached = int(gaps[lo:hi].sum(dtype=np.uint64)) + hi - lo
        if reached > classes.populations[c]:
            raise PeerFault(
                E_CHUNK, "a gap leads out of the class", expected=f"<= {classes.populations[c]} words", got=reached
            )
    folded = (magnitudes << np.uint32(1) | away).astype(words)
    return Changes(classes.firsts, classes.populations, classes.counts, gaps, folded)


def _ranges(counts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where the changes of each class that has any lie."""
    ends = np.cumsum(counts)
    return [(int(hi - n), int(hi)) for hi, n in zip(ends, counts, strict=True) if n]


def _widths(gap_tokens: NDArray[np.uint8], magnitude_tokens: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Verbatim bits of all gaps, then of all magnitudes, then one for each direction."""
    directions = np.ones(len(gap_tokens), np.uint8)
    return np.concatenate([EXTRA_BITS[gap_tokens], EXTRA_BITS[magnitude_tokens], directions])


def _read_bits(cursor: Cursor, widths: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Numbers of the given widths from the next stream, which holds nothing else."""
    data = take_raw_stream(cursor)
    bits = int(widths.sum(dtype=np.int64))
    if len(data) != -(-bits // 8):
        raise PeerFault(E_CHUNK, "wrong number of verbatim bits", expected=f"{-(-bits // 8)} bytes", got=len(data))
    if bits % 8 and data[-1] >> (bits % 8):
        raise PeerFault(E_CHUNK, "padding bits are set", expected=0, got=int(data[-1]))
    return kernels.unpack_bits(data, widths)
