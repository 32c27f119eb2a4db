"""The body of an XC segment: a record and three streams per class, and the extra bits of all tokens.

Spec: ``docs/spec/weight-diff.md``, "Exponent classes".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PeerFault
from protocol.weights import columns, kernels
from protocol.weights.classes import Changes
from protocol.weights.coder import Coder
from protocol.weights.streams import (
    E_CHUNK,
    Cursor,
    decode_streams,
    encode_raw_stream,
    encode_streams,
    take_raw_stream,
)
from protocol.weights.tokens import MAX_TOKENS

_Bytes = NDArray[np.uint8]

_CLASS: Final = np.dtype([("first", "u1"), ("population", "<u4"), ("count", "<u4")])


@dataclass(frozen=True)
class Classes:
    """The class records of a segment, each number checked against the others; (C,) arrays as in ``Changes``."""

    firsts: NDArray[np.uint8]
    populations: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def streams(self) -> int:
        """How many streams follow: three per class with changes, and the extra bits."""
        return 3 * int(np.count_nonzero(self.counts)) + 1


def encode_body(changes: Changes, entropy: Coder = Coder.ZSTD) -> bytes:
    """Everything of an XC segment behind its header; ``entropy`` codes the tokens."""
    records = np.empty(len(changes.firsts), _CLASS)
    records["first"], records["population"], records["count"] = changes.firsts, changes.populations, changes.counts
    parts = [records.tobytes()]
    numbers, tokens, laid = kernels.split(changes.gaps, changes.folded, changes.counts)
    parts += encode_streams(laid, columns.sizes_of(changes.counts), entropy)
    return b"".join([*parts, encode_raw_stream(kernels.pack_extras(numbers, tokens).tobytes())])


def read_classes(cursor: Cursor, classes: int, count: int, population: int) -> Classes:
    """The records of ``classes`` classes of a segment with ``count`` changes among ``population`` words.

    Raises:
        PeerFault: ``E_CHUNK`` when they do not add up.
    """
    records = np.frombuffer(cursor.take(_CLASS.itemsize * classes), _CLASS)
    firsts, populations, counts = (records[name].tolist() for name in ("first", "population", "count"))
    if not classes or firsts[0] or any(after <= before for before, after in pairwise(firsts)):
        raise PeerFault(E_CHUNK, "classes are not ascending ranges of keys from 0", got=firsts)
    exceeded = any(n > words for n, words in zip(counts, populations, strict=True))
    if sum(populations) != population or sum(counts) != count or exceeded:
        raise PeerFault(
            E_CHUNK, "populations and counts of classes do not add up", expected=f"{population} words, {count} changes",
            got=f"{sum(populations)} words, {sum(counts)} changes",
        )
    return Classes(np.array(firsts, np.uint8), np.array(populations, np.int64), np.array(counts, np.int64))


def decode_body(cursor: Cursor, classes: Classes, words: np.dtype[Any]) -> Changes:
    """The changes in a segment of words of type ``words``, every number in them within its bounds.

    Raises:
        PeerFault: ``E_CHUNK``.
    """
    whole = kernels.decode_body(cursor.whole, cursor.place, classes.populations, classes.counts, words)
    if whole is not None:
        return Changes(classes.firsts, classes.populations, classes.counts, *whole)
    count = int(classes.counts.sum())
    laid = decode_streams(cursor, columns.sizes_of(classes.counts))
    gathered = kernels.gather(laid, classes.counts)
    if gathered is None:
        raise PeerFault(E_CHUNK, "padding bits of directions are set")
    tokens, away = gathered
    if int(tokens.max()) >= MAX_TOKENS:
        raise PeerFault(E_CHUNK, "unknown token", expected=f"< {MAX_TOKENS}", got=int(tokens.max()))
    numbers = kernels.numbers_of(tokens, _read_extras(cursor, tokens))
    joined = kernels.join(numbers, away, classes.counts, words)
    if joined is None:
        raise PeerFault(E_CHUNK, "a step of zero, or of more than half a circle")
    folded, reached = joined
    if (reached > classes.populations).any():
        raise PeerFault(
            E_CHUNK, "a gap leads out of the class", expected=f"<= {classes.populations.tolist()} words",
            got=reached.tolist(),
        )
    return Changes(classes.firsts, classes.populations, classes.counts, numbers[:count], folded)


def _read_extras(cursor: Cursor, tokens: _Bytes) -> _Bytes:
    """The extra bits of ``tokens`` from the next stream, which holds nothing else."""
    data = take_raw_stream(cursor)
    size, padding = kernels.extra_bytes(tokens)
    if len(data) != size:
        raise PeerFault(E_CHUNK, "wrong number of extra bits", expected=f"{size} bytes", got=len(data))
    if padding and int(data[-1]) >> (8 - padding):
        raise PeerFault(E_CHUNK, "padding bits are set", expected=0, got=int(data[-1]) >> (8 - padding))
    return data
