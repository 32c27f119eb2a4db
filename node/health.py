"""What the node's threads know about its condition: troubles with their age, contact, counters, the way out."""

from __future__ import annotations

import threading
from collections import Counter
from enum import IntEnum
from typing import Any

from protocol.api import E_NODE_BANNED, E_NODE_UNKNOWN
from protocol.clock import Clock
from protocol.errors import AssayError


class Outcome(IntEnum):
    """Why a daemon ended; the value is the exit status."""

    DONE = 0  #: the run is complete, or we were asked to end and did
    FAULT = 1  #: something broke, or we were told twice to end
    REFUSED = 3  #: banned, unknown to the coordinator, or a drill that is not enrolled


class Health:
    """Shared notes of a daemon. All methods may be called from any thread."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may come in while its thread holds it
        self._troubles: dict[str, tuple[str, float]] = {}
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._record: dict[str, Any] = {}
        self._last_contact_ms: int | None = None
        self._ending: tuple[Outcome, str] | None = None
        self.stopping = threading.Event()  #: threads end soon after it is set
        self.draining = threading.Event()  #: no new work is taken any more

    # -- troubles ----------------------------------------------------------------------------------------

    def contact(self) -> None:
        """The coordinator answered."""
        with self._lock:
            self._last_contact_ms = self._clock.now_ms()

    def trouble(self, about: str, text: str | None) -> None:
        """Note what is wrong with ``about``, or None: nothing. The age is that of the first note."""
        with self._lock:
            if text is None:
                self._troubles.pop(about, None)
            else:
                since = self._troubles.get(about, ("", self._clock.monotonic()))[1]
                self._troubles[about] = (text, since)

    def fault(self, about: str, error: AssayError) -> None:
        """Note an error; one that says we are not wanted ends the daemon."""
        self.trouble(about, str(error))
        if error.code in {E_NODE_BANNED, E_NODE_UNKNOWN}:
            self.end(Outcome.REFUSED, str(error))

    def troubles(self) -> list[dict[str, Any]]:
        """Troubles, the oldest first."""
        now = self._clock.monotonic()
        with self._lock:
            items = sorted(self._troubles.items(), key=lambda item: item[1][1])
            return [{"about": a, "what": text, "for_s": round(now - since, 1)} for a, (text, since) in items]

    # -- counters and the coordinator's record -----------------------------------------------------------

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[what] += by

    def refused(self, error: AssayError) -> None:
        """A lease we refused, or work of ours that was refused."""
        with self._lock:
            self._refusals[error.code] += 1

    def know(self, record: dict[str, Any]) -> None:
        """What the coordinator's record of us says."""
        with self._lock:
            self._record = record

    def snapshot(self) -> dict[str, Any]:
        """Counters, record and contact, for status.json."""
        kept = (
            "accepted", "rejected", "inconclusive", "reasons", "credit", "credit_pending", "dropped", "drill",
            "pinned_ms",
        )
        with self._lock:
            record = {name: self._record.get(name) for name in kept}
            return record | {
                "counts": dict(self._counts), "refusals": dict(self._refusals),
                "last_contact_ms": self._last_contact_ms,
            }

    # -- the end -----------------------------------------------------------------------------------------

    def end(self, outcome: Outcome, why: str, *, at_once: bool = False) -> None:
        """The daemon is to end; the first reason stands, unless a later one is ``at_once``."""
        with self._lock:
            if self._ending is None or at_once:
                self._ending = (outcome, why)

    @property
    def ending(self) -> tuple[Outcome, str] | None:
        """Why the daemon is to end, or None."""
        with self._lock:
            return self._ending
