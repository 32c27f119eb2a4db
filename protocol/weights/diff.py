"""Lossless diffs between two states, and anchors that hold a whole state.

Encoding looks at bit patterns only. Applying is a transaction: decode everything, then write while keeping the old
words, and put them back if anything fails. Segments are independent, so both run on several threads.
Spec: ``docs/spec/weight-diff.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalFault, PeerFault
from protocol.messages import ChunkRef
from protocol.weights import kernels, steps
from protocol.weights.chunk import (
    TARGET_CHUNK_BYTES,
    ChunkWriter,
    Encoded,
    Kind,
    Method,
    Sealed,
    Segment,
    encode_full,
    encode_gap,
    encode_same,
    encode_xc,
    open_chunk,
)
from protocol.weights.classes import Journal
from protocol.weights.coder import Coder
from protocol.weights.layout import E_STATE, Layout, Piece, State, check_state, flat
from protocol.weights.streams import E_CHUNK
from protocol.weights.undo import Undo, shift

#: State bytes of one segment of a diff: enough for its tables to cost little, few enough to keep all cores busy.
DIFF_SEGMENT_BYTES: Final = 32 * 2**20
#: State bytes of one segment of an anchor; also the smallest range a diff is cut to when it comes out large.
ANCHOR_SEGMENT_BYTES: Final = 4 * 2**20
#: A segment larger than this share of its state is measured against FULL.
_TRY_FULL_ABOVE: Final = 0.4
#: An XC segment with fewer changes than this is measured against GAP, which has less to say beforehand.
_TRY_GAP_BELOW: Final = 4096
#: State bytes below which a second thread does not pay.
_THREADED_BYTES: Final = 4 * 2**20
_BLOCK_WORDS: Final = 2**18

_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(frozen=True)
class Patch:
    """A decoded diff: segments that tile the whole state, in order."""

    segments: list[Segment]

    @property
    def changed(self) -> int:
        """Number of words written."""
        return sum(len(segment.words) for segment in self.segments if segment.words is not None)


def encode_diff(
    layout: Layout, old: State, new: State, *, method: Method | None = None, entropy: Coder = Coder.RANS,
    threads: int = 2,
) -> list[bytes]:
    """Chunks that turn ``old`` into ``new``, bit by bit; at least one.

    ``method`` (GAP or XC) is used for every segment with changes, even where another would be smaller; None takes the
    best of all. ``entropy`` (RANS or ZSTD) codes the streams. The bytes do not depend on ``threads``.

    Raises:
        LocalFault: ``E_STATE`` when a state does not fit the layout.
    """
    check_state(layout, old)
    check_state(layout, new)
    writer = ChunkWriter(Kind.DIFF)
    ranges = list(_cut(layout, DIFF_SEGMENT_BYTES))
    encoded = _spread(
        lambda r: _encode_range(layout, old, new, *r, method, entropy), ranges, layout.nbytes, threads
    )
    for segments in encoded:
        for segment in segments:
            writer.add(segment)
    return writer.finish()


def decode_diff(
    layout: Layout, chunks: Iterable[bytes], refs: Sequence[ChunkRef] | None = None, *, threads: int = 2
) -> Patch:
    """The patch that ``chunks`` hold, wholly decoded and checked against the layout; no state is touched.

    ``refs``, one per chunk, bound what each chunk may decode to.

    Raises:
        PeerFault: ``E_CHUNK`` or ``E_CHUNK_LIMIT``.
    """
    sealed = list(_open_all(layout, chunks, Kind.DIFF, refs))
    return Patch(_spread(Sealed.decode, sealed, layout.nbytes, threads))


def apply_patch(layout: Layout, state: State, patch: Patch, *, threads: int = 2) -> Undo:
    """Write ``patch`` into ``state`` in place; on any failure the state is as before.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout, or may not be written.
        PeerFault: ``E_CHUNK`` when the patch is for another state (only XC segments can tell).
    """
    check_state(layout, state)
    if sealed := sorted(name for name, words in state.items() if not words.flags.writeable):
        raise LocalFault(E_STATE, "tensors of the state are read-only", got=", ".join(sealed[:5]))
    undos = [Undo() for _ in patch.segments]
    work = list(zip(patch.segments, undos, strict=True))
    try:
        _spread(lambda job: _write_segment(layout, state, *job), work, layout.nbytes, threads)
        return Undo([write for undo in undos for write in undo.writes])
    except BaseException:
        for undo in undos:
            undo.revert(state)
        raise


def encode_anchor(
    layout: Layout, state: State, *, entropy: Coder = Coder.ZSTD, threads: int = 2
) -> list[bytes]:
    """Chunks that hold the whole state.

    Raises:
        LocalFault: ``E_STATE`` when the state does not fit the layout.
    """
    check_state(layout, state)
    writer = ChunkWriter(Kind.ANCHOR)
    ranges = list(_cut(layout, ANCHOR_SEGMENT_BYTES))
    for segment in _spread(
        lambda r: encode_full(r[0], _gather(layout, state, *r), entropy), ranges, layout.nbytes, threads
    ):
        writer.add(segment)
    return writer.finish()


def decode_anchor(
    chunks: Iterable[bytes], layout: Layout, refs: Sequence[ChunkRef] | None = None, *, threads: int = 2
) -> State:
    """The state that ``chunks`` hold, as fresh arrays; two segments per thread are in memory beside it at a time.

    Raises:
        PeerFault: ``E_CHUNK`` or ``E_CHUNK_LIMIT``.
    """
    state = layout.new_state()

    def fill(sealed: Sealed) -> None:
        if sealed.head.method is not Method.FULL:
            raise PeerFault(E_CHUNK, "an anchor refers to another state", expected="FULL", got=sealed.head.method.name)
        segment = sealed.decode()
        assert segment.words is not None
        for piece in layout.pieces(segment.start, segment.end):
            flat(state, piece)[:] = segment.words[piece.at : piece.at + piece.hi - piece.lo]

    opened = _open_all(layout, chunks, Kind.ANCHOR, refs)
    while batch := list(islice(opened, 2 * threads)):
        _spread(fill, batch, layout.nbytes, threads)
    return state


def _cut(layout: Layout, limit: int) -> Iterator[tuple[int, int, np.dtype[Any]]]:
    """The whole state as byte ranges of one word size, each at most ``limit`` long."""
    for start, end, words in layout.runs:
        for at in range(start, end, limit):
            yield at, min(at + limit, end), words


def _gather(layout: Layout, state: State, start: int, end: int, words: np.dtype[Any]) -> NDArray[Any]:
    """The words of a byte range, without a copy when one tensor holds them all."""
    parts = [flat(state, piece) for piece in layout.pieces(start, end)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=words)


def _spread(call: Callable[[_A], _B], items: Sequence[_A], nbytes: int, threads: int) -> list[_B]:
    """Results of ``call`` in order, from several threads where that pays; all have ended when one has failed."""
    if threads == 1 or len(items) < 2 or nbytes < _THREADED_BYTES:
        return [call(item) for item in items]
    results: list[Any] = [None] * len(items)
    left, at_work, stopped = iter(range(len(items))), list[None](), list[None]()

    def work() -> None:
        at_work.append(None)
        try:
            while not stopped and (i := next(left, None)) is not None:
                results[i] = call(items[i])
        except BaseException:
            stopped.append(None)
            raise
        finally:
            at_work.pop()

    pool = ThreadPoolExecutor(min(threads, len(items)))
    workers: list[Future[None]] = []
    try:
        workers += [pool.submit(work) for _ in range(min(threads, len(items)))]
        wait(workers)
    finally:
        _halt(pool, stopped, at_work)
    for worker in workers:
        worker.result()
    return results


def _halt(pool: ThreadPoolExecutor, stopped: list[None], at_work: list[None]) -> None:
    """Leave nobody at work: one who writes on would undo what is undone. Interrupts are raised afterwards.

    An interrupted pool does not know the thread that it was starting, and takes one for ended that it was waiting for.
    """
    interrupt: BaseException | None = None
    halted = False
    while not halted:
        try:
            stopped.append(None)
            while at_work:
                time.sleep(0.001)
            pool.shutdown()
            halted = True
        except (KeyboardInterrupt, SystemExit) as raised:
            interrupt = raised
    if interrupt is not None:
        raise interrupt


def _encode_range(
    layout: Layout, old: State, new: State, start: int, end: int, words: np.dtype[Any], method: Method | None,
    entropy: Coder,
) -> list[Encoded]:
    """One segment, or several when one would come out larger than a chunk should be."""
    best = _encode_gap(layout, old, new, start, end, entropy) if method is Method.GAP else _encode_xc(
        layout, old, new, start, end, entropy, try_gap=method is None
    )
    if best is None:
        return [encode_same(start, end, words.itemsize)]
    if method is None and len(best.data) > _TRY_FULL_ABOVE * (end - start):
        full = encode_full(start, _gather(layout, new, start, end, words), entropy)
        best = min(best, full, key=lambda encoded: len(encoded.data))
    if len(best.data) > TARGET_CHUNK_BYTES and end - start > ANCHOR_SEGMENT_BYTES:
        middle = start + (end - start) // 2 // words.itemsize * words.itemsize
        halves = ((start, middle), (middle, end))
        return [s for lo, hi in halves for s in _encode_range(layout, old, new, lo, hi, words, method, entropy)]
    return [best]


def _encode_xc(
    layout: Layout, old: State, new: State, start: int, end: int, entropy: Coder, *, try_gap: bool
) -> Encoded | None:
    """The range by exponent classes, or by gaps where those are shorter and may be used; None without changes."""
    pieces = list(layout.pieces(start, end))
    before, after = [flat(old, piece) for piece in pieces], [flat(new, piece) for piece in pieces]
    changes = kernels.scan(before, after, kernels.choose(before, after))
    if not len(changes.folded):
        return None
    best = encode_xc(start, end, changes, entropy)
    if try_gap and len(changes.folded) < _TRY_GAP_BELOW:
        gap = _encode_gap(layout, old, new, start, end, entropy)
        best = best if gap is None else min(best, gap, key=lambda encoded: len(encoded.data))
    return best


def _encode_gap(
    layout: Layout, old: State, new: State, start: int, end: int, entropy: Coder
) -> Encoded | None:
    """The range by gaps; None without changes."""
    positions, folded = _changes(layout, old, new, start, end)
    return encode_gap(start, end, positions, folded, entropy) if len(positions) else None


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


def _open_all(
    layout: Layout, chunks: Iterable[bytes], kind: Kind, refs: Sequence[ChunkRef] | None
) -> Iterator[Sealed]:
    """Segments of all chunks, each checked to begin where the one before ended and to fit the layout's runs."""
    runs = layout.runs
    run, at = 0, 0
    for i, data in enumerate(chunks):
        for segment in open_chunk(data, kind, *([refs[i].max_output_bytes] if refs is not None else [])):
            head = segment.head
            if run < len(runs) and at == runs[run][1]:
                run += 1
            if head.start != at or run == len(runs) or head.end > runs[run][1]:
                raise PeerFault(
                    E_CHUNK, "segments do not tile the state", expected=f"a segment from byte {at} within its run",
                    got=f"{head.start} to {head.end}",
                )
            if head.width != runs[run][2].itemsize:
                raise PeerFault(
                    E_CHUNK, "segment of another word size than its tensors", expected=runs[run][2].itemsize,
                    got=head.width,
                )
            at = head.end
            yield segment
    if at != layout.nbytes:
        raise PeerFault(E_CHUNK, "chunks do not cover the state", expected=f"{layout.nbytes} bytes", got=at)


def _write_segment(layout: Layout, state: State, segment: Segment, undo: Undo) -> None:
    """Write one segment, recording old words before anything else can fail."""
    if segment.words is None:
        return
    pieces = list(layout.pieces(segment.start, segment.end))
    if segment.changes is not None:
        parts = [flat(state, piece) for piece in pieces]
        journal = Journal(parts, len(segment.changes.gaps))
        undo.journals.append((pieces, journal))
        if not kernels.apply(parts, segment.changes, journal):
            raise PeerFault(E_CHUNK, "the diff is for another state", hint="its exponent classes do not fit this one")
        undo.settle()
        return
    for piece in pieces:
        _write_piece(state, segment, piece, undo)


def _write_piece(state: State, segment: Segment, piece: Piece, undo: Undo) -> None:
    """Write the part of a FULL or GAP segment that lies in one tensor."""
    assert segment.words is not None
    target = state[piece.entry.name].reshape(-1)
    size = piece.hi - piece.lo
    where: NDArray[Any] | slice
    if segment.positions is None:
        where, words = slice(piece.lo, piece.hi), segment.words[piece.at : piece.at + size]
        old = target[where].copy()
    else:
        lo, hi = np.searchsorted(segment.positions, (piece.at, piece.at + size))
        if lo == hi:
            return
        where = shift(segment.positions[lo:hi] - segment.positions.dtype.type(piece.at), piece)
        old = target[where]
        words = steps.unfold(old, segment.words[lo:hi])
    undo.writes.append((piece.entry.name, where, old))
    target[where] = words
