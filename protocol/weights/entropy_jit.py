"""Numba kernels of the entropy coder: same results as ``tokens`` and ``rans``. All release the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, types, uint8, uint16, uint32
from numpy.typing import NDArray

from protocol.jit import inlined, kernel, read_only
from protocol.weights.coder import STREAM_HEAD, Coder
from protocol.weights.rans import MAX_LANES
from protocol.weights.vector_jit import leading_zeros, read_16, read_32, read_64, write_16, write_32, write_64

_ONE, _SIXTEEN, _TOP_THREE = np.uint32(1), np.uint32(16), np.uint32(29)
_U0, _U1, _U3, _U7, _U8 = (np.uint64(n) for n in (0, 1, 3, 7, 8))
_U12, _U16, _U20, _U255 = (np.uint64(n) for n in (12, 16, 20, 255))
_RAW, _RANS, _FILL = int(Coder.RAW), int(Coder.RANS), int(Coder.FILL)
_STREAM_HEAD_BYTES = STREAM_HEAD.size
_LOW_12, _LOW_16, _LOWEST = (np.uint64(n) for n in (2**12 - 1, 2**16 - 1, 2**16))


@inlined
def token_of(value: np.uint32) -> np.uint8:
    """See ``tokens.tokens_of``."""
    octave = _TOP_THREE - leading_zeros(value | _SIXTEEN)
    token = (octave << np.uint32(2)) + (value >> octave) + np.uint32(4)
    return np.uint8(value if value < _SIXTEEN else token)


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


@kernel(int64(uint32[::1], read_only(uint8), read_only(uint32), uint8[::1]))
def rans_decode(
    states: NDArray[np.uint32], refills: NDArray[np.uint8], frequency: NDArray[np.uint32], data: NDArray[np.uint8]
) -> np.int64:
    """Fill ``data`` (see ``rans.decode``); how many refills that takes, even where there are fewer (but one).

    ``refills`` holds two bytes of each, the low one first.
    """
    slots, slot = np.empty(1 << 12, np.uint32), 0  # each: frequency - 1, place among the byte's slots, byte
    for byte in range(256):
        for place in range(frequency[byte]):
            slots[slot] = np.uint32((frequency[byte] - 1) << 20 | place << 8 | byte)
            slot += 1
    at, last, mask = _U0, np.uint64(len(refills) // 2 - 1), np.uint64(len(states) - 1)
    for i in range(np.uint64(len(data))):
        x = np.uint64(states[i & mask])
        entry, high = np.uint64(slots[x & _LOW_12]), x >> _U12
        data[i] = np.uint8(entry & _U255)
        x = (entry >> _U20) * high + high + ((entry >> _U8) & _LOW_12)
        refill, empty = np.uint64(read_16(refills, np.int64(min(at, last) << _U1))), x < _LOWEST
        x = x << _U16 | refill if empty else x
        at += np.uint64(empty)
        states[i & mask] = np.uint32(x)
    return np.int64(at)


# Many streams in one call: what lies between two kernels holds the GIL, and a thread that waits for it is put to sleep.


@kernel(types.void(read_only(uint8), read_only(int64), read_only(int64), read_only(int64), uint8[::1], int64[::1]))
def encode_streams(
    data: NDArray[np.uint8], counts_S: NDArray[np.int64], lanes_S: NDArray[np.int64], weights: NDArray[np.int64],
    out: NDArray[np.uint8], sizes_S: NDArray[np.int64],
) -> None:
    """S rANS streams of ``counts_S`` bytes each, which lie end to end in ``data``, end to end in ``out``."""
    counts, found = np.empty(256, np.int64), np.empty(256, np.uint32)
    starts, states = np.empty(256, np.uint32), np.empty(MAX_LANES, np.uint32)
    longest = np.int64(0)
    for count in counts_S:
        longest = max(longest, count)
    table, refills = np.empty(256, np.uint8), np.empty(longest + 1, np.uint16)
    begin, at = 0, 0
    for s in range(len(counts_S)):
        stream = data[begin : begin + counts_S[s]]
        begin += counts_S[s]
        sizes_S[s] = 0
        if not len(stream):
            continue
        counts[:] = 0
        count_bytes(stream, counts)
        last = 255
        while counts[last] == 0:
            last -= 1
        table_for(counts, weights, table[: last + 1])
        frequencies(table[: last + 1], weights, found)
        slot = np.uint32(0)
        for byte in range(256):
            starts[byte] = slot
            slot += found[byte]
        lanes = states[: lanes_S[s]]
        lanes[:] = np.uint32(_LOWEST)
        room = refills[: len(stream) + 1]
        first = rans_encode(stream, found, starts, lanes, room)
        end = at
        out[end] = np.uint8(last)
        out[end + 1 : end + last + 2] = table[: last + 1]
        end += last + 2
        for state in lanes:
            write_32(out, end, state)
            end += 4
        for k in range(first, len(room)):
            write_16(out, end, room[k])
            end += 2
        sizes_S[s], at = end - at, end


@kernel(types.boolean(read_only(uint8), read_only(int64), uint32[::1], uint8[::1]))
def _decode_rans(
    stream: NDArray[np.uint8], weights: NDArray[np.int64], states: NDArray[np.uint32], out: NDArray[np.uint8]
) -> bool:
    """Fill ``out`` from the body of a rANS stream with room for its states; False where it is malformed."""
    head = int(stream[0]) + 2 if len(stream) else 0
    body = head + 4 * len(states)
    if head == 0 or len(out) == 0 or len(stream) < body or (len(stream) - body) % 2:
        return False
    table = stream[1:head]
    if table.max() >= len(weights) or table[-1] == 0:
        return False
    for lane in range(len(states)):
        states[lane] = read_32(stream, head + 4 * lane)
        if np.uint64(states[lane]) < _LOWEST:
            return False
    found = np.empty(256, np.uint32)
    frequencies(table, weights, found)
    refills = stream[body:]
    used = rans_decode(states, refills if len(refills) else np.zeros(2, np.uint8), found, out)
    right = bool(2 * used == len(refills))
    for state in states:
        right &= bool(np.uint64(state) == _LOWEST)
    return right


@kernel(int64(
    read_only(uint8), int64, read_only(int64), read_only(int64), read_only(int64), uint8[::1], types.boolean[::1]
))
def decode_streams(
    chunk: NDArray[np.uint8], at: int, counts_S: NDArray[np.int64], lanes_S: NDArray[np.int64],
    weights: NDArray[np.int64], out: NDArray[np.uint8], done_S: NDArray[np.bool_],
) -> int:
    """The next S streams from ``at`` on, with their headers, end to end into ``out``; where they end in the chunk.

    ``done_S``, all False before, tells those that are there; the others are malformed, or by another coder.
    """
    states, place = np.empty(MAX_LANES, np.uint32), np.int64(0)
    for s in range(len(counts_S)):
        if len(chunk) - at < _STREAM_HEAD_BYTES:
            return at
        coder, size = chunk[at], int(read_32(chunk, at + 1))
        at += _STREAM_HEAD_BYTES
        if size > len(chunk) - at:
            return at
        stream, raw = chunk[at : at + size], out[place : place + counts_S[s]]
        at += size
        place += counts_S[s]
        if coder == _RANS:
            done_S[s] = _decode_rans(stream, weights, states[: lanes_S[s]], raw)
        elif coder == _RAW and size == len(raw):
            raw[:] = stream
            done_S[s] = True
        elif coder == _FILL and size == 1 and len(raw):
            raw[:] = stream[0]
            done_S[s] = True
    return at


@inlined
def all_known(chunk: NDArray[np.uint8], at: int, streams: int) -> bool:
    """Whether :func:`decode_streams` can decode streams that begin at ``at``, as far as their headers tell."""
    for _ in range(streams):
        if len(chunk) - at < _STREAM_HEAD_BYTES or (chunk[at] != _RAW and chunk[at] != _RANS and chunk[at] != _FILL):
            return False
        at += _STREAM_HEAD_BYTES + int(read_32(chunk, at + 1))
    return True


@inlined
def raw_size(chunk: NDArray[np.uint8], at: int) -> int:
    """How many bytes the stream at ``at`` stores as they are; -1 where it is malformed, or coded."""
    if len(chunk) - at < _STREAM_HEAD_BYTES or chunk[at] != _RAW:
        return -1
    size = int(read_32(chunk, at + 1))
    return size if size <= len(chunk) - at - _STREAM_HEAD_BYTES else -1


@kernel(*(
    types.void(read_only(uint32), read_only(w), read_only(int64), uint32[::1], uint8[::1], uint8[::1])
    for w in (uint16, uint32)
))
def split(
    gaps: NDArray[np.uint32], folded: NDArray[Any], counts_C: NDArray[np.int64], numbers: NDArray[np.uint32],
    tokens: NDArray[np.uint8], columns: NDArray[np.uint8],
) -> None:
    """Fill ``numbers``, ``tokens`` and ``columns`` (see ``columns.split``)."""
    n = len(gaps)
    numbers[:n] = gaps
    for i in range(n):
        numbers[n + i] = np.uint32(folded[i]) >> _ONE
    for i in range(2 * n):
        tokens[i] = token_of(numbers[i])
    lo, at = 0, 0
    for count in counts_C:
        columns[at : at + count] = tokens[lo : lo + count]
        columns[at + count : at + 2 * count] = tokens[n + lo : n + lo + count]
        at += 2 * count
        for byte in range(count >> 3):
            bits = np.uint32(0)
            for bit in range(8):
                bits |= (np.uint32(folded[lo + 8 * byte + bit]) & _ONE) << np.uint32(bit)
            columns[at + byte] = np.uint8(bits)
        if count & 7:
            bits = np.uint32(0)
            for bit in range(count & 7):
                bits |= (np.uint32(folded[lo + (count & ~7) + bit]) & _ONE) << np.uint32(bit)
            columns[at + (count >> 3)] = np.uint8(bits)
        at += (count + 7) >> 3
        lo += count


@kernel(types.boolean(read_only(uint8), read_only(int64), uint8[::1], uint8[::1]))
def gather(
    columns: NDArray[np.uint8], counts_C: NDArray[np.int64], tokens: NDArray[np.uint8], away: NDArray[np.uint8]
) -> bool:
    """Fill ``tokens`` and ``away`` (see ``columns.gather``); False where padding bits are set."""
    n, lo, at, right = len(away), 0, 0, True
    for count in counts_C:
        tokens[lo : lo + count] = columns[at : at + count]
        tokens[n + lo : n + lo + count] = columns[at + count : at + 2 * count]
        at += 2 * count
        for byte in range(count >> 3):
            for bit in range(8):
                away[lo + 8 * byte + bit] = columns[at + byte] >> np.uint8(bit) & np.uint8(1)
        for bit in range(count & 7):
            away[lo + (count & ~7) + bit] = columns[at + (count >> 3)] >> np.uint8(bit) & np.uint8(1)
        if count & 7:
            right &= columns[at + (count >> 3)] >> (count & 7) == 0
        at += (count + 7) >> 3
        lo += count
    return right
