"""Lossless diffs between two states, and anchors that hold a whole state.

Encoding looks at bit patterns only. Applying is a transaction: decode everything, then write while keeping the old
words, and put them back if anything fails. Spec: ``docs/spec/weight-diff.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PeerFault
from protocol.messages import ChunkRef
from protocol.weights import steps
from protocol.weights.chunk import (
    MAX_SEGMENT_BYTES,
    TARGET_CHUNK_BYTES,
    ChunkWriter,
    Encoded,
    Kind,
    Method,
    Segment,
    decode_chunk,
    encode_full,
    encode_gap,
    encode_same,
)
from protocol.weights.layout import Layout, State, check_state, flat
from protocol.weights.streams import E_CHUNK

#: State bytes of one segment of an anchor; also the smallest range a diff is cut to when it comes out large.
ANCHOR_SEGMENT_BYTES: Final = 4 * 2**20
#: A GAP segment larger than this share of its state is measured against FULL.
_TRY_FULL_ABOVE: Final = 0.4
_BLOCK_WORDS: Final = 2**18


@dataclass(frozen=True)
class Patch:
    """A decoded diff: segments that tile the whole state, in order."""

    segments: list[Segment]

    @property
    def changed(self) -> int:
        """Number of words written."""
        return sum(len(segment.words) for segment in self.segments if segment.words is not None)


@dataclass
class Undo:
    """Old words of everything that was written, newest last."""

    writes: list[tuple[str, NDArray[Any] | slice, NDArray[Any]]] = field(default_factory=list)

    def revert(self, state: State) -> None:
        """Put the old words back; the state is then bit-identical to what it was."""
        for name, where, old in reversed(self.writes):
            state[name].reshape(-1)[where] = old

    @property
    def nbytes(self) -> int:
        """Memory it holds."""
        return sum(old.nbytes + (0 if isinstance(at, slice) else at.nbytes) for _, at, old in self.writes)


def encode_diff(layout: Layout, old: State, new: State) -> list[bytes]:
    """Chunks that turn ``old`` into ``new``, bit by bit; at least one.

    Raises:
        LocalFault: ``E_STATE`` when a state does not fit the layout.
    """
    check_state(layout, old)
    check_state(layout, new)
    writer = ChunkWriter(Kind.DIFF)
    for start, end, words in _cut(layout, MAX_SEGMENT_BYTES):
        for segment in _encode_range(layout, old, new, start, end, words):
            writer.add(segment)
    return writer.finish()


def decode_diff(layout: Layout, chunks: Iterable[bytes], refs: Sequence[ChunkRef] | None = None) -> Patch:
    """The patch that ``chunks`` hold, wholly decoded and checked against the layout; no state is touched.

    ``refs``, one per chunk, bound what each chunk may decode to.

    Raises:
        PeerFault: ``E_CHUNK`` or ``E_CHUNK_LIMIT``.
    """
    return Patch(list(_segments(layout, chunks, Kind.DIFF, refs)))


def apply_patch(layout: Layout, state: State, patch: Patch) -> Undo:
    """Write ``patch`` into ``state`` in place; on any failure the state is as before.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout.
    """
    check_state(layout, state)
    undo = Undo()
    try:
        for segment in patch.segments:
            _write_segment(layout, state, segment, undo)
    except BaseException:
        undo.revert(state)
        raise
    return undo


def encode_anchor(layout: Layout, state: State) -> list[bytes]:
    """Chunks that hold the whole state.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout.
    """
    check_state(layout, state)
    writer = ChunkWriter(Kind.ANCHOR)
    for start, end, words in _cut(layout, ANCHOR_SEGMENT_BYTES):
        writer.add(encode_full(start, _gather(layout, state, start, end, words)))
    return writer.finish()


def decode_anchor(chunks: Iterable[bytes], layout: Layout, refs: Sequence[ChunkRef] | None = None) -> State:
    """The state that ``chunks`` hold, as fresh arrays; one segment is in memory beside it at a time.

    Raises:
        PeerFault: ``E_CHUNK`` or ``E_CHUNK_LIMIT``.
    """
    state = layout.new_state()
    for segment in _segments(layout, chunks, Kind.ANCHOR, refs):
        if segment.method is not Method.FULL or segment.words is None:
            raise PeerFault(E_CHUNK, "an anchor refers to another state", expected="FULL", got=segment.method.name)
        for piece in layout.pieces(segment.start, segment.end):
            flat(state, piece)[:] = segment.words[piece.at : piece.at + piece.hi - piece.lo]
    return state


def _cut(layout: Layout, limit: int) -> Iterator[tuple[int, int, np.dtype[Any]]]:
    """The whole state as byte ranges of one word size, each at most ``limit`` long."""
    for start, end, words in layout.runs():
        for at in range(start, end, limit):
            yield at, min(at + limit, end), words


def _gather(layout: Layout, state: State, start: int, end: int, words: np.dtype[Any]) -> NDArray[Any]:
    """The words of a byte range, without a copy when one tensor holds them all."""
    parts = [flat(state, piece) for piece in layout.pieces(start, end)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=words)


def _encode_range(
    layout: Layout, old: State, new: State, start: int, end: int, words: np.dtype[Any]
) -> Iterator[Encoded]:
    """One segment, or several when one would come out larger than a chunk should be."""
    positions, folded = _changes(layout, old, new, start, end)
    if not len(positions):
        yield encode_same(start, end, words.itemsize)
        return
    best = encode_gap(start, end, positions, folded)
    if len(best.data) > _TRY_FULL_ABOVE * (end - start):
        full = encode_full(start, _gather(layout, new, start, end, words))
        best = min(best, full, key=lambda encoded: len(encoded.data))
    if len(best.data) > TARGET_CHUNK_BYTES and end - start > ANCHOR_SEGMENT_BYTES:
        middle = start + (end - start) // 2 // words.itemsize * words.itemsize
        yield from _encode_range(layout, old, new, start, middle, words)
        yield from _encode_range(layout, old, new, middle, end, words)
        return
    yield best


def _changes(layout: Layout, old: State, new: State, start: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Word positions within the range that differ, and their folded steps."""
    positions: list[NDArray[Any]] = []
    folded: list[NDArray[Any]] = []
    for piece in layout.pieces(start, end):
        before, after = flat(old, piece), flat(new, piece)
        changed = _differing(before, after)
        positions.append(changed + piece.at)
        folded.append(steps.fold(before[changed], after[changed]))
    return np.concatenate(positions), np.concatenate(folded)


def _differing(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
    """Indices at which two vectors differ; in blocks, so that the mask stays in the processor's cache."""
    mask = np.empty(min(len(before), _BLOCK_WORDS), np.bool_)
    found: list[NDArray[Any]] = []
    for at in range(0, len(before), _BLOCK_WORDS):
        block = slice(at, at + _BLOCK_WORDS)
        differs = np.not_equal(before[block], after[block], out=mask[: len(before[block])])
        found.append(np.flatnonzero(differs) + at)
    return np.concatenate(found)


def _segments(
    layout: Layout, chunks: Iterable[bytes], kind: Kind, refs: Sequence[ChunkRef] | None
) -> Iterator[Segment]:
    """Segments of all chunks, each checked to begin where the one before ended and to fit the layout's runs."""
    runs = list(layout.runs())
    run, at = 0, 0
    for i, data in enumerate(chunks):
        for segment in decode_chunk(data, kind, *([refs[i].max_output_bytes] if refs is not None else [])):
            if run < len(runs) and at == runs[run][1]:
                run += 1
            if segment.start != at or run == len(runs) or segment.end > runs[run][1]:
                raise PeerFault(
                    E_CHUNK, "segments do not tile the state", expected=f"a segment from byte {at} within its run",
                    got=f"{segment.start} to {segment.end}",
                )
            if segment.width != runs[run][2].itemsize:
                raise PeerFault(
                    E_CHUNK, "segment of another word size than its tensors", expected=runs[run][2].itemsize,
                    got=segment.width,
                )
            at = segment.end
            yield segment
    if at != layout.nbytes:
        raise PeerFault(E_CHUNK, "chunks do not cover the state", expected=f"{layout.nbytes} bytes", got=at)


def _write_segment(layout: Layout, state: State, segment: Segment, undo: Undo) -> None:
    """Write one segment, recording old words before each write."""
    if segment.words is None:
        return
    for piece in layout.pieces(segment.start, segment.end):
        size = piece.hi - piece.lo
        target = state[piece.entry.name].reshape(-1)
        where: NDArray[Any] | slice
        if segment.positions is None:
            where, words = slice(piece.lo, piece.hi), segment.words[piece.at : piece.at + size]
            old = target[where].copy()
        else:
            lo, hi = np.searchsorted(segment.positions, (piece.at, piece.at + size))
            if lo == hi:
                continue
            where = segment.positions[lo:hi].astype(np.int64) + (piece.lo - piece.at)
            old = target[where]
            words = steps.unfold(old, segment.words[lo:hi])
            where = where.astype(np.uint32) if where[-1] < 2**32 else where
        undo.writes.append((piece.entry.name, where, old))
        target[where] = words
