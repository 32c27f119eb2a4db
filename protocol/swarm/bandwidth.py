"""A bandwidth limit as a token bucket: says how long to wait, lets others do the waiting."""

from __future__ import annotations

from typing import Final

from protocol.clock import Clock

#: The bucket holds this many seconds' worth of bytes, so that a quiet line is not slower than its limit.
_BURST_S: Final = 0.25


class Bandwidth:
    """At most ``rate`` bytes per second on average; None: no limit. Not thread-safe."""

    def __init__(self, rate: float | None, clock: Clock):
        self._rate, self._clock = rate, clock
        self._free_at = 0.0  #: when the bytes granted so far are through
        self.total = 0  #: bytes granted

    def grant(self, nbytes: int) -> float:
        """Count ``nbytes`` in; seconds to wait before they may be moved."""
        self.total += nbytes
        if self._rate is None:
            return 0.0
        now = self._clock.monotonic()
        begin = max(self._free_at, now - _BURST_S)
        self._free_at = begin + nbytes / self._rate
        return max(0.0, begin - now)

    def queue_s(self) -> float:
        """How long the next bytes would have to wait, in seconds."""
        return 0.0 if self._rate is None else max(0.0, self._free_at - self._clock.monotonic())
