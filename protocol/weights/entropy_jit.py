"""Numba kernels of the entropy coder: same results as ``tokens`` and ``rans``. All release the GIL."""

from __future__ import annotations

import numpy as np
from numba import int64, types, uint8, uint16, uint32
from numpy.typing import NDArray

from protocol.weights.jit import inlined, kernel, read_only
from protocol.weights.vector_jit import leading_zeros, read_64, write_64

_ONE, _SIXTEEN, _TOP_THREE = np.uint32(1), np.uint32(16), np.uint32(29)
_U0, _U1, _U3, _U7, _U8 = (np.uint64(n) for n in (0, 1, 3, 7, 8))
_U12, _U16, _U20, _U255 = (np.uint64(n) for n in (12, 16, 20, 255))
_LOW_12, _LOW_16, _LOWEST = (np.uint64(n) for n in (2**12 - 1, 2**16 - 1, 2**16))


@inlined
def token_of(value: np.uint32) -> np.uint8:
    """See ``tokens.tokens_of``."""
    octave = _TOP_THREE - leading_zeros(value | _SIXTEEN)
    token = (octave << np.uint32(2)) + (value >> octave) + np.uint32(4)
    return np.uint8(value if value < _SIXTEEN else token)


@kernel(types.void(read_only(uint32), uint8[::1]))
def tokenise(values: NDArray[np.uint32], tokens: NDArray[np.uint8]) -> None:
    """Token of each number (see ``tokens.tokens_of``)."""
    for i in range(len(values)):
        tokens[i] = token_of(values[i])


@kernel(int64(read_only(uint8), read_only(uint8)))
def extra_bits(tokens: NDArray[np.uint8], extra_bits: NDArray[np.uint8]) -> np.int64:
    """How many extra bits these tokens have (see ``tokens.extra_bytes``)."""
    bits = np.int64(0)
    for i in range(len(tokens)):
        bits += np.int64(extra_bits[tokens[i]])
    return bits


@kernel(types.void(read_only(uint32), read_only(uint8), read_only(uint8), uint8[::1]))
def pack_extras(
    values: NDArray[np.uint32], tokens: NDArray[np.uint8], extra_bits: NDArray[np.uint8], data: NDArray[np.uint8]
) -> None:
    """Extra bits of each number, one after the other (see ``tokens.pack_extras``); ``data`` ends 8 bytes later."""
    held, count, at = _U0, _U0, np.int64(0)
    for i in range(len(values)):
        width = np.uint64(extra_bits[tokens[i]])
        held |= (np.uint64(values[i]) & ((_U1 << width) - _U1)) << count
        write_64(data, at, held)
        count += width
        held >>= count & ~_U7
        at += np.int64(count >> _U3)
        count &= _U7


@kernel(types.void(read_only(uint8), read_only(uint8), read_only(uint8), read_only(uint32), uint32[::1]))
def numbers(
    tokens: NDArray[np.uint8], data: NDArray[np.uint8], extra_bits: NDArray[np.uint8], bases: NDArray[np.uint32],
    values: NDArray[np.uint32],
) -> None:
    """The number of each token and its extra bits (see ``tokens.numbers_of``); ``data`` ends 8 bytes later."""
    bit = _U0
    for i in range(len(tokens)):
        width = np.uint64(extra_bits[tokens[i]])
        held = read_64(data, np.int64(bit >> _U3)) >> (bit & _U7)
        values[i] = np.uint32(np.uint64(bases[tokens[i]]) + (held & ((_U1 << width) - _U1)))
        bit += width


@kernel(types.void(read_only(uint8), int64[::1]))
def count_bytes(data: NDArray[np.uint8], counts: NDArray[np.int64]) -> None:
    """How often each byte occurs."""
    others = np.zeros(256, np.int64)  # equal neighbours do not wait for each other
    for i in range(1, len(data), 2):
        counts[data[i - 1]] += 1
        others[data[i]] += 1
    if len(data) % 2:
        counts[data[-1]] += 1
    for byte in range(256):
        counts[byte] += others[byte]


@kernel(types.void(read_only(int64), read_only(int64), uint8[::1]))
def table_for(counts: NDArray[np.int64], weights: NDArray[np.int64], table: NDArray[np.uint8]) -> None:
    """Fill ``table``, as long as the last byte that occurs is large (see ``rans.table_for``)."""
    total = np.int64(0)
    for byte in range(len(table)):
        total += counts[byte]
    total = max(total, np.int64(1 << 12))
    for byte in range(len(table)):
        table[byte] = 0
        if counts[byte] == 0:
            continue
        scaled = max(np.float64(counts[byte] << 12) / np.float64(total), 1.0)
        low, high = 0, len(weights) - 1
        while low < high:
            middle = (low + high) >> 1
            if np.float64(weights[middle]) < scaled:
                low = middle + 1
            else:
                high = middle
        below = max(low - 1, 0)
        nearer = low if np.float64(weights[low]) - scaled <= scaled - np.float64(weights[below]) else below
        table[byte] = np.uint8(max(nearer, 1))


@kernel(types.void(read_only(uint8), read_only(int64), uint32[::1]))
def frequencies(table: NDArray[np.uint8], weights: NDArray[np.int64], found: NDArray[np.uint32]) -> None:
    """Fill the 256 numbers of ``found`` (see ``rans.frequencies``)."""
    total = np.int64(0)
    for byte in range(len(table)):
        total += weights[table[byte]]
    found[:] = 0
    used, largest = np.int64(0), 0
    for byte in range(len(table)):
        weight = weights[table[byte]]
        if weight:
            found[byte] = np.uint32(max((weight << 12) // total, 1))
        used += np.int64(found[byte])
        if found[byte] > found[largest]:
            largest = byte
    if used <= 1 << 12:
        found[largest] += np.uint32((1 << 12) - used)
    while used > 1 << 12:
        largest = 0
        for byte in range(len(table)):
            if found[byte] > found[largest]:
                largest = byte
        found[largest] -= _ONE
        used -= 1


# Whether a state is refilled is as good as random, so neither of the next two loops branches on it.


@kernel(int64(read_only(uint8), read_only(uint32), read_only(uint32), uint32[::1], uint16[::1]))
def rans_encode(
    data: NDArray[np.uint8], frequency: NDArray[np.uint32], starts: NDArray[np.uint32], states: NDArray[np.uint32],
    refills: NDArray[np.uint16],
) -> np.int64:
    """Fill ``refills`` from its end and set ``states`` (see ``rans.encode``); where in ``refills`` they begin.

    ``refills`` has room for one more than there are bytes.
    """
    at, mask = np.uint64(len(refills) - 1), np.uint64(len(states) - 1)
    for back in range(np.uint64(len(data))):
        i = np.uint64(len(data)) - _U1 - back
        byte, x = data[i], np.uint64(states[i & mask])
        f = np.uint64(frequency[byte])
        full = x >= f << _U20
        refills[at] = np.uint16(x & _LOW_16)
        at -= np.uint64(full)
        x = x >> _U16 if full else x
        quotient = np.uint64(np.uint32(x) // np.uint32(f))
        states[i & mask] = np.uint32((quotient << _U12) + (x - quotient * f) + np.uint64(starts[byte]))
    return np.int64(at + _U1)


@kernel(int64(uint32[::1], read_only(uint16), read_only(uint32), uint8[::1]))
def rans_decode(
    states: NDArray[np.uint32], refills: NDArray[np.uint16], frequency: NDArray[np.uint32], data: NDArray[np.uint8]
) -> np.int64:
    """Fill ``data`` (see ``rans.decode``); how many refills that takes, even where there are fewer (but one)."""
    slots, slot = np.empty(1 << 12, np.uint32), 0  # each: frequency - 1, place among the byte's slots, byte
    for byte in range(256):
        for place in range(frequency[byte]):
            slots[slot] = np.uint32((frequency[byte] - 1) << 20 | place << 8 | byte)
            slot += 1
    at, last, mask = _U0, np.uint64(len(refills) - 1), np.uint64(len(states) - 1)
    for i in range(np.uint64(len(data))):
        x = np.uint64(states[i & mask])
        entry, high = np.uint64(slots[x & _LOW_12]), x >> _U12
        data[i] = np.uint8(entry & _U255)
        x = (entry >> _U20) * high + high + ((entry >> _U8) & _LOW_12)
        refill, empty = np.uint64(refills[min(at, last)]), x < _LOWEST
        x = x << _U16 | refill if empty else x
        at += np.uint64(empty)
        states[i & mask] = np.uint32(x)
    return np.int64(at)
