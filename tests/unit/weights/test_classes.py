"""Exponent classes and their kernels: compiled and in numpy they give the same, for any bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.weights import classes, kernels
from protocol.weights.classes import MAX_CLASSES, Changes, Journal

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
            journal = Journal(live, len(changes.gaps))
            assert apply(live, changes, journal)
            for before, after, now, (where, values) in zip(old, new, live, journal.of_pieces(), strict=True):
                assert now.tolist() == after.tolist()
                assert sorted(where.tolist()) == np.flatnonzero(before != after).tolist()
                assert values.tolist() == before[where].tolist()


@pytest.mark.parametrize("words", ["<u2", "<u4"])
def test_pieces_a_kernel_cannot_use_in_place(rng: np.random.Generator, words: str) -> None:
    """Off their natural boundary, as in a file that is mapped, or read-only."""
    size = 3 * (kernels._MARGIN + 100)
    old = np.frombuffer(b"x" + rng.bytes(size * np.dtype(words).itemsize), np.uint8)[1:].view(words)
    assert not old.flags.aligned
    new = np.where(rng.random(size) < 0.5, old ^ old.dtype.type(1), old)
    firsts = np.array([0, 100], np.uint8)
    changes = kernels.scan([old], [new], firsts)
    _same(changes, classes.scan([old], [new], firsts))
    live = old.copy()
    live.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.apply([live], changes, Journal([live], size))
    assert (live == old).all()


def test_kernels_refuse_pieces_that_do_not_match(rng: np.random.Generator) -> None:
    old = [rng.integers(0, 2**16, n).astype("<u2") for n in (700, 900)]
    firsts = np.zeros(1, np.uint8)
    for new in ([old[0], old[1][1:]], [old[0], old[1].astype("<u4")]):
        with pytest.raises(ValueError, match="pieces do not match"):
            kernels.choose(old, new)
        with pytest.raises(ValueError, match="pieces do not match"):
            kernels.scan(old, new, firsts)
    changes = kernels.scan(old, [old[0] ^ np.uint16(1), old[1]], firsts)
    for live in ([old[0], old[1].astype("<u4")], [piece.astype("<u4") for piece in old]):
        with pytest.raises(ValueError, match="pieces do not match"):
            kernels.apply(live, changes, Journal(live, 700))


@pytest.mark.parametrize("words", ["<u2", "<u4"])
def test_more_changes_than_there_is_room_for_at_first(rng: np.random.Generator, words: str) -> None:
    """The kernel stops within a piece, or between two, and goes on with more room."""
    pieces = 7 * [2048 * 40], [1, 2048 * 250 + 3, 100], [100_000, 0, 100_000]
    for lengths in pieces:
        old = [rng.integers(0, 2**16, n).astype(words) for n in lengths]
        new = [piece ^ (rng.random(len(piece)) < 0.9).astype(words) for piece in old]
        firsts = np.array([0, 50, 100, 200], np.uint8)
        changes = classes.scan(old, new, firsts)
        assert len(changes.gaps) > 4 * (sum(lengths) // kernels._EXPECTED_ONE_IN + kernels._MARGIN)
        _same(changes, kernels.scan(old, new, firsts))


def test_changes_of_another_state_are_noticed(rng: np.random.Generator) -> None:
    old, new = _pieces(rng, "<u2", 0.1)
    changes = classes.scan(old, new, np.array([0, 100, 200], np.uint8))
    other = [piece.copy() for piece in old]
    other[0][3] ^= np.uint16(0x4000)
    for apply in (classes.apply, kernels.apply):
        assert apply([piece.copy() for piece in old], changes, Journal(old, len(changes.gaps)))
        live = [piece.copy() for piece in other]
        journal = Journal(live, len(changes.gaps))
        assert not apply(live, changes, journal)
        for piece, (where, words) in zip(live, journal.of_pieces(), strict=True):
            piece[where] = words
        assert all((piece == before).all() for piece, before in zip(live, other, strict=True))


def test_a_journal_tells_only_what_was_done() -> None:
    """Of three pieces the second is the last that was written."""
    journal = Journal([np.zeros(9, np.uint16)] * 3, 5)
    journal.where[:], journal.old[:] = range(5), range(5)
    journal.ends[:2] = 1, 3
    assert [where.tolist() for where, _ in journal.of_pieces()] == [[0], [1, 2], []]


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
