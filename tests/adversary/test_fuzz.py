"""Whatever bytes a node commits to, the rule engine answers with a named code and never blames itself for them."""

from __future__ import annotations

import numpy as np
import pytest

from protocol import bundle as bundles
from protocol.errors import CODES
from tests.adversary.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=8)


def _judge(world: World, data: bytes):
    lease = world.lease()
    return world.judge(world.submission(lease, world.honest(lease), data=data, drawn=False))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes(world, seed):
    """Single bytes changed, pieces cut out, pieces repeated: in the compressed form."""
    rng = np.random.default_rng(seed)
    good = bundles.encode(world.honest(world.lease()))
    for _ in range(60):
        at, end = sorted(rng.integers(0, len(good), 2).tolist())
        kind = int(rng.integers(3))
        if kind == 0:
            data = good[:at] + bytes([good[at] ^ int(rng.integers(1, 256))]) + good[at + 1 :]
        elif kind == 1:
            data = good[:at] + good[end + 1 :]
        else:
            data = good[:end] + good[at:]
        judgement = _judge(world, data)
        if data != good:
            assert judgement.outcome in ("fail", "pass")
            assert judgement.outcome == "fail" or bundles.decode(data, world.rules) is not None
            assert judgement.code is None or judgement.code in CODES


@pytest.mark.parametrize("seed", range(4))
def test_damaged_content(world, seed):
    """Single bytes changed behind the compression, where the columns are: nothing but the honest content passes."""
    import zstandard

    rng = np.random.default_rng(100 + seed)
    content = bytearray(zstandard.ZstdDecompressor().decompress(bundles.encode_simple(world.honest(world.lease()))))
    for _ in range(60):
        at, flip = int(rng.integers(len(content))), int(rng.integers(1, 256))
        content[at] ^= flip
        judgement = _judge(world, zstandard.ZstdCompressor().compress(bytes(content)))
        content[at] ^= flip
        assert judgement.outcome == "fail", judgement
        assert judgement.code in CODES


def test_random_bytes(world):
    rng = np.random.default_rng(5)
    for size in (0, 1, 4, 100, 5000):
        judgement = _judge(world, rng.bytes(size) if size else b"")
        assert judgement.outcome == "fail"
