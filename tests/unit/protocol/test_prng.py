"""Noise: accurate, and the same bits in numpy, torch and numba."""

import math

import numpy as np
import pytest
import torch

from protocol import sampler_torch
from protocol.prng import HEAD_DOMAIN, TAIL_DOMAIN, exponential, noise, seed_words, uniforms
from protocol.sampler import compiled
from tests.fakes.rollouts import make_seed

MILLION = 1_000_000


def _million_uniforms() -> np.ndarray:
    u = (np.random.default_rng(1).integers(0, 2**52, MILLION) + 0.5) * 2.0**-52
    edges = [2.0**-53, 1 - 2.0**-53, 0.5, math.sqrt(0.5), np.nextafter(math.sqrt(0.5), 0), 0.25, 3 * 2.0**-53]
    u[: len(edges)] = edges
    u[1000:2000] = 1 - (2 * np.arange(1000) + 1) * 2.0**-53
    u[2000:3000] = (2 * np.arange(1000) + 1) * 2.0**-53
    return u


def test_exponential_has_the_same_bits_in_numpy_torch_and_numba():
    u = _million_uniforms()
    e = exponential(u)
    kernels = compiled()
    assert kernels is not None
    assert np.array_equal(e.view(np.uint64), kernels.exponentials(u).view(np.uint64))
    assert np.array_equal(e.view(np.uint64), sampler_torch.exponential(torch.from_numpy(u)).numpy().view(np.uint64))


def test_exponential_is_minus_ln_to_the_last_places():
    u = _million_uniforms()
    e = exponential(u)
    assert np.all(e > 0)
    # np.log is within one unit in the last place; so are we within one more.
    assert np.max(np.abs(e / -np.log(u) - 1)) <= 4 * 2.0**-53


def test_noise_has_the_same_bits_in_numpy_and_torch():
    seed, positions, ids = make_seed(0), np.arange(50), np.arange(2000)
    ids[-1] = 0xFFFFFFFF
    words = torch.from_numpy(seed_words(seed).view(np.int64)).expand(50, 4)
    for domain in (HEAD_DOMAIN, TAIL_DOMAIN):
        ours = noise(seed_words(seed), positions[:, None], domain, ids[None])
        theirs = sampler_torch._noise(words, torch.from_numpy(positions), domain, torch.from_numpy(ids)[None])
        assert np.array_equal(ours.view(np.uint64), theirs.numpy().view(np.uint64))


def test_noise_depends_on_every_part_of_its_key():
    base = (seed_words(make_seed(0)), np.array([7]), HEAD_DOMAIN, np.array([5]))
    drawn = {float(noise(*base)[0])}
    for word in range(4):
        words = base[0].copy()
        words[word] ^= np.uint64(1)
        drawn.add(float(noise(words, *base[1:])[0]))
    drawn.add(float(noise(base[0], np.array([8]), *base[2:])[0]))
    drawn.add(float(noise(*base[:2], TAIL_DOMAIN, base[3])[0]))
    drawn.add(float(noise(*base[:3], np.array([6]))[0]))
    assert len(drawn) == 8


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniforms_are_uniform_along_seeds_positions_and_ids(axis):
    rng = np.random.default_rng(axis)
    n = 200_000
    if axis == 0:
        words = [seed_words(rng.bytes(32)) for _ in range(500)]
        u = np.concatenate([noise(w, np.arange(20)[:, None], 0, np.arange(20)[None]).ravel() for w in words])
        u = np.exp(-u)
    else:
        w = seed_words(rng.bytes(32))
        positions, ids = (np.arange(n), np.array([3])) if axis == 1 else (np.array([3]), np.arange(n))
        u = np.exp(-noise(w, positions, 0, ids))
    counts = np.bincount((u * 256).astype(int), minlength=256)
    expected = len(u) / 256
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 255 + 5 * math.sqrt(2 * 255)
    neighbours = np.corrcoef(u[:-1], u[1:])[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(len(u))


def test_uniforms_are_odd_multiples_of_two_to_the_minus_53():
    u = uniforms(seed_words(make_seed(1)), np.array([123], np.uint64), np.arange(1000))
    scaled = u * 2.0**53
    assert np.array_equal(scaled, np.rint(scaled))
    assert np.all(scaled % 2 == 1)


def test_a_seed_has_32_bytes():
    with pytest.raises(ValueError, match="32 bytes"):
        seed_words(b"short")
