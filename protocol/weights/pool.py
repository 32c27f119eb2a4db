"""Several sources of chunks as one that can be relied on.

Every chunk is fetched in parts, each from the source that was best so far and within a deadline; what came is on disk
at once, so that a kill costs the parts under way. Only a whole chunk with the right hash is handed on. A source that
serves bad bytes is named and dropped for the run; one that is merely away rests. Spec: ``docs/spec/store.md``,
"Reading from a source one does not trust".
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from protocol.clock import Clock, SystemClock
from protocol.errors import (
    E_NOT_FOUND,
    E_OBJECT_HASH,
    E_TOO_LARGE,
    AssayError,
    LocalFault,
    PeerFault,
    Transient,
    code,
)
from protocol.messages import ChunkRef
from protocol.store import check_key
from protocol.weights.cache import ChunkCache, matches
from protocol.weights.score import Score
from protocol.weights.sources import E_SOURCE_SLOW, ChunkSource

E_NO_SOURCE = code("E_NO_SOURCE", "no source of weights could deliver a chunk in time")

logger = logging.getLogger(__name__)

#: Longest wait for one part, in seconds.
PART_DEADLINE_S: Final = 20.0
#: Longest time for one chunk: so many seconds, and its size at the least rate worth having.
CHUNK_DEADLINE_S: Final = 60.0
LEAST_RATE: Final = 16 * 2**10
#: A source that let this many deadlines in a row pass is dropped.
_SLOW_STRIKES: Final = 3
#: Every so many parts the source that was asked longest ago gets its chance.
_EXPLORE_EVERY: Final = 16
#: Chunks whose hashes fall on one stripe wait for one another.
_STRIPES: Final = 64


@dataclass
class _Chunk:
    """One chunk on its way. ``spans``: who delivered up to where; no name for bytes of an earlier process."""

    sha256: str
    size: int
    deadline: float
    have: int = 0
    spans: list[tuple[int, str | None]] = field(default_factory=list)
    alone: bool = False  #: mixed bytes were wrong: from now on one source at a time
    suspects: list[tuple[bytes, list[tuple[int, str | None]]]] = field(default_factory=list)
    excluded: dict[str, AssayError] = field(default_factory=dict)  #: sources not to be asked for this chunk, and why
    told: dict[str, AssayError] = field(default_factory=dict)  #: the last trouble with each source

    @property
    def givers(self) -> set[str | None]:
        """Who delivered what is there."""
        return {name for _, name in self.spans}


class SourcePool:
    """Fetches chunks by hash and size from sources that may fail or lie. Thread-safe.

    Args:
        sources: in order of preference until something is known about them; names are unique.
        cache: where whole chunks and beginnings lie.
        on_part: told of every part that came (source, bytes); for progress bars.
    """

    def __init__(
        self, sources: Iterable[ChunkSource], cache: ChunkCache, *, clock: Clock | None = None,
        part_deadline_s: float = PART_DEADLINE_S, chunk_deadline_s: float = CHUNK_DEADLINE_S,
        on_part: Callable[[str, int], None] | None = None,
    ):
        self.cache, self._clock = cache, clock or SystemClock()
        self._part_s, self._chunk_s, self.on_part = part_deadline_s, chunk_deadline_s, on_part
        self._lock = threading.Lock()
        self._sources: dict[str, ChunkSource] = {}
        self._scores: dict[str, Score] = {}
        self._choices = 0
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        for source in sources:
            self.add(source)

    # -- the sources -------------------------------------------------------------------------------------

    def add(self, source: ChunkSource) -> None:
        """Ask this source, too, from now on; what is known about a source of this name stays known."""
        with self._lock:
            self._sources[source.name] = source
            self._scores.setdefault(source.name, Score(source.name))

    def remove(self, name: str) -> None:
        """Ask this source no more (it left); its score is kept in case it comes back."""
        with self._lock:
            self._sources.pop(name, None)

    def close(self) -> None:
        """Drop the connections of those sources that have some."""
        with self._lock:
            sources = list(self._sources.values())
        for source in sources:
            close = getattr(source, "close", None)
            if callable(close):
                close()

    def scores(self) -> list[Score]:
        """A copy of what is known about every source, in the order they were added."""
        with self._lock:
            return [replace(score) for score in self._scores.values()]

    # -- chunks ------------------------------------------------------------------------------------------

    def fetch(self, sha256: str, size: int) -> bytes:
        """The chunk, its size and hash verified.

        Raises:
            PeerFault: every source that could be asked served bad bytes; the code of the last one.
            LocalFault: ``E_NOT_FOUND`` when every source says that it has no such chunk; ``E_STORE`` of the cache.
            Transient: ``E_NO_SOURCE`` when nobody delivered before the chunk's deadline.
        """
        with self._stripes[int(check_key(sha256)[:4], 16) % _STRIPES]:  # two never write one beginning
            data = self.cache.get(sha256)
            if data is not None and len(data) == size:
                return data
            return self._download(sha256, size)

    def fetch_all(self, refs: Sequence[ChunkRef], *, threads: int = 4) -> None:
        """Have all these chunks in the cache, several on their way at once; the first error ends it.

        Raises:
            AssayError: as :meth:`fetch`.
        """
        with ThreadPoolExecutor(max(1, min(threads, len(refs)))) as workers:
            jobs = [workers.submit(self.fetch, ref.sha256, ref.size_bytes) for ref in refs]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                workers.shutdown(wait=True, cancel_futures=True)
                raise

    def missing_bytes(self, refs: Iterable[ChunkRef]) -> int:
        """How many bytes of these chunks would have to be fetched."""
        return sum(
            ref.size_bytes - len(self.cache.begun(ref.sha256, ref.size_bytes))
            for ref in refs if not self.cache.store.has(ref.sha256)
        )

    def _download(self, sha256: str, size: int) -> bytes:
        chunk = _Chunk(sha256, size, self._clock.monotonic() + self._chunk_s + size / LEAST_RATE)
        chunk.have = len(self.cache.begun(sha256, size))
        if chunk.have:
            chunk.spans.append((chunk.have, None))
        while True:
            while chunk.have < size:
                self._next_part(chunk)
            data = self.cache.begun(sha256, size)
            if matches(sha256, size, data):
                self.cache.keep(sha256)
                self._convict(chunk, data)
                return data
            self._wrong(chunk, data)

    def _next_part(self, chunk: _Chunk) -> None:
        source, score = self._choose(chunk)
        if chunk.alone and chunk.givers - {source.name}:
            self._restart(chunk)
        end = min(chunk.size, chunk.have + score.part_bytes)
        started = self._clock.monotonic()
        try:
            data = self._ask(source, chunk.sha256, chunk.have, end)
        except AssayError as error:
            self._note_failure(chunk, score, error)
            return
        took = self._clock.monotonic() - started
        self.cache.append(chunk.sha256, data)
        chunk.have += len(data)
        chunk.spans.append((chunk.have, source.name))
        with self._lock:
            score.delivers(len(data), took)
            if len(data) < end - (chunk.have - len(data)):
                score.fails(self._clock.monotonic())
        if self.on_part is not None:
            self.on_part(source.name, len(data))

    def _ask(self, source: ChunkSource, key: str, start: int, end: int) -> bytes:
        """One part, on a thread of its own: a source that does not keep its deadline is left behind.

        Raises:
            AssayError: as :meth:`ChunkSource.fetch`, and ``E_TOO_LARGE`` when more came than was asked for.
        """
        answer: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(source.fetch(key, start, end, self._part_s))
            except BaseException as error:  # noqa: BLE001 - handed to the one who asked
                answer.put(error)

        began = self._clock.monotonic()
        threading.Thread(target=run, name=f"fetch {source.name}", daemon=True).start()
        try:
            data = answer.get(timeout=self._part_s + 1.0)
        except queue.Empty:
            raise _too_slow(source.name, key) from None
        if isinstance(data, BaseException):
            raise data
        if self._clock.monotonic() - began > self._part_s or (not data and end > start):
            raise _too_slow(source.name, key)
        if len(data) > end - start:
            raise PeerFault(
                E_TOO_LARGE, f"{source.name} sends more than was asked for", expected=end - start, got=len(data)
            )
        return data

    # -- choosing ----------------------------------------------------------------------------------------

    def _choose(self, chunk: _Chunk) -> tuple[ChunkSource, Score]:
        """The best source that may be asked now, waiting for one that rests if need be."""
        while True:
            now = self._clock.monotonic()
            with self._lock:
                open_ = [
                    score for name, score in self._scores.items()
                    if name in self._sources and score.dropped is None and name not in chunk.excluded
                ]
                ready = [score for score in open_ if score.rests_until <= now]
                if ready and now < chunk.deadline:
                    best = self._best(chunk, ready)
                    best.asked_at = now
                    return self._sources[best.name], best
            wake = min((score.rests_until for score in open_), default=chunk.deadline)
            if not open_ or wake >= chunk.deadline or now >= chunk.deadline:
                raise self._nobody(chunk)
            self._clock.sleep(wake - now + 1e-3)

    def _best(self, chunk: _Chunk, ready: list[Score]) -> Score:
        if chunk.alone:
            staying = [score for score in ready if score.name in chunk.givers]
            return staying[0] if staying else ready[0]
        self._choices += 1
        if self._choices % _EXPLORE_EVERY == 0:
            return min(ready, key=lambda score: score.asked_at)
        return max(ready, key=lambda score: score.value)

    def _nobody(self, chunk: _Chunk) -> AssayError:
        told = {**chunk.told, **chunk.excluded}
        words = "; ".join(f"{name}: {error.code} {error.message}" for name, error in told.items())[:600] or "no source"
        bad = [error for error in told.values() if isinstance(error, PeerFault)]
        what = f"chunk {chunk.sha256[:16]}"
        if bad and all(isinstance(error, PeerFault) for error in told.values()):
            return PeerFault(
                bad[-1].code, f"{what}: no source served the right bytes", expected=chunk.sha256, got=words,
                hint="fetch from another source",
            )
        if told and all(error.code == E_NOT_FOUND for error in told.values()):
            return LocalFault(E_NOT_FOUND, f"{what} is nowhere", expected=chunk.sha256, got=words)
        return Transient(E_NO_SOURCE, f"{what} could not be fetched", expected=f"{chunk.size} bytes", got=words)

    # -- failures ----------------------------------------------------------------------------------------

    def _note_failure(self, chunk: _Chunk, score: Score, error: AssayError) -> None:
        chunk.told[score.name] = error
        if isinstance(error, PeerFault):
            self._drop(chunk, score.name, error)
            return
        if error.code == E_NOT_FOUND:
            chunk.excluded[score.name] = error
            return
        slow = error.code == E_SOURCE_SLOW
        with self._lock:
            score.fails(self._clock.monotonic(), slow=slow, rest_s=getattr(error, "retry_after_s", 0.0))
            struck = slow and score.slow_in_a_row >= _SLOW_STRIKES
        logger.info("source of weights failed", extra={"source": score.name, "code": error.code})
        if struck:
            self._drop(chunk, score.name, error)

    def _drop(self, chunk: _Chunk, name: str, error: AssayError) -> None:
        """Ask this source no more in this run. The last one left rests instead: nobody is cut off for good."""
        with self._lock:
            score = self._scores[name]
            others = [
                other for other in self._sources if other != name and self._scores[other].dropped is None
            ]
            score.fails(self._clock.monotonic())
            if others and score.dropped is None:
                score.dropped = f"{error.code} {error.message}"
        chunk.excluded[name] = error
        logger.warning(
            "source of weights dropped" if others else "the last source of weights serves bad bytes",
            extra={"source": name, "code": error.code, "detail": str(error)},
        )

    def _wrong(self, chunk: _Chunk, data: bytes) -> None:
        """The whole has another hash: blame the one who gave it all, or find out who it was."""
        givers = chunk.givers
        error = PeerFault(
            E_OBJECT_HASH, f"wrong bytes from {', '.join(sorted(name or 'an earlier download' for name in givers))}",
            expected=chunk.sha256, got=f"{len(data)} bytes with another hash",
        )
        only = next(iter(givers)) if len(givers) == 1 else None
        if not givers:
            raise error  # an empty chunk with the hash of something else
        if only is not None:
            self._drop(chunk, only, error)
        else:
            chunk.suspects.append((data, chunk.spans))
            chunk.alone = True
        self._restart(chunk)

    def _restart(self, chunk: _Chunk) -> None:
        self.cache.discard(chunk.sha256)
        chunk.have, chunk.spans = 0, []

    def _convict(self, chunk: _Chunk, right: bytes) -> None:
        """Now that the right bytes are known: who delivered other ones?"""
        for data, spans in chunk.suspects:
            start = 0
            for end, name in spans:
                if name is not None and data[start:end] != right[start:end]:
                    self._drop(chunk, name, PeerFault(
                        E_OBJECT_HASH, f"wrong bytes from {name}", expected=chunk.sha256,
                        got=f"bytes {start} to {end} of chunk {chunk.sha256[:16]} differ",
                    ))
                start = end


def _too_slow(name: str, key: str) -> Transient:
    return Transient(E_SOURCE_SLOW, f"{name} did not deliver in time", expected=f"a part of {key[:16]}")
