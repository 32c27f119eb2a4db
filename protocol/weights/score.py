"""What a pool knows about one source: how fast it was, how often it failed, and whether it is still asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Weight of the newest measurement in the moving average of throughput.
_NEWEST: Final = 0.3
#: Rest after the first failure in a row, in seconds; doubles up to the second number.
_FIRST_REST_S: Final = 0.1
_LAST_REST_S: Final = 60.0
#: Bytes of the first part asked for, and bounds of later ones. As many parts of the most as chunks are on their way at
#: once make about one chunk, so that a kill costs no more than that.
_FIRST_PART: Final = 256 * 2**10
_LEAST_PART: Final = 64 * 2**10
_MOST_PART: Final = 2**20
#: A part should take about this long, in seconds: so much is lost when it fails.
_PART_S: Final = 2.0


@dataclass
class Score:
    """Marks of one source. Times are seconds of a monotonic clock, rates bytes per second."""

    name: str
    rate: float | None = None  #: moving average; None before the first delivery
    delivered: int = 0  #: bytes, right or not yet known
    failures: int = 0  #: of all time
    failed_in_a_row: int = 0
    slow_in_a_row: int = 0
    rests_until: float = 0.0
    asked_at: float = 0.0
    dropped: str | None = None  #: why it is not asked again in this run: code and words

    @property
    def value(self) -> float:
        """Larger is better; a source that was never tried comes first."""
        return float("inf") if self.rate is None and not self.failures else (self.rate or 1.0) / 2**self.failed_in_a_row

    @property
    def part_bytes(self) -> int:
        """How many bytes to ask for at once."""
        if self.rate is None:
            return max(_LEAST_PART, _FIRST_PART >> self.slow_in_a_row)
        return int(min(_MOST_PART, max(_LEAST_PART, (self.rate * _PART_S) / 2**self.slow_in_a_row)))

    def delivers(self, nbytes: int, seconds: float) -> None:
        """A part came."""
        rate = nbytes / max(seconds, 1e-3)
        self.rate = rate if self.rate is None else (1 - _NEWEST) * self.rate + _NEWEST * rate
        self.delivered += nbytes
        self.failed_in_a_row = self.slow_in_a_row = 0

    def fails(self, now: float, *, slow: bool = False, rest_s: float = 0.0) -> None:
        """A part did not come, for no bad reason: rest for a while, longer every time."""
        self.failures += 1
        self.failed_in_a_row += 1
        self.slow_in_a_row += slow
        rest = min(_LAST_REST_S, _FIRST_REST_S * 2 ** min(self.failed_in_a_row - 1, 10))
        self.rests_until = now + max(rest, min(rest_s, _LAST_REST_S))
