"""Tokens: numbers as one byte each, for an entropy coder, and the bits that are not worth coding.

Numbers below 16 are their own token. Above, a token names the place of the leading bit and the two bits behind it; the
rest of the number, its *extra bits*, is stored verbatim. Spec: ``docs/spec/weight-diff.md``, "Tokens".
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Numbers that are looked at together.
_BLOCK: Final = 2**16
#: Numbers below this are their own token.
LITERALS: Final = 16
#: Tokens from here on would stand for numbers of more than 32 bits.
MAX_TOKENS: Final = LITERALS + 4 * (32 - 4)
#: How many extra bits each token has; unused tokens have none.
EXTRA_BITS: Final[NDArray[np.uint8]] = np.zeros(256, np.uint8)
#: Smallest number of each token.
BASES: Final[NDArray[np.uint32]] = np.zeros(256, np.uint32)
for _token in range(MAX_TOKENS):
    _octave, _quarter = divmod(_token - LITERALS, 4)
    EXTRA_BITS[_token] = 0 if _token < LITERALS else _octave + 2
    BASES[_token] = _token if _token < LITERALS else (4 + _quarter) << (_octave + 2)


def tokens_of(values: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """(n,) token of each number."""
    leading = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1
    quarters = values.astype(np.int64) >> np.maximum(leading - 2, 0) & 3
    return np.where(values < LITERALS, values, LITERALS + 4 * (leading - 4) + quarters).astype(np.uint8)


def extra_bytes(tokens: NDArray[np.uint8]) -> tuple[int, int]:
    """How many bytes hold the extra bits of these tokens, and how many bits of the last are padding."""
    bits = int(np.bincount(tokens, minlength=256) @ EXTRA_BITS.astype(np.int64))
    return -(-bits // 8), -bits % 8


def pack_extras(values: NDArray[np.uint32], tokens: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Extra bits of numbers with these tokens, lowest bit first, padded with zeros to whole bytes."""
    widths = EXTRA_BITS[tokens]
    shifts, _ = _spread(widths)
    bits = np.repeat(values, widths) >> shifts & np.uint32(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def numbers_of(tokens: NDArray[np.uint8], data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The numbers; inverse of :func:`tokens_of` and :func:`pack_extras`. ``data`` holds all extra bits."""
    numbers, bit = np.empty(len(tokens), np.uint32), 0
    for at in range(0, len(tokens), _BLOCK):  # as every bit takes many bytes on its way
        block = tokens[at : at + _BLOCK]
        widths = EXTRA_BITS[block]
        shifts, ends = _spread(widths)
        end = bit + len(shifts)
        bits = np.unpackbits(data[bit // 8 : -(-end // 8)], bitorder="little")[bit % 8 : bit % 8 + len(shifts)]
        totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(bits.astype(np.uint64) << shifts, dtype=np.uint64)])
        numbers[at : at + _BLOCK] = BASES[block] + (totals[ends] - totals[ends - widths]).astype(np.uint32)
        bit = end
    return numbers


def _spread(widths: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """For each bit its place within its number, and for each number where its bits end."""
    ends = np.cumsum(widths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return (np.arange(total) - np.repeat(ends - widths, widths)).astype(np.uint32), ends
