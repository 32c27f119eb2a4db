"""The thread that follows the learner's checkpoints."""

from __future__ import annotations

import logging
import threading
from typing import Final

from node.health import Health
from node.weights import Weights
from node.worker import Worker
from protocol.clock import Clock

_LOG = logging.getLogger(__name__)

#: How soon news cuts a nap short, in seconds.
_BLINK_S: Final = 0.1


class Watcher(Worker):
    """Polls the checkpoint head, moves the weights along and saves them now and then."""

    name = "weights"
    patience_s = 3.0

    def __init__(self, health: Health, weights: Weights, clock: Clock, *, poll_s: float, save_s: float):
        super().__init__(health)
        self._weights, self._clock, self._poll_s, self._save_s = weights, clock, poll_s, save_s
        self._saved_at = clock.monotonic()
        self._news = threading.Event()

    def look(self) -> None:
        """Look at the head now: somebody said that there is a newer one."""
        self._news.set()

    def nap(self, seconds: float) -> None:
        """Wait, but no longer than until there is news."""
        until = self._clock.monotonic() + seconds
        while not self._news.is_set() and (left := until - self._clock.monotonic()) > 0:
            super().nap(min(left, _BLINK_S))
            if self.health.stopping.is_set():
                return

    def work(self) -> float:
        """One look at the head."""
        self._news.clear()
        moved = self._weights.poll(self._clock.now_ms())
        self.health.contact()
        if moved:
            _LOG.info("weights followed", extra={"version": self._weights.newest()})
        if moved and self._clock.monotonic() - self._saved_at >= self._save_s:
            self._weights.save()
            self._saved_at = self._clock.monotonic()
        return self._poll_s
