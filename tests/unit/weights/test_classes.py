"""Exponent classes and their kernels: compiled and in numpy they give the same, for any bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.weights import classes, kernels, rans, tokens
from protocol.weights.classes import MAX_CLASSES, Changes

#: Around the lengths of a unit (64 words) and a block (2,048) of the compiled kernels.
_LENGTHS = (1000, 0, 1, 63, 64, 65, 127, 128, 2047, 2048, 2049, 5000)


def _pieces(rng: np.random.Generator, words: str, density: float) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    top = 2 ** (8 * np.dtype(words).itemsize)
    old = [rng.integers(0, top, n, dtype=np.uint64).astype(words) for n in _LENGTHS]
    new = []
    for piece in old:
        other = rng.integers(0, top, len(piece), dtype=np.uint64).astype(words)
        new.append(np.where(rng.random(len(piece)) < density, other, piece))
    return old, new


def _same(a: Changes, b: Changes) -> None:
    for name in ("firsts", "populations", "counts", "gaps", "folded"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype
        assert (left == right).all()


@pytest.mark.parametrize("words", ["<u2", "<u4"])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 0.5, 1.0])
def test_kernels_agree_with_numpy(rng: np.random.Generator, words: str, density: float) -> None:
    assert kernels.compiled() is not None
    for classes_wanted in (1, 2, 7, 8, 9, MAX_CLASSES):
        old, new = _pieces(rng, words, density)
        firsts = np.sort(np.append(rng.choice(255, classes_wanted - 1, replace=False) + 1, 0)).astype(np.uint8)
        changes = classes.scan(old, new, firsts)
        _same(changes, kernels.scan(old, new, firsts))
        assert changes.populations.sum() == sum(_LENGTHS)
        for apply in (classes.apply, kernels.apply):
            live = [piece.copy() for piece in old]
            done = apply(live, changes)
            assert done is not None
            for before, after, now, (where, values) in zip(old, new, live, done, strict=True):
                assert now.tolist() == after.tolist()
                assert sorted(where.tolist()) == np.flatnonzero(before != after).tolist()
                assert values.tolist() == before[where].tolist()


def test_changes_of_another_state_are_noticed(rng: np.random.Generator) -> None:
    old, new = _pieces(rng, "<u2", 0.1)
    changes = classes.scan(old, new, np.array([0, 100, 200], np.uint8))
    other = [piece.copy() for piece in old]
    other[0][3] ^= np.uint16(0x4000)
    for apply in (classes.apply, kernels.apply):
        assert apply([piece.copy() for piece in old], changes) is not None
        live = [piece.copy() for piece in other]
        assert apply(live, changes) is None
        assert all((piece == before).all() for piece, before in zip(live, other, strict=True))


@pytest.mark.parametrize("compiled", [True, False])
def test_chosen_classes_follow_the_exponent(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Small weights all change, large ones never: the border is where classes part."""
    if not compiled:
        monkeypatch.setattr(kernels, "compiled", lambda: None)
    old = rng.integers(110 << 7, 130 << 7, 50_000).astype("<u2")
    new = np.where(old >> 7 < 117, old + np.uint16(1), old).astype("<u2")
    firsts = classes.choose([old], [new])
    assert firsts[0] == 0
    assert 117 in firsts.tolist()
    assert len(firsts) <= MAX_CLASSES
    changes = kernels.scan([old], [new], firsts)
    assert all(count in {0, n} for count, n in zip(changes.counts, changes.populations, strict=True))


def test_classes_are_few_where_they_do_not_pay(rng: np.random.Generator) -> None:
    old = rng.integers(0, 2**16, 4000).astype("<u2")
    new = old ^ (rng.random(4000) < 0.001).astype("<u2")
    assert len(classes.choose([old], [new])) == 1


def test_large_segments_are_sampled(rng: np.random.Generator) -> None:
    n = classes._SAMPLED_WORDS
    old = rng.integers(110 << 7, 130 << 7, n).astype("<u2")
    new = np.where(old >> 7 < 117, old + np.uint16(1), old).astype("<u2")
    assert 117 in classes.choose([old], [new]).tolist()
    assert 117 in classes.choose([old[: n - 5], old[:5]], [new[: n - 5], new[:5]]).tolist()


@pytest.mark.parametrize("words", ["<u2", "<u4"])
def test_cells_are_counted_alike(rng: np.random.Generator, words: str) -> None:
    old, new = _pieces(rng, words, 0.2)
    near = [np.where(rng.random(len(x)) < 0.5, x + x.dtype.type(3), y) for x, y in zip(old, new, strict=True)]
    assert kernels.choose(old, near).tolist() == classes.choose(old, near).tolist()
    keys, cells = classes.count_cells(old[-1], near[-1])
    assert keys.sum() == len(old[-1])
    assert cells.sum() == np.count_nonzero(old[-1] != near[-1])
    compiled = kernels.compiled()
    assert compiled is not None
    got_keys, got_cells = np.zeros(256, np.int64), np.zeros((256, classes.MAGNITUDES), np.int64)
    compiled.count_cells(old[-1], near[-1], kernels._top(old[-1].dtype), got_keys, got_cells)
    assert (got_keys == keys).all()
    assert (got_cells == cells).all()


@pytest.mark.parametrize("words", ["<u2", "<u4"])
def test_joined_numbers_agree_and_keep_their_bounds(rng: np.random.Generator, words: str) -> None:
    last = 2 ** (8 * np.dtype(words).itemsize - 1) - 1
    counts = np.array([3, 0, 7, 1], np.int64)
    gaps = rng.integers(0, 2**32, 11, dtype=np.uint32)
    magnitudes = rng.integers(0, last, 11).astype(np.uint32)
    away = rng.integers(0, 2, 11).astype(np.uint8)
    magnitudes[0], away[0] = last, 0
    for join in (kernels.join, classes.join):
        joined = join(np.concatenate([gaps, magnitudes]), away, counts, np.dtype(words))
        assert joined is not None
        assert joined[0].tolist() == [2 * int(m) + int(a) for m, a in zip(magnitudes, away, strict=True)]
        sums = [int(gaps[:3].sum(dtype=np.int64)) + 3, 0, int(gaps[3:10].sum(dtype=np.int64)) + 7, int(gaps[10]) + 1]
        assert joined[1].tolist() == sums
    for bad, outwards in ((last, 1), (last + 1, 0), (2**32 - 1, 1)):
        magnitudes[5], away[5] = bad, outwards
        for join in (kernels.join, classes.join):
            assert join(np.concatenate([gaps, magnitudes]), away, counts, np.dtype(words)) is None


_NUMBERS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)), max_size=50)


@given(_NUMBERS)
def test_tokens_and_bits_hold_every_number(numbers: list[int]) -> None:
    values = np.array(numbers, np.uint32)
    named = tokens.tokens_of(values)
    packed = tokens.pack_extras(values, named)
    assert len(packed) == tokens.extra_bytes(named)[0]
    assert (kernels.tokens_of(values) == named).all()
    assert (kernels.pack_extras(values, named) == packed).all()
    for numbers_of in (tokens.numbers_of, kernels.numbers_of):
        assert (numbers_of(named, packed) == values).all()
    assert (named < tokens.MAX_TOKENS).all()


def test_every_token_begins_where_the_one_before_ends() -> None:
    bases, bits = tokens.BASES[: tokens.MAX_TOKENS], tokens.EXTRA_BITS[: tokens.MAX_TOKENS]
    ends = bases.astype(np.int64) + (1 << bits.astype(np.int64))
    assert ends[:-1].tolist() == bases[1:].tolist()
    assert ends[-1] == 2**32
    assert tokens.tokens_of(bases).tolist() == list(range(tokens.MAX_TOKENS))


@pytest.mark.parametrize("count", [1, 5, 4095, 16_384, 140_000])
@pytest.mark.parametrize("peak", [0.01, 0.5, 0.99])
def test_rans_comes_back_and_is_the_same_compiled(rng: np.random.Generator, count: int, peak: float) -> None:
    data = np.minimum(rng.geometric(peak, count) - 1, 255).astype(np.uint8)
    counts = np.bincount(data)
    table = rans.table_for(counts)
    assert (kernels.table_for(counts) == table).all()
    frequency = rans.frequencies(table)
    states, refills = kernels.rans_encode(data, frequency)
    assert len(states) == rans.lanes_of(count)
    if count > 20_000:
        shares = counts[counts > 0] / count
        entropy = -(shares * np.log2(shares)).sum() * count / 8
        assert 2 * len(refills) < 1.01 * entropy + 16
    for decode in (kernels.rans_decode, rans.decode):
        back = decode(states, refills, frequency, count)
        assert back is not None
        assert (back == data).all()
    plain = rans.encode(data, frequency)
    assert (plain[0] == states).all()
    assert (plain[1] == refills).all()
    for decode in (kernels.rans_decode, rans.decode):
        assert decode(states, refills[:-1], frequency, count) is None or not len(refills)
        assert decode(states, np.append(refills, np.uint16(0)), frequency, count) is None


@given(st.lists(st.integers(0, 127), min_size=1, max_size=256).filter(any))
def test_every_table_adds_up_and_keeps_rare_bytes(table: list[int]) -> None:
    frequency = rans.frequencies(np.array(table, np.uint8))
    assert (kernels.frequencies(np.array(table, np.uint8)) == frequency).all()
    assert frequency.sum() == 2**rans.PROBABILITY_BITS
    assert (frequency[: len(table)] > 0).tolist() == [number > 0 for number in table]


@given(st.lists(st.integers(0, 2**26), min_size=1, max_size=256).filter(any))
def test_every_count_gets_the_same_table(counts: list[int]) -> None:
    padded = np.array(counts + [0] * (256 - len(counts)), np.int64)
    table = rans.table_for(padded)
    assert kernels.table_for(padded).tolist() == table.tolist()
    assert (table > 0).tolist() == [n > 0 for n in counts][: len(table)]


def test_rans_weights_ascend() -> None:
    assert (np.diff(rans.WEIGHTS) > 0).all()
