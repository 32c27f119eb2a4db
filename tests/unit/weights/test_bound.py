"""The entropy of a diff, against the definition written down once more, and against what the codec makes."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from protocol.weights import bound
from protocol.weights.bound import Bound, diff_bound
from protocol.weights.diff import encode_diff
from protocol.weights.layout import Layout, State
from tests.fakes.checkpoints import LAYOUT, changed, random_bits


def entropy_bytes(words: int, steps: list[int]) -> float:
    """Which of ``words`` change, and the steps, as a sum over every single event."""
    n, counts = len(steps), Counter(steps)
    bits = sum(-math.log2(counts[step] / n) for step in steps)
    bits += sum(-math.log2(n / words) for _ in range(n)) + sum(-math.log2(1 - n / words) for _ in range(words - n))
    return bits / 8


def ordinal(word: int, width: int) -> int:
    top = 1 << (width - 1)
    return (2**width - 1 - word) if word & top else word + top


def reference(layout: Layout, old: State, new: State) -> Bound:
    per_key: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for entry in layout.entries:
        width = 8 * entry.words.itemsize
        for a, b in zip(old[entry.name].reshape(-1).tolist(), new[entry.name].reshape(-1).tolist(), strict=True):
            seen, steps = per_key.setdefault((width, a >> (width - 9) & 0xFF), ([], []))
            seen.append(a)
            if a != b:
                step = ordinal(b, width) - ordinal(a, width)
                step = (-step if a >> (width - 1) else step) % 2**width
                steps.append(step if step < 2 ** (width - 1) else step - 2**width)
    everything = [step for _, steps in per_key.values() for step in steps]
    words = sum(len(seen) for seen, _ in per_key.values())
    return Bound(
        len(everything), entropy_bytes(words, everything),
        sum(entropy_bytes(len(seen), steps) for seen, steps in per_key.values()),
    )


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_entropy_by_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(LAYOUT, rng)
    new = changed(old, rng, float(rng.uniform(0.01, 0.9)), any_bits=bool(seed % 2))
    got, expected = diff_bound(LAYOUT, old, new), reference(LAYOUT, old, new)
    assert got.changed == expected.changed
    assert got.exponent == pytest.approx(expected.exponent, rel=1e-9)
    assert got.order_0 == pytest.approx(expected.order_0, rel=1e-9)


def test_without_the_compiled_loop_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    old = random_bits(LAYOUT, rng)
    new = changed(old, rng, 0.3)
    with_it = diff_bound(LAYOUT, old, new)
    monkeypatch.setattr(bound, "compiled", lambda: bound._count)
    assert diff_bound(LAYOUT, old, new) == with_it


def test_nothing_to_say() -> None:
    old = random_bits(LAYOUT, np.random.default_rng(0))
    assert diff_bound(LAYOUT, old, old) == Bound(0, 0.0, 0.0)
    empty = Layout.of({"none": ("BF16", (0, 3))})
    assert diff_bound(empty, empty.new_state(), empty.new_state()) == Bound(0, 0.0, 0.0)
    one = Layout.of({"a": ("BF16", (1,))})
    assert diff_bound(one, {"a": np.array([0], "<u2")}, {"a": np.array([7], "<u2")}) == Bound(1, 0.0, 0.0)


def test_the_codec_comes_near_it_and_the_exponent_helps() -> None:
    layout = Layout.of({"a": ("BF16", (2**20,))})
    rng = np.random.default_rng(3)
    masters = (rng.standard_normal(2**20) * 0.03).astype(np.float32)

    def published(values: np.ndarray) -> State:
        bits = values.view(np.uint32)
        return {"a": ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")}

    moved = masters + np.float32(5e-7) * rng.choice(np.array([-1, 1], np.float32), 2**20)
    old, new = published(masters), published(moved)
    found = diff_bound(layout, old, new)
    size = sum(map(len, encode_diff(layout, old, new)))
    assert 0.01 < found.changed / 2**20 < 0.05
    assert found.exponent < 0.8 * found.order_0
    assert found.exponent < size < 1.1 * found.exponent
