"""rANS: an order-0 entropy coder that comes within a fraction of a percent of a byte stream's entropy.

Range asymmetric numeral systems (Duda, arXiv:1311.2540) with a static table: frequencies out of 4,096, states of 32
bits that are refilled by 16, and as many interleaved states as the stream is long enough to pay for. Integers only, so
every machine decodes the same bytes. Spec: ``docs/spec/weight-diff.md``, "rANS".
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Frequencies of a table add up to 2^12.
PROBABILITY_BITS: Final = 12
#: States lie in [2^16, 2^32), begin at 2^16 where the encoder starts, and are back there when the decoder ends.
LOWEST_STATE: Final = 2**16
_TOTAL: Final = 1 << PROBABILITY_BITS
#: Most interleaved states.
MAX_LANES: Final = 32
#: Most bytes of a stream besides two for each byte it holds: the table, the states, one refill.
MOST_OVERHEAD: Final = 1 + 256 + 4 * MAX_LANES + 2
#: Bytes of a stream per interleaved state.
_BYTES_PER_LANE: Final = 8192
#: Fewest lanes for which a row at a time in numpy is faster than a byte at a time.
_ROW_LANES: Final = 8

#: Weight that each byte of a table stands for: three bits of mantissa, four of exponent; 0 means the byte is absent.
WEIGHTS: Final[NDArray[np.int64]] = np.array(
    [b if b < 16 else (8 + (b & 7)) << (b >> 3) - 1 for b in range(128)], np.int64
)


def lanes_of(count: int) -> int:
    """Interleaved states of a stream of ``count`` bytes: a power of two."""
    return int(lanes_of_all(np.array([count]))[0])


def lanes_of_all(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """(S,) :func:`lanes_of` each number of bytes."""
    doublings = np.searchsorted(_BYTES_PER_LANE * 2 ** np.arange(1, MAX_LANES.bit_length()), counts, side="right")
    return np.int64(1) << doublings


def pack(data: NDArray[np.uint8]) -> bytes:
    """Body of a stream: last byte of the table, the table, the states, the refills; nothing for nothing."""
    if not len(data):
        return b""
    table = table_for(np.bincount(data, minlength=256))
    states, refills = encode(data, frequencies(table))
    return b"".join([
        bytes([len(table) - 1]), table.tobytes(), states.astype("<u4").tobytes(), refills.astype("<u2").tobytes()
    ])


def unpack(body: NDArray[np.uint8], count: int) -> NDArray[np.uint8] | str:
    """The ``count`` bytes of a stream, or what is wrong with its body."""
    head = int(body[0]) + 2 if len(body) else 0
    table, rest, lanes = body[1:head], body[head:].tobytes(), lanes_of(count)
    if not head or len(table) != head - 1 or len(rest) < 4 * lanes or len(rest) % 2 or not count:
        return f"rANS stream too short: expected a table and {lanes} states, got {len(body)} bytes"
    if int(table.max()) >= len(WEIGHTS) or not table[-1]:
        return f"rANS table is malformed: expected numbers below {len(WEIGHTS)}, the last not 0"
    states = np.frombuffer(rest[: 4 * lanes], "<u4")
    if (states < LOWEST_STATE).any():
        return f"rANS state too small: expected >= {LOWEST_STATE}, got {states.min()}"
    raw = decode(states, np.frombuffer(rest[4 * lanes :], "<u2"), frequencies(table), count)
    return "rANS stream does not end where it must" if raw is None else raw


def table_for(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The table (see ``WEIGHTS``) that comes closest to these counts, up to the last byte that occurs."""
    counts = counts[: int(np.flatnonzero(counts)[-1]) + 1]
    scaled = np.where(counts > 0, np.maximum(counts * _TOTAL / max(int(counts.sum()), _TOTAL), 1.0), 0.0)
    above = np.minimum(np.searchsorted(WEIGHTS, scaled), len(WEIGHTS) - 1)
    below = np.maximum(above - 1, 0)
    nearer = np.where(WEIGHTS[above] - scaled <= scaled - WEIGHTS[below], above, below)
    return np.where(counts > 0, np.maximum(nearer, 1), 0).astype(np.uint8)


def frequencies(table: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """(256,) frequency of each byte, adding up to 2^12; at least 1 for every byte the table names.

    ``table`` holds numbers below 128, not all of them 0.
    """
    weights = np.zeros(256, np.int64)
    weights[: len(table)] = WEIGHTS[table]
    found: NDArray[np.int64] = weights * _TOTAL // weights.sum()
    found[(weights > 0) & (found == 0)] = 1
    excess = int(found.sum()) - _TOTAL
    if excess <= 0:
        found[np.argmax(found)] -= excess
        return found.astype(np.uint32)
    rest = found.tolist()
    for _ in range(excess):
        rest[rest.index(max(rest))] -= 1
    return np.array(rest, np.uint32)


def starts_of(frequency: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """(256,) first slot of each byte."""
    return (np.cumsum(frequency) - frequency).astype(np.uint32)


def encode(data: NDArray[np.uint8], frequency: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """States to begin decoding with, and the 16-bit numbers to refill them, in the decoder's order."""
    lanes = lanes_of(len(data))
    starts = starts_of(frequency)
    if lanes < _ROW_LANES:
        return _encode_bytes(data.tolist(), frequency.tolist(), starts.tolist(), lanes)
    states = np.full(lanes, LOWEST_STATE, np.uint64)
    refills: list[NDArray[np.uint16]] = []
    for row in range((len(data) - 1) // lanes, -1, -1):
        byte = data[row * lanes : (row + 1) * lanes]
        x, f = states[: len(byte)], frequency[byte].astype(np.uint64)
        full = x >= f << np.uint64(32 - PROBABILITY_BITS)
        refills.append(x[full].astype(np.uint16))
        x = np.where(full, x >> np.uint64(16), x)
        states[: len(byte)] = (x // f << np.uint64(PROBABILITY_BITS)) + x % f + starts[byte]
    return states.astype(np.uint32), np.concatenate(refills[::-1])


def decode(
    states: NDArray[np.uint32], refills: NDArray[np.uint16], frequency: NDArray[np.uint32], count: int
) -> NDArray[np.uint8] | None:
    """``count`` bytes; None when the refills are too few or too many or the states do not end where they must."""
    slots = np.repeat(np.arange(256, dtype=np.uint8), frequency)
    starts = starts_of(frequency)
    if len(states) < _ROW_LANES:
        return _decode_bytes(states.tolist(), refills.tolist(), frequency.tolist(), starts.tolist(), slots, count)
    lanes, at = len(states), 0
    x = states.astype(np.uint64)
    data = np.empty(count, np.uint8)
    for begin in range(0, count, lanes):
        y = x[: min(lanes, count - begin)]
        slot = (y & np.uint64(_TOTAL - 1)).astype(np.int64)
        byte = slots[slot]
        y = frequency[byte].astype(np.uint64) * (y >> np.uint64(PROBABILITY_BITS)) + slot.astype(np.uint64)
        y -= starts[byte]
        empty = np.flatnonzero(y < LOWEST_STATE)
        if at + len(empty) > len(refills):
            return None
        y[empty] = y[empty] << np.uint64(16) | refills[at : at + len(empty)]
        at += len(empty)
        x[: len(y)] = y
        data[begin : begin + len(y)] = byte
    return data if at == len(refills) and (x == LOWEST_STATE).all() else None


def _encode_bytes(
    data: list[int], frequency: list[int], starts: list[int], lanes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    states, refills = [LOWEST_STATE] * lanes, list[int]()
    for i in range(len(data) - 1, -1, -1):
        byte, x = data[i], states[i % lanes]
        f = frequency[byte]
        if x >= f << 32 - PROBABILITY_BITS:
            refills.append(x & 0xFFFF)
            x >>= 16
        states[i % lanes] = (x // f << PROBABILITY_BITS) + x % f + starts[byte]
    return np.array(states, np.uint32), np.array(refills[::-1], np.uint16)


def _decode_bytes(
    states: list[int], refills: list[int], frequency: list[int], starts: list[int], slots: NDArray[Any], count: int
) -> NDArray[np.uint8] | None:
    lanes, at, data, byte_of = len(states), 0, bytearray(count), slots.tolist()
    for i in range(count):
        x = states[i % lanes]
        slot = x & _TOTAL - 1
        byte = byte_of[slot]
        x = frequency[byte] * (x >> PROBABILITY_BITS) + slot - starts[byte]
        if x < LOWEST_STATE:
            if at == len(refills):
                return None
            x = x << 16 | refills[at]
            at += 1
        states[i % lanes] = x
        data[i] = byte
    done = at == len(refills) and all(x == LOWEST_STATE for x in states)
    return np.frombuffer(data, np.uint8) if done else None
