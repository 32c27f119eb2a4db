"""Numba kernels of the sampler. Imported only where speed matters: importing numba takes a good part of a second.

The arithmetic is that of ``protocol.prng``, operation by operation. ``fastmath`` must stay off and nothing may be
fused: a single contracted multiply-add would change draws.

Legend: B rows of a batch, R rows of it whose tail won, V vocabulary, K entries of a head, T tokens of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import float64, int64, uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from protocol.jit import inlined, kernel
from protocol.jit import read_only as _of
from protocol.prng import (
    HEAD_DOMAIN,
    ID_STEP,
    LN2,
    MIX_1,
    MIX_2,
    POSITION_STEP,
    SERIES,
    SQRT_HALF,
    TAIL_DOMAIN,
    TAIL_ID,
)
from protocol.rollout import NO_CODE

_MIX_1, _MIX_2 = np.uint64(MIX_1), np.uint64(MIX_2)
_POSITION_STEP, _ID_STEP = np.uint64(POSITION_STEP), np.uint64(ID_STEP)
_HEAD, _TAIL, _TAIL_ID = np.uint64(HEAD_DOMAIN), np.uint64(TAIL_DOMAIN), np.uint64(TAIL_ID)
_S1, _S12, _S27, _S30, _S31, _S33 = (np.uint64(n) for n in (1, 12, 27, 30, 31, 33))
_NO_CODE = np.uint16(NO_CODE)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10 = SERIES
#: With v = 1 - u, -ln u >= v + v^2 / 2 + v^3 / 3, so an entry with SAFE times that over W above the best score cannot
#: win; 1e-4 is far beyond rounding.
_SAFE = 0.9999
_THIRD = 1.0 / 3.0

_F = TypeVar("_F", bound=Callable[..., Any])


def _kernel(result: Any, *arguments: Any) -> Callable[[_F], _F]:
    """A kernel for one signature."""
    return kernel(result(*arguments), nogil=False)


@inlined
def _mix64(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@inlined
def _row_key(k0: np.uint64, k1: np.uint64, k2: np.uint64, position: np.uint64, domain: np.uint64) -> np.uint64:
    counter = (position << _S1) | domain
    return k2 ^ _mix64(k1 ^ _mix64(k0 + counter * _POSITION_STEP))


@inlined
def _uniform(k3: np.uint64, key: np.uint64, token: np.uint64) -> np.float64:
    h = _mix64(k3 ^ _mix64(key + token * _ID_STEP))
    return (np.float64(h >> _S12) + 0.5) * 2.0**-52


@inlined
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


@inlined
def _cannot_win(u: float, threshold: float) -> bool:
    """Whether -ln u is above ``threshold`` for certain; cheap, and seldom false when it could be true."""
    v = 1.0 - u
    return v * (1.0 + v * (0.5 + v * _THIRD)) * _SAFE > threshold


@inlined
def _beats(
    k3: np.uint64, key: np.uint64, rival: np.uint64, weight: float, best: float, winner: np.uint64
) -> bool:
    """Whether ``rival`` wins the race against ``winner`` with its score ``best``."""
    u = _uniform(k3, key, rival)
    if _cannot_win(u, best * weight):
        return False
    score = _exponential(u) / weight
    return score < best or (score == best and rival < winner)


@inlined
def _head_winner(
    k3: np.uint64, key: np.uint64, ids: NDArray[Any], codes: NDArray[Any], tail_code: int, weights: NDArray[np.float64]
) -> np.uint64:
    """Id that wins the race of one head, ``TAIL_ID`` when the tail does."""
    best, winner = math.inf, _TAIL_ID
    for i in range(len(ids)):
        candidate = np.uint64(ids[i])
        weight = weights[codes[i]]
        u = _uniform(k3, key, candidate)
        if _cannot_win(u, best * weight):
            continue
        score = _exponential(u) / weight
        if score < best or (score == best and candidate < winner):
            best, winner = score, candidate
    tail_weight = weights[tail_code]
    if tail_weight > 0.0 and _exponential(_uniform(k3, key, _TAIL_ID)) / tail_weight < best:
        return _TAIL_ID
    return winner


@_kernel(float64[::1], _of(float64))
def exponentials(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """E of each element; for tests of bit equality."""
    e = np.empty(len(u))
    for i in range(len(u)):
        e[i] = _exponential(u[i])
    return e


@_kernel(
    int64, _of(uint32), _of(uint8), _of(uint32), _of(uint16), _of(uint16), _of(uint16), _of(float64), _of(uint64)
)
def replay(
    tokens: NDArray[np.uint32], head_lengths: NDArray[np.uint8], head_ids: NDArray[np.uint32],
    head_codes: NDArray[np.uint16], tail_codes: NDArray[np.uint16], token_codes: NDArray[np.uint16],
    weights: NDArray[np.float64], words: NDArray[np.uint64],
) -> int:
    """First position whose token is not the one selected, -1 when there is none (see ``sampler.replay``).

    The recorded symbol must be the winner, so one exact score and a cheap bound for every rival decide nearly all.
    """
    k3, end = words[3], np.int64(0)
    for t in range(len(tokens)):
        start, end = end, end + np.int64(head_lengths[t])
        key = _row_key(words[0], words[1], words[2], np.uint64(t), _HEAD)
        drawn, place = token_codes[t] != _NO_CODE, np.int64(-1)
        for i in range(start, end):
            if head_ids[i] == tokens[t]:
                place = i
        if drawn == (place >= 0):
            return t
        winner, tail_weight = np.uint64(tokens[t]), weights[tail_codes[t]]
        weight = tail_weight if drawn else weights[head_codes[place]]
        if drawn:
            winner = _TAIL_ID
        if weight <= 0.0:
            return t
        best = _exponential(_uniform(k3, key, winner)) / weight
        rivals = np.int64(0)
        for i in range(start, end):  # without branches: several entries at once
            h = _mix64(k3 ^ _mix64(key + np.uint64(head_ids[i]) * _ID_STEP))
            v = 1.0 - (np.float64(np.int32(h >> _S33)) + 1.0) * 2.0**-31
            rivals += v * (1.0 + v * (0.5 + v * _THIRD)) * _SAFE <= best * weights[head_codes[i]]
        if rivals > 1 or (rivals == 1 and drawn):
            for i in range(start, end):
                if i != place and _beats(k3, key, np.uint64(head_ids[i]), weights[head_codes[i]], best, winner):
                    return t
        if not drawn and tail_weight > 0.0 and _beats(k3, key, _TAIL_ID, tail_weight, best, winner):
            return t
    return -1


@_kernel(
    int64[::1], _of(int64), _of(int64, 2), _of(int64, 2), _of(int64), _of(int64, 2), _of(int64), _of(float64)
)
def head_races(
    lengths_B: NDArray[np.int64], ids_BK: NDArray[np.int64], codes_BK: NDArray[np.int64],
    tail_codes_B: NDArray[np.int64], seeds_B: NDArray[np.int64], positions_B: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> NDArray[np.int64]:
    """(B,) winning id of each head, ``TAIL_ID`` where the tail wins. ``seeds_B`` is (B, 4)."""
    winners = np.empty(len(lengths_B), dtype=np.int64)
    for b in range(len(lengths_B)):
        seed, n = seeds_B[b], lengths_B[b]
        key = _row_key(np.uint64(seed[0]), np.uint64(seed[1]), np.uint64(seed[2]), np.uint64(positions_B[b]), _HEAD)
        winners[b] = _head_winner(
            np.uint64(seed[3]), key, ids_BK[b, :n], codes_BK[b, :n], tail_codes_B[b], weights
        )
    return winners


@_kernel(int64[::1], _of(float64, 2), _of(int64), _of(int64, 2), _of(int64))
def tail_races(
    masses_BV: NDArray[np.float64], rows: NDArray[np.int64], seeds_B: NDArray[np.int64],
    positions_B: NDArray[np.int64],
) -> NDArray[np.int64]:
    """(R,) id that wins the tail race of each of the ``rows``; ids of the head have mass 0. -1 without any mass."""
    winners = np.full(len(rows), -1, dtype=np.int64)
    for r in range(len(rows)):
        seed, masses = seeds_B[rows[r]], masses_BV[rows[r]]
        position = np.uint64(positions_B[rows[r]])
        key = _row_key(np.uint64(seed[0]), np.uint64(seed[1]), np.uint64(seed[2]), position, _TAIL)
        k3 = np.uint64(seed[3])
        best = math.inf
        for token in range(len(masses)):
            mass = masses[token]
            if mass <= 0.0:
                continue
            u = _uniform(k3, key, np.uint64(token))
            if _cannot_win(u, best * mass):
                continue
            score = _exponential(u) / mass
            if score < best:
                best, winners[r] = score, token
    return winners
