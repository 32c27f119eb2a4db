"""Time as an object that is handed in, so that tests run on a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """Where a part gets the time from and how it waits."""

    def now_ms(self) -> int:
        """Wall clock: Unix time in milliseconds. May jump; only for time stamps that others read."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go backwards; for deadlines and durations."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait. Zero and negative values return at once."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        """Unix time in milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """``time.monotonic()``."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """``time.sleep()`` that takes any number."""
        if seconds > 0:
            time.sleep(seconds)
