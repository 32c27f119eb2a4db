"""How far a download is: a bar on a terminal, JSON lines otherwise."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Final, TextIO

from protocol.clock import Clock, SystemClock

#: Time between two bars and between two JSON lines, in seconds.
_BAR_S: Final = 0.2
_LINE_S: Final = 2.0
_WIDTH: Final = 30


class Progress:
    """Counts bytes from any thread; ``part`` fits ``SourcePool``'s ``on_part``."""

    def __init__(self, what: str, total: int, out: TextIO, *, clock: Clock | None = None):
        self._what, self._total, self._out, self._clock = what, total, out, clock or SystemClock()
        self._bar = out.isatty()
        self._lock = threading.Lock()
        self._sources: Counter[str] = Counter()
        self._started = self._said = self._clock.monotonic()

    def part(self, source: str, nbytes: int) -> None:
        """So many bytes came from a source."""
        with self._lock:
            self._sources[source] += nbytes
            now = self._clock.monotonic()
            if now - self._said >= (_BAR_S if self._bar else _LINE_S):
                self._said = now
                self._say()

    def close(self) -> None:
        """Say the last word."""
        with self._lock:
            self._say()
            if self._bar:
                self._out.write("\n")
                self._out.flush()

    def _say(self) -> None:
        done = self._sources.total()
        seconds = max(self._clock.monotonic() - self._started, 1e-6)
        if not self._bar:
            line = {
                "event": "progress", "what": self._what, "bytes": done, "total": self._total,
                "bytes_per_s": round(done / seconds), "sources": dict(self._sources),
            }
            self._out.write(json.dumps(line) + "\n")
        else:
            share = 1.0 if not self._total else min(1.0, done / self._total)
            bar = "#" * round(share * _WIDTH)
            self._out.write(
                f"\r{self._what} [{bar:<{_WIDTH}}] {share:4.0%} of {self._total / 2**20:.1f} MiB, "
                f"{done / seconds / 2**20:.1f} MiB/s from {len(self._sources)} "
            )
        self._out.flush()
