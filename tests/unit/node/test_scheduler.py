"""The scheduler against a simulated engine: whatever comes, rows obey their versions and everything ends."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node.engine import Request
from node.scheduler import Row, Scheduler


def request(number: int, version: int, *, pinned: bool = False) -> Request:
    return Request(f"u{number}/0", 0, (5, 6), b"\0" * 32, version, pinned=pinned)


class SimulatedEngine:
    """Does what plans say, and checks that they may be done."""

    def __init__(self, slots: int, grid: int):
        self.scheduler, self.grid = Scheduler(slots, grid), grid
        self.version, self.newest, self.loads = -1, 0, 0
        self.done: list[tuple[Row, int]] = []

    def step(self, lengths: dict[str, int]) -> None:
        plan = self.scheduler.plan(self.version, self.newest)
        assert plan.load != self.version
        if plan.load is not None:
            assert plan.load <= self.newest
            self.version = plan.load
            self.loads += 1
            self.scheduler.loaded(plan.load)
        for asked in plan.start:
            assert asked.start_version == self.version
        self.scheduler.start(plan.start, range(len(plan.start)))
        assert len(self.scheduler.rows) <= self.scheduler.slots
        for row in plan.step:
            assert row.version == self.version
            row.position += 1
            if row.position == lengths[row.request.key]:
                self.scheduler.rows.remove(row)
                self.done.append((row, row.position))


@given(
    slots=st.integers(2, 9), grid=st.integers(1, 6), seed=st.randoms(use_true_random=False),
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 20), st.booleans(), st.booleans()), min_size=1, max_size=40
    ),
)
def test_every_request_runs_under_lawful_versions(slots, grid, seed, arrivals) -> None:  # type: ignore[no-untyped-def]
    engine = SimulatedEngine(slots, grid)
    lengths: dict[str, int] = {}
    for number, (age, length, publish, pinned) in enumerate(arrivals):
        engine.newest += publish
        asked = request(number, max(0, engine.newest - age), pinned=pinned)
        lengths[asked.key] = length
        engine.scheduler.submit([asked])
        for _ in range(seed.randrange(4)):
            engine.step(lengths)
    for _ in range(40 * len(arrivals) + 400):
        engine.step(lengths)
    assert len(engine.done) == len(arrivals)
    assert engine.version == engine.newest
    for row, length in engine.done:
        starts, versions = [s.start for s in row.segments], [s.version for s in row.segments]
        assert starts[0] == 0
        assert versions[0] == row.request.start_version
        assert all(a < b for a, b in pairwise(starts))
        assert all(a < b for a, b in pairwise(versions))
        assert all(start % grid == 0 for start in starts)
        assert starts[-1] < length
        assert len(starts) == 1 or not row.request.pinned


def test_rows_at_the_grid_wait_for_the_others() -> None:
    engine = SimulatedEngine(4, 4)
    lengths = {"u0/0": 100, "u1/0": 100}
    engine.scheduler.submit([request(0, 0)])
    for _ in range(4):
        engine.step(lengths)
    engine.scheduler.submit([request(1, 0)])
    engine.step(lengths)
    engine.newest = 1
    while engine.version == 0:
        engine.step(lengths)
    assert [row.position % 4 for row in engine.scheduler.rows] == [0, 0]
    assert [len(row.segments) for row in engine.scheduler.rows] == [2, 2]


def test_waiting_requests_of_the_loaded_version_start_before_a_swap() -> None:
    engine = SimulatedEngine(2, 4)
    lengths = {f"u{i}/0": 6 for i in range(4)}
    engine.scheduler.submit([request(i, 0) for i in range(4)])
    for _ in range(3):
        engine.step(lengths)
    engine.newest = 1
    for _ in range(40):
        engine.step(lengths)
    assert len(engine.done) == 4
    assert engine.loads == 2


def test_going_back_waits_for_room_for_the_whole_lease() -> None:
    engine = SimulatedEngine(8, 4)
    engine.newest = 1
    lengths = {f"u{i}/0": 20 + i for i in range(6)} | {f"u{i}/0": 5 for i in range(6, 10)}
    engine.scheduler.submit([request(i, 1) for i in range(6)])
    for _ in range(3):
        engine.step(lengths)
    engine.scheduler.submit([request(i, 0) for i in range(6, 10)])
    while engine.version == 1:
        engine.step(lengths)
    engine.step(lengths)
    assert sum(row.version == 0 for row in engine.scheduler.rows) == 4


def test_dropped_requests_never_start() -> None:
    scheduler = Scheduler(4, 4)
    scheduler.submit([request(0, 0), request(1, 0)])
    scheduler.drop(frozenset({"u0/0"}))
    assert [asked.key for asked in scheduler.plan(0, 0).start] == ["u1/0"]
