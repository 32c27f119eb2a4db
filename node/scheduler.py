"""Which weights to load, which requests to start, which rows to step: pure decisions over positions and versions.

A row runs only under the version it stands at. It may take up a newer version when its position is a positive
multiple of the swap grid, and never an older one; a pinned row takes up none and is finished before the weights move
on. Weights may be loaded back to an older version to start a request
that names it: rows of newer versions then simply pause, and the older rows catch up at their next grid position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from node.engine import Request
from protocol.rollout import Segment

#: A round of prefills waits until ``slots // REFILL_FRACTION`` rows are free (at least one, and never while nothing
#: runs): a pass for a single prompt costs about as much as decoding one token of every row.
REFILL_FRACTION: Final = 4


@dataclass(slots=True, eq=False)
class Row:
    """A request in progress. ``position`` is the completion position it draws next."""

    request: Request
    record: int  #: index of its record, stable while the row moves about in the KV cache
    position: int
    segments: list[Segment] = field(default_factory=list)

    @property
    def version(self) -> int:
        """Version its next forward pass must run under (unless it takes up a newer one)."""
        return self.segments[-1].version

    def take_up(self, version: int) -> None:
        """Go on with newer weights, keeping the KV cache."""
        if self.segments[-1].start == self.position:
            self.segments.pop()
        self.segments.append(Segment(self.position, version))


@dataclass(frozen=True)
class Plan:
    """What to do next, in this order."""

    load: int | None = None
    start: tuple[Request, ...] = ()
    step: tuple[Row, ...] = ()


class Scheduler:
    """Holds the waiting requests and the rows in progress."""

    def __init__(self, slots: int, swap_grid: int):
        self.slots, self.swap_grid = slots, swap_grid
        self.refill = max(1, slots // REFILL_FRACTION)
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests in their order."""
        self.waiting.extend(requests)

    def drop(self, keys: frozenset[str]) -> None:
        """Forget waiting requests."""
        self.waiting = deque(request for request in self.waiting if request.key not in keys)

    def start(self, requests: Iterable[Request], records: Iterable[int]) -> list[Row]:
        """Turn waiting requests into rows; returns the new rows."""
        rows = [
            Row(request, record, request.first_position, [Segment(request.first_position, request.start_version)])
            for request, record in zip(requests, records, strict=True)
        ]
        started = {row.request.key for row in rows}
        self.waiting = deque(request for request in self.waiting if request.key not in started)
        self.rows.extend(rows)
        return rows

    def loaded(self, version: int) -> None:
        """The engine holds ``version`` now: rows that stand on the grid at an older one take it up."""
        for row in self.rows:
            if row.version < version and self._on_grid(row):
                row.take_up(version)

    def plan(self, loaded: int, newest: int) -> Plan:
        """The next piece of work when ``loaded`` is on the device and ``newest`` is at hand."""
        free = self.slots - len(self.rows)
        runnable = [row for row in self.rows if row.version == loaded]
        older = [request for request in self.waiting if request.start_version < loaded]
        if older:
            oldest = min(request.start_version for request in older)
            wanted = sum(request.start_version == oldest for request in older)
            if free and (free >= min(wanted, max(1, self.slots // 2)) or not runnable):
                return Plan(load=oldest)
            if runnable:
                return Plan(step=tuple(runnable))
        elif free:
            now = [request for request in self.waiting if request.start_version == loaded][:free]
            if now and (free >= self.refill or not runnable):
                return Plan(start=tuple(now))
        target = self._target(loaded, newest)
        if target is None:
            return Plan(step=tuple(runnable))
        held_up = [row for row in runnable if not self._on_grid(row)]
        return Plan(step=tuple(held_up)) if held_up else Plan(load=target)

    def _target(self, loaded: int, newest: int) -> int | None:
        """The version to move forward to, or None to stay: never past one that a row or a request still needs."""
        if any(request.start_version == loaded for request in self.waiting):
            return self._paused(loaded) if not any(row.version == loaded for row in self.rows) else None
        ahead = [request.start_version for request in self.waiting if request.start_version > loaded]
        paused = self._paused(loaded)
        candidates = [*ahead, *([paused] if paused is not None else [])]
        if candidates:
            return min(candidates)
        return newest if newest > loaded else None

    def _paused(self, loaded: int) -> int | None:
        return min((row.version for row in self.rows if row.version > loaded), default=None)

    def _on_grid(self, row: Row) -> bool:
        """Whether the row may change weights before its next forward pass; a pinned one never may."""
        request = row.request
        return not request.pinned and row.position > request.first_position and row.position % self.swap_grid == 0
