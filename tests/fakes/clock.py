"""A clock that moves only when told, or when somebody sleeps on it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class FakeClock:
    """Implements ``protocol.clock.Clock``; ``sleep`` returns at once and moves the time on."""

    def __init__(self, start_ms: int = 1_700_000_000_000, on_sleep: Callable[[float], None] | None = None):
        self._lock = threading.Lock()
        self._start_ms = start_ms
        self._elapsed_ms = 0.0
        self._skew_ms = 0
        self._on_sleep = on_sleep
        self.slept: list[float] = []

    def now_ms(self) -> int:
        with self._lock:
            return self._start_ms + int(self._elapsed_ms) + self._skew_ms

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed_ms / 1000

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(max(seconds, 0.0))
        if self._on_sleep is not None:
            self._on_sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Move both clocks on."""
        with self._lock:
            self._elapsed_ms += seconds * 1000

    def jump(self, seconds: float) -> None:
        """Set the wall clock forwards or back without moving the monotonic one."""
        with self._lock:
            self._skew_ms += int(seconds * 1000)
