"""The thread that follows the learner's checkpoints."""

from __future__ import annotations

import logging

from node.health import Health
from node.weights import Weights
from node.worker import Worker
from protocol.clock import Clock

_LOG = logging.getLogger(__name__)


class Watcher(Worker):
    """Polls the checkpoint head, moves the weights along and saves them now and then."""

    name = "weights"
    patience_s = 3.0

    def __init__(self, health: Health, weights: Weights, clock: Clock, *, poll_s: float, save_s: float):
        super().__init__(health)
        self._weights, self._clock, self._poll_s, self._save_s = weights, clock, poll_s, save_s
        self._saved_at = clock.monotonic()

    def work(self) -> float:
        """One look at the head."""
        moved = self._weights.poll(self._clock.now_ms())
        self.health.contact()
        if moved:
            _LOG.info("weights followed", extra={"version": self._weights.newest()})
        if moved and self._clock.monotonic() - self._saved_at >= self._save_s:
            self._weights.save()
            self._saved_at = self._clock.monotonic()
        return self._poll_s
