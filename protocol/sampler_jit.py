"""Numba kernels of the sampler. Imported only where speed matters: importing numba takes a good part of a second.

The arithmetic is that of ``protocol.prng``, operation by operation. ``fastmath`` must stay off and nothing here may be
fused: a single contracted multiply-add would change draws.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import float64, int64, uint64
from numpy.typing import NDArray

from protocol.prng import HEAD_DOMAIN, ID_STEP, LN2, MIX_1, MIX_2, POSITION_STEP, SERIES, SQRT_HALF, TAIL_DOMAIN, TAIL_ID
from protocol.rollout import NO_CODE

_MIX_1, _MIX_2 = np.uint64(MIX_1), np.uint64(MIX_2)
_POSITION_STEP, _ID_STEP = np.uint64(POSITION_STEP), np.uint64(ID_STEP)
_HEAD, _TAIL, _TAIL_ID = np.uint64(HEAD_DOMAIN), np.uint64(TAIL_DOMAIN), np.uint64(TAIL_ID)
_S1, _S12, _S27, _S30, _S31 = (np.uint64(n) for n in (1, 12, 27, 30, 31))
_NO_CODE = np.uint16(NO_CODE)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10 = SERIES
#: -ln u >= 1 - u, so an entry with SAFE (1 - u) / W above the best score cannot win; 1e-4 is far beyond rounding.
_SAFE = 0.9999


@numba.njit(uint64(uint64), cache=True, inline="always")
def _mix64(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@numba.njit(uint64(uint64[::1], uint64, uint64), cache=True, inline="always")
def _row_key(words: NDArray[np.uint64], position: np.uint64, domain: np.uint64) -> np.uint64:
    counter = (position << _S1) | domain
    return words[2] ^ _mix64(words[1] ^ _mix64(words[0] + counter * _POSITION_STEP))


@numba.njit(float64(uint64, uint64, uint64), cache=True, inline="always")
def _uniform(k3: np.uint64, key: np.uint64, token: np.uint64) -> float:
    h = _mix64(k3 ^ _mix64(key + token * _ID_STEP))
    return (np.float64(h >> _S12) + 0.5) * 2.0**-52


@numba.njit(float64(float64), cache=True, inline="always")
def _exponential(u: float) -> float:
    m, exponent = math.frexp(u)
    k = -exponent
    if m < SQRT_HALF:
        m = m + m
        k = k + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = _C10 * z + _C9
    p = p * z + _C8
    p = p * z + _C7
    p = p * z + _C6
    p = p * z + _C5
    p = p * z + _C4
    p = p * z + _C3
    p = p * z + _C2
    p = p * z + _C1
    p = p * z + _C0
    return np.float64(k) * LN2 - s * p


@numba.njit(float64[::1](float64[::1]), cache=True)
def exponentials(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """E of each element; for tests of bit equality."""
    e = np.empty_like(u)
    for i in range(len(u)):
        e[i] = _exponential(u[i])
    return e


@numba.njit(cache=True)
def replay(
    tokens: NDArray[np.uint32], head_lengths: NDArray[np.uint8], head_ids: NDArray[np.uint32],
    head_codes: NDArray[np.uint16], tail_codes: NDArray[np.uint16], token_codes: NDArray[np.uint16],
    weights: NDArray[np.float64], words: NDArray[np.uint64],
) -> int:
    """First position whose token is not the one selected, -1 when there is none (see ``sampler.replay``)."""
    k3 = words[3]
    end = 0
    for t in range(len(tokens)):
        start, end = end, end + np.int64(head_lengths[t])
        token = np.uint64(tokens[t])
        key = _row_key(words, np.uint64(t), _HEAD)
        best, winner, in_head = math.inf, _TAIL_ID, False
        for i in range(start, end):
            candidate = np.uint64(head_ids[i])
            in_head = in_head or candidate == token
            u = _uniform(k3, key, candidate)
            weight = weights[head_codes[i]]
            if (1.0 - u) * _SAFE > best * weight:
                continue
            score = _exponential(u) / weight
            if score < best or (score == best and candidate < winner):
                best, winner = score, candidate
        tail_weight = weights[tail_codes[t]]
        if tail_weight > 0.0 and _exponential(_uniform(k3, key, _TAIL_ID)) / tail_weight < best:
            if token_codes[t] == _NO_CODE or in_head:
                return t
        elif token_codes[t] != _NO_CODE or winner != token:
            return t
    return -1


@numba.njit(int64(float64[::1], uint64[::1], uint64), cache=True)
def tail_race(masses_V: NDArray[np.float64], words: NDArray[np.uint64], position: np.uint64) -> int:
    """Id that wins the tail race, head ids having mass 0; -1 when there is no mass."""
    k3, key = words[3], _row_key(words, position, _TAIL)
    best, winner = math.inf, -1
    for token in range(len(masses_V)):
        mass = masses_V[token]
        if mass <= 0.0:
            continue
        u = _uniform(k3, key, np.uint64(token))
        if (1.0 - u) * _SAFE > best * mass:
            continue
        score = _exponential(u) / mass
        if score < best:
            best, winner = score, token
    return winner
