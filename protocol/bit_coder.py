"""An adaptive binary arithmetic coder: every bit is predicted by several contexts whose opinions are mixed.

Integers only, so that every machine takes the same decisions. One code path writes and reads: a function gets the value
to write, or anything when reading, and returns the value. Spec: ``docs/spec/packed-bundle.md``, "Coder".

Sources: arithmetic coding after Witten, Neal and Cleary (1987) in the carry-free form with two bounds; logistic mixing
after Mahoney (2005, "Adaptive weighing of context models for lossless data compression").

Legend: C contexts of a symbol, S slots of a context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from protocol.jit import inlined
from protocol.weight_table import exp_minus_powers

# Changing any constant below changes what packed bundles mean.
#: Most contexts of a symbol.
MAX_CONTEXTS: Final = 6
#: Sets of mixing weights.
SETS: Final = 192
#: A slot holds the probability of a one in its upper 22 bits and how often it was used in its lower 10.
EVEN: Final = 1 << 31
#: A slot's adaption never gets slower than one in about this many.
_MOST: Final = 255
#: Weights of the mixture have 16 fractional bits; each starts here.
_FIRST_WEIGHT: Final = 20_000
#: Classes of counts, each with weights of its own.
_CLASSES: Final = 10
#: Logits are clipped to +-8 nats and counted in 1/256 nat.
_CLIP: Final = 2047
_M32: Final = 0xFFFFFFFF
#: Bytes past the end after which a reader stops.
_PAST: Final = 64

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """The function compiled by numba, or as it is where numba is missing. The results are the same."""
    try:
        import numba
    except ImportError:
        return function
    try:
        return inlined(function)
    except RuntimeError:  # nowhere to keep compiled code
        return numba.njit(function)  # type: ignore[no-any-return]


class Coder(NamedTuple):
    """Everything a coder knows; all arrays, so that compiled code can change them in place."""

    state: NDArray[np.int64]  #: (5,) writing?, low, high, word, position in ``buffer``
    buffer: NDArray[np.uint8]  #: bytes to read, or room to write
    slots: NDArray[np.uint32]  #: (C, S) by hashed context; 16 neighbours serve the bits that follow each other
    weights: NDArray[np.int64]  #: (sets, C, classes)
    work: NDArray[np.int64]  #: (3, C) hashed contexts of the symbol at hand; their lines of slots; their logits


def writer(room: int, slot_bits: int) -> Coder:
    """A coder that writes up to ``room`` bytes."""
    return _coder(np.zeros(room, np.uint8), slot_bits, word=-1)


def reader(data: bytes, slot_bits: int) -> Coder:
    """A coder that reads ``data``; past its end it reads zeros."""
    word = int.from_bytes(data[:4].ljust(4, b"\0"), "big")
    coder = _coder(np.frombuffer(data, np.uint8).copy(), slot_bits, word)
    coder.state[4] = 4
    return coder


def written(coder: Coder) -> bytes | None:
    """What was written, or None when there was no room for it."""
    at = int(coder.state[4])
    if at >= len(coder.buffer):
        return None
    return coder.buffer[:at].tobytes() + bytes([(int(coder.state[1]) >> 24) + 1])


def ended(coder: Coder) -> bool:
    """Whether a reader has come to the end of its data, not sooner and not later."""
    return int(coder.state[4]) == len(coder.buffer) + 3


def _coder(buffer: NDArray[np.uint8], slot_bits: int, word: int) -> Coder:
    return Coder(
        np.array([word < 0, 0, _M32, word, 0], np.int64), buffer,
        np.full((MAX_CONTEXTS, 1 << slot_bits), EVEN, np.uint32),
        np.full((SETS, MAX_CONTEXTS, _CLASSES), _FIRST_WEIGHT, np.int64), np.zeros((3, MAX_CONTEXTS), np.int64),
    )


def _logistic() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(squash, stretch): the logistic function and its inverse, evaluated with integers only."""
    one, powers = exp_minus_powers(256, _CLIP + 1)
    squash = np.zeros(2 * _CLIP + 1, np.int64)
    for d, power in enumerate(powers):
        low = 65_536 * power // (one + power)
        squash[_CLIP - d], squash[_CLIP + d] = low, 65_536 - low
    stretch = np.minimum(np.searchsorted(squash, 16 * np.arange(4096) + 8), 2 * _CLIP) - _CLIP
    return squash, stretch.astype(np.int64)


#: (4095,) logit + 2047 -> probability of 16 bits; (4096,) upper 12 bits of a probability -> logit.
SQUASH, STRETCH = _logistic()
_COUNTS = np.arange(_MOST + 1)
#: (256,) by count: share of its surprise that a slot learns, 16 bits; class of its weights.
_SHARES = 131_072 // (2 * _COUNTS + 3)
_CLASS = np.array([count if count < 4 else count.bit_length() + 1 for count in range(_MOST + 1)])


@compiled
def past(coder: Coder) -> bool:
    """Whether a reader has gone so far past the end of its data that it may stop: only zeros come from there."""
    return bool(coder.state[0] == 0 and coder.state[4] > len(coder.buffer) + _PAST)


@compiled
def hashed(a: int, b: int, c: int) -> int:
    """32-bit hash of three non-negative integers."""
    h = (int(a) * 0x9E3779B1 + int(b) * 0x85EBCA6B + int(c) * 0xC2B2AE35 + 0x165667B1) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return h ^ (h >> 13)


@compiled
def _code_bit(coder: Coder, contexts: int, weight_set: int, node: int, bit: int) -> int:
    """Write ``bit`` or read one, predicted by slot ``node`` (0 to 15) of each context's line."""
    state, buffer, slots, work = coder.state, coder.buffer, coder.slots, coder.work
    weights = coder.weights[weight_set]
    dot = 0
    for c in range(contexts):
        slot = np.int64(slots[c, work[1, c] + node])
        work[2, c] = STRETCH[slot >> 20]
        dot += weights[c, _CLASS[slot & 1023]] * work[2, c]
    p = SQUASH[min(max(dot >> 16, -2047), 2047) + 2047]
    # The arithmetic coder: split [low, high] in the ratio of the prediction and keep the bit's part.
    low, high = state[1], state[2]
    split = low + ((high - low) * p >> 16)
    if state[0] == 0:
        bit = 1 if state[3] <= split else 0
    if bit == 1:
        high = split
    else:
        low = split + 1
    while (low ^ high) >> 24 == 0:
        at = state[4]
        if state[0] == 0:
            state[3] = ((state[3] << 8) & 0xFFFFFFFF) | (np.int64(buffer[at]) if at < len(buffer) else np.int64(0))
        elif at < len(buffer):
            buffer[at] = low >> 24
        state[4] = at + 1
        low, high = (low << 8) & 0xFFFFFFFF, ((high << 8) & 0xFFFFFFFF) | 0xFF
    state[1], state[2] = low, high
    # What came is learned by the slots and by the weights.
    error = ((bit << 16) - p) * 14
    target = 4194303 if bit == 1 else 0
    for c in range(contexts):
        place = work[1, c] + node
        slot = np.int64(slots[c, place])
        count, probability = slot & 1023, slot >> 10
        weights[c, _CLASS[count]] += (work[2, c] * error + 131072) >> 18
        probability += ((target - probability) * _SHARES[count]) >> 16
        slots[c, place] = (probability << 10) | min(count + 1, 255)
    return bit


@compiled
def code_number(coder: Coder, contexts: int, weight_set: int, width: int, gamma: bool, value: int) -> int:
    """Write or read a number in the first ``contexts`` contexts of ``coder.work[0]``.

    Either ``width`` bits, the highest first (weight sets ``weight_set`` to ``weight_set + width - 1``), or an Elias
    gamma code of a number below 2^(width + 1) - 1: the length in unary, then that many bits (32 weight sets).
    """
    work, mask = coder.work, coder.slots.shape[1] - 16
    length, wanted = width, width
    if gamma:
        value, length, wanted = value + 1, 0, 0
        while wanted < width and value >> (wanted + 1):
            wanted += 1
    unary, k = gamma, 0  # k bits of the length, or of what follows it, are done
    path, node = 1, 1
    while unary or k < length:
        if k % (16 if unary else 4) == 0:
            # The next bits have a line of slots of their own in every context.
            step = (int(path) * 0x9E3779B1 + (length if gamma else 77) * 0x85EBCA6B + unary) & 0xFFFFFFFF
            for c in range(contexts):
                h = ((work[0, c] ^ step) * 0x2C1B3C6D) & 0xFFFFFFFF
                work[1, c] = (h ^ (h >> 15)) & mask
            node = 1
        bit = 1 if k < wanted else 0
        chosen = min(k, 15)
        if not unary:
            bit = (value >> (length - 1 - k)) & 1
            chosen = 16 + min(length, 15) if gamma else k
        bit = _code_bit(coder, contexts, weight_set + chosen, k % 16 if unary else node, bit)
        k += 1
        if not unary:
            path, node = 2 * path + bit, 2 * node + bit
        elif bit == 0 or k == width:
            length, unary, k = length + bit, False, 0
        else:
            length += 1
    return path - 1 if gamma else path - (1 << width)
