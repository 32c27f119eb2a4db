"""The layouts that the benchmark sets ours against are real codecs: what they encode comes back."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rival_codecs import RIVALS, int32_encode
from protocol.weights.layout import Layout, copy_state
from tests.fakes.checkpoints import changed, random_bits, same_bits

_LAYOUT = Layout.of({"a.norm": ("BF16", (300,)), "b.weight": ("BF16", (70, 9, 3)), "c.same": ("BF16", (40, 2))})


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("density", [0.002, 0.1, 1.0])
def test_rivals_come_back(rng: np.random.Generator, name: str, density: float) -> None:
    old = random_bits(_LAYOUT, rng)
    new = changed(old, rng, density)
    new["c.same"] = old["c.same"].copy()
    live = copy_state(old)
    RIVALS[name].apply(live, RIVALS[name].encode(old, new))
    assert same_bits(live, new)


def test_positions_and_values_take_six_bytes_each(rng: np.random.Generator) -> None:
    old = random_bits(_LAYOUT, rng)
    new = copy_state(old)
    new["b.weight"].reshape(-1)[[3, 900]] ^= np.uint16(1)
    assert len(int32_encode(old, new)) == 4 + len(b'[["b.weight",2]]') + 12
