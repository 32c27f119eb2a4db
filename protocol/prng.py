"""Public randomness of the sampler: a counter-based generator and an exponential variate without libm.

Every value is a pure function of (seed, position, domain, token id). Integer arithmetic is modulo 2^64; floating-point
arithmetic uses only IEEE 754 double ``+ - * /`` in a fixed order, so numpy, torch and numba agree bit for bit on
every machine. Spec: ``docs/spec/sampler.md``, "Noise".

``mix64`` is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Domain of the race among head entries and TAIL; mixing it up with the other would correlate the two draws.
HEAD_DOMAIN: Final = 0
#: Domain of the race among the ids outside the head.
TAIL_DOMAIN: Final = 1
#: Token id under which TAIL races; above every vocabulary, so TAIL loses ties.
TAIL_ID: Final = 0xFFFFFFFF

# Changing any constant below changes every rollout of every run.
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
POSITION_STEP: Final = 0x9E3779B97F4A7C15
ID_STEP: Final = 0xD1B54A32D192ED03
LN2: Final = 0.6931471805599453
SQRT_HALF: Final = 0.7071067811865476
#: 2 / (2 i + 1), i = 0..10: ln m = s (c0 + s^2 (c1 + ...)) with s = (m - 1) / (m + 1), |s| < 0.172.
SERIES: Final = tuple(2.0 / (2 * i + 1) for i in range(11))

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]


def seed_words(seed: bytes) -> U64:
    """(4,) uint64: the 32-byte seed as little-endian words k0..k3.

    Raises:
        ValueError: the seed is not 32 bytes long (our own bug).
    """
    if len(seed) != 32:
        raise ValueError(f"a seed has 32 bytes, not {len(seed)}")
    return np.frombuffer(seed, dtype="<u8").astype(np.uint64)


def mix64(z: U64) -> U64:
    """SplitMix64 finaliser of each element."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    mixed: U64 = z ^ (z >> np.uint64(31))
    return mixed


def row_keys(words: U64, positions: NDArray[Any], domain: int) -> U64:
    """Key of each position's stream; same shape as ``positions``."""
    counter = (positions.astype(np.uint64) << np.uint64(1)) | np.uint64(domain)
    row: U64 = words[2] ^ mix64(words[1] ^ mix64(words[0] + counter * np.uint64(POSITION_STEP)))
    return row


def uniforms(words: U64, keys: U64, ids: NDArray[Any]) -> F64:
    """Uniform u in (0, 1) for each (stream key, token id); the arguments broadcast. u is an odd multiple of 2^-53."""
    h = mix64(words[3] ^ mix64(keys + ids.astype(np.uint64) * np.uint64(ID_STEP)))
    u: F64 = ((h >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return u


def exponential(u: F64) -> F64:
    """E = -ln u, to about one unit in the last place, the same bits on every machine."""
    m, exponent = np.frexp(u)
    low = m < SQRT_HALF
    m = np.where(low, m + m, m)
    k: F64 = (low.astype(np.int64) - exponent).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = np.full_like(z, SERIES[-1])
    for c in SERIES[-2::-1]:
        p = p * z + c
    e: F64 = k * LN2 - s * p
    return e


def noise(words: U64, positions: NDArray[Any], domain: int, ids: NDArray[Any]) -> F64:
    """Exponential noise E of each (position, token id); ``positions`` and ``ids`` broadcast."""
    return exponential(uniforms(words, row_keys(words, positions, domain), ids))
