"""A pool of sources: the hostile ones are named and dropped, the good ones resume, and nothing wrong comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from protocol.clock import SystemClock
from protocol.errors import AssayError, LocalFault, PeerFault, Transient
from protocol.messages import ChunkRef
from protocol.weights.cache import ChunkCache
from protocol.weights.pool import SourcePool
from protocol.weights.score import Score
from protocol.weights.sources import E_SOURCE_SLOW, HttpSource
from tests.fakes.clock import FakeClock
from tests.fakes.web import Mirror, Mode, serving

RNG = np.random.default_rng(1)
OBJECTS = {hashlib.sha256(data).hexdigest(): data for data in (RNG.bytes(n) for n in (700_000, 300_000, 1, 700_000))}
REFS = [ChunkRef(sha256=key, size_bytes=len(data), max_output_bytes=2**24) for key, data in OBJECTS.items()]
KEY, DATA = next(iter(OBJECTS.items()))


class Listed:
    """A source in memory; ``spoil`` changes what it serves, ``before`` runs first and may raise."""

    def __init__(
        self, name: str, spoil: Callable[[bytes], bytes] = bytes, before: Callable[[], object] = lambda: None
    ):
        self.name, self.spoil, self.before = name, spoil, before
        self.parts: list[tuple[str, int, int | None]] = []

    def fetch(self, key: str, start: int, end: int | None, deadline_s: float) -> bytes:
        self.parts.append((key, start, end))
        self.before()
        if key not in OBJECTS:
            raise LocalFault("E_NOT_FOUND", "not here")
        return self.spoil(OBJECTS[key])[start:end]


def raising(error: AssayError) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.fixture
def cache(tmp_path: Path) -> ChunkCache:
    return ChunkCache(tmp_path / "chunks")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def dropped(pool: SourcePool) -> dict[str, str]:
    return {score.name: score.dropped.split()[0] for score in pool.scores() if score.dropped}


# -- the good way ----------------------------------------------------------------------------------------


def test_chunks_come_in_parts_and_once(cache: ChunkCache, clock: FakeClock) -> None:
    source, told = Listed("a"), []
    pool = SourcePool([source], cache, clock=clock, on_part=lambda name, n: told.append((name, n)))
    assert pool.missing_bytes(REFS) == sum(map(len, OBJECTS.values()))
    pool.fetch_all(REFS)
    assert pool.missing_bytes(REFS) == 0
    parts = len(source.parts)
    assert parts > len(REFS)
    assert [pool.fetch(ref.sha256, ref.size_bytes) for ref in REFS] == list(OBJECTS.values())
    assert len(source.parts) == parts
    assert sum(n for _, n in told) == sum(map(len, OBJECTS.values()))
    assert SourcePool([], cache, clock=clock).fetch(KEY, len(DATA)) == DATA


def test_a_new_process_asks_only_for_the_rest(cache: ChunkCache, clock: FakeClock) -> None:
    cache.append(KEY, DATA[:123_456])
    source = Listed("a")
    assert SourcePool([source], cache, clock=clock).fetch(KEY, len(DATA)) == DATA
    assert source.parts[0][1] == 123_456


@pytest.mark.parametrize("begun", [b"x" * 1000, b"x" * len(DATA), b"x" * (len(DATA) + 1)])
def test_a_torn_beginning_costs_one_chunk_and_blames_nobody(cache: ChunkCache, clock: FakeClock, begun: bytes) -> None:
    cache.append(KEY, begun)
    source, other = Listed("a"), Listed("b")
    pool = SourcePool([source, other], cache, clock=clock)
    assert pool.fetch(KEY, len(DATA)) == DATA
    assert not dropped(pool)


def test_a_damaged_chunk_in_the_cache_is_fetched_again(cache: ChunkCache, clock: FakeClock) -> None:
    pool = SourcePool([Listed("a")], cache, clock=clock)
    pool.fetch(KEY, len(DATA))
    file = cache.path / KEY[:2] / KEY
    file.chmod(0o644)
    file.write_bytes(DATA[:-1] + b"?")
    assert pool.fetch(KEY, len(DATA)) == DATA


def test_the_cache_stays_within_its_bound(tmp_path: Path, clock: FakeClock) -> None:
    cache = ChunkCache(tmp_path, max_bytes=1_100_000)
    pool = SourcePool([Listed("a")], cache, clock=clock)
    for ref in REFS:
        pool.fetch(ref.sha256, ref.size_bytes)
        assert cache.store.has(ref.sha256)
    assert sum(file.stat().st_size for file in tmp_path.glob("??/*")) <= 1_100_000


def test_the_faster_source_is_asked_more_often(cache: ChunkCache, clock: FakeClock) -> None:
    slow, fast = Listed("slow", before=lambda: clock.advance(2.0)), Listed("fast", before=lambda: clock.advance(0.1))
    pool = SourcePool([slow, fast], cache, clock=clock)
    for ref in REFS:
        pool.fetch(ref.sha256, ref.size_bytes)
    assert len(fast.parts) > len(slow.parts)
    rates = {score.name: score.rate or 0 for score in pool.scores()}
    assert rates["fast"] > rates["slow"] > 0


def test_parts_follow_the_rate() -> None:
    score = Score("a")
    first = score.part_bytes
    score.delivers(10 * 2**20, 1.0)
    assert score.part_bytes > first
    for _ in range(3):
        score.fails(0.0, slow=True)
    assert score.part_bytes < 10 * 2**20 // 2
    score.delivers(1, 100.0)
    assert score.slow_in_a_row == 0


# -- trouble ---------------------------------------------------------------------------------------------


def test_a_source_that_is_away_rests_and_comes_back(cache: ChunkCache, clock: FakeClock) -> None:
    failures = iter([Transient("E_UNREACHABLE", "away")] * 3)
    source = Listed("a", before=lambda: [raising(error)() for error in failures][:0])
    pool = SourcePool([source], cache, clock=clock)
    assert pool.fetch(KEY, len(DATA)) == DATA
    assert len(clock.slept) == 3
    assert sorted(clock.slept) == clock.slept
    assert not dropped(pool)


def test_nobody_delivers(cache: ChunkCache, clock: FakeClock) -> None:
    away = Listed("a", before=raising(Transient("E_UNREACHABLE", "away")))
    with pytest.raises(Transient) as caught:
        SourcePool([away], cache, clock=clock).fetch(KEY, len(DATA))
    assert caught.value.code == "E_NO_SOURCE"
    assert "a: E_UNREACHABLE" in str(caught.value)
    with pytest.raises(Transient):
        SourcePool([], cache, clock=clock).fetch(KEY, len(DATA))
    with pytest.raises(LocalFault) as missing:
        SourcePool([Listed("a"), Listed("b")], cache, clock=clock).fetch("ab" * 32, 5)
    assert missing.value.code == "E_NOT_FOUND"


def test_a_source_without_the_chunk_is_passed_over_and_not_blamed(cache: ChunkCache, clock: FakeClock) -> None:
    pool = SourcePool([Listed("a", before=raising(LocalFault("E_NOT_FOUND", "no"))), Listed("b")], cache, clock=clock)
    assert pool.fetch(KEY, len(DATA)) == DATA
    assert not dropped(pool)
    assert {score.name: score.failures for score in pool.scores()} == {"a": 0, "b": 0}


def test_a_slow_source_is_dropped_after_three_deadlines(cache: ChunkCache, clock: FakeClock) -> None:
    slow = Listed("slow", before=lambda: clock.advance(25.0))
    pool = SourcePool([slow, Listed("good")], cache, clock=clock)
    for _ in range(40):
        assert pool.fetch(KEY, len(DATA)) == DATA
        cache.store.delete(KEY)
        clock.advance(100.0)
    assert dropped(pool) == {"slow": E_SOURCE_SLOW}
    assert len(slow.parts) == 3


def test_a_source_that_leaves_and_comes_back_keeps_its_name(cache: ChunkCache, clock: FakeClock) -> None:
    bad = Listed("bad", spoil=lambda data: data[::-1])
    pool = SourcePool([bad, Listed("good")], cache, clock=clock)
    pool.fetch_all(REFS)
    assert dropped(pool) == {"bad": "E_OBJECT_HASH"}
    pool.remove("bad")
    pool.add(bad)
    asked = len(bad.parts)
    cache.store.delete(KEY)
    assert pool.fetch(KEY, len(DATA)) == DATA
    assert len(bad.parts) == asked


def test_the_last_source_is_named_but_asked_again_later(cache: ChunkCache, clock: FakeClock) -> None:
    source = Listed("only", spoil=lambda data: data[:-1] + b"!")
    pool = SourcePool([source], cache, clock=clock)
    with pytest.raises(PeerFault) as caught:
        pool.fetch(KEY, len(DATA))
    assert caught.value.code == "E_OBJECT_HASH"
    assert "only" in str(caught.value)
    source.spoil = bytes
    assert pool.fetch(KEY, len(DATA)) == DATA


@pytest.mark.parametrize("byte", [0, 1, 350_000, len(DATA) - 1])
def test_one_flipped_byte_names_the_right_one_of_several(cache: ChunkCache, clock: FakeClock, byte: int) -> None:
    """The parts of a chunk come from several sources, so the hash alone does not tell who lied."""

    def flip(data: bytes) -> bytes:
        return data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :] if len(data) > byte else data

    liar = Listed("liar", spoil=flip)
    honest = [Listed("x", before=lambda: clock.advance(0.5)), Listed("y", before=lambda: clock.advance(0.5))]
    pool = SourcePool([honest[0], liar, honest[1]], cache, clock=clock)
    for _ in range(60):
        assert pool.fetch(KEY, len(DATA)) == DATA
        cache.store.delete(KEY)
    assert dropped(pool) == {"liar": "E_OBJECT_HASH"}


# -- the zoo, over real sockets --------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("truncated", "E_SOURCE_SHORT"), ("swapped", "E_OBJECT_HASH"), ("flipped", "E_OBJECT_HASH"),
        ("oversized", "E_TOO_LARGE"), ("bomb", "E_SOURCE_REPLY"), ("other range", "E_SOURCE_REPLY"),
        ("slow body", "E_SOURCE_SLOW"), ("slow headers", "E_SOURCE_SLOW"), ("no reply", "E_SOURCE_SLOW"),
        ("cut", None), ("broken", None), ("refusing", None), ("absent", None), ("no ranges", None),
    ],
)
def test_hostile_and_helpless_mirrors(stack: ExitStack, cache: ChunkCache, mode: Mode, code: str | None) -> None:
    bad, good = stack.enter_context(serving(Mirror(OBJECTS, mode))), stack.enter_context(serving(Mirror(OBJECTS)))
    sources = [
        stack.enter_context(closing(HttpSource.mirror(mirror.url, name=name)))
        for name, mirror in (("bad", bad), ("good", good))
    ]
    clock = _Hasty()
    # So long that the good one keeps it on a busy machine: nobody is slow three times in a row by chance.
    pool = SourcePool(sources, cache, clock=clock, part_deadline_s=1.5 if code == E_SOURCE_SLOW else 60.0)
    for _ in range(20 if code else 3):
        for ref in REFS:
            assert pool.fetch(ref.sha256, ref.size_bytes) == OBJECTS[ref.sha256]
            cache.store.delete(ref.sha256)
        clock.skipped += 120.0  # whoever rests has rested
        if dropped(pool):
            break
    assert dropped(pool) == ({} if code is None else {"bad": code})
    assert bad.asked


class _Hasty(SystemClock):
    """The machine's clock, with stretches skipped."""

    skipped = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped
