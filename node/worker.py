"""Background threads that do one thing again and again, survive the network and never die unseen."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Final

from node.health import Health, Outcome
from protocol.errors import AssayError, LocalFault, PeerFault, Transient

_LOG = logging.getLogger(__name__)

#: First wait after a fault, in seconds; it doubles up to the worker's ``patience_s``.
_FIRST_WAIT_S: Final = 0.1


class Worker(ABC):
    """One background activity."""

    name: str
    patience_s: float = 15.0  #: longest wait after a fault

    def __init__(self, health: Health):
        self.health = health
        self._wait_s = _FIRST_WAIT_S
        self._thread = threading.Thread(target=self._loop, name=f"node-{self.name}", daemon=True)

    @abstractmethod
    def work(self) -> float:
        """Do one round; returns the seconds to wait before the next."""

    def nap(self, seconds: float) -> None:
        """Wait, but no longer than until the daemon stops."""
        self.health.stopping.wait(seconds)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def round(self) -> float:
        """One round with its faults noted; the seconds to wait.

        Raises:
            Exception: what is not one of our errors, a bug.
        """
        try:
            wait_s = self.work()
        except Transient as error:
            self.health.fault(self.name, error)
            return max(self._backoff(), error.retry_after_s)
        except (PeerFault, LocalFault) as error:
            self.health.fault(self.name, error)
            _LOG.warning("%s: %s", self.name, error, extra={"code": error.code})
            return self._backoff()
        self._wait_s = _FIRST_WAIT_S
        self.health.trouble(self.name, None)
        return wait_s

    def _backoff(self) -> float:
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, self.patience_s)
        return wait_s

    def _loop(self) -> None:
        while not self.health.stopping.is_set():
            try:
                wait_s = self.round()
            except Exception as error:  # noqa: BLE001 (the thread's boundary: a bug must end the daemon, loudly)
                code = error.code if isinstance(error, AssayError) else type(error).__name__
                _LOG.exception("thread %s failed", self.name, extra={"code": code})
                self.health.end(Outcome.FAULT, f"{self.name}: {type(error).__name__}: {error}")
                return
            self.nap(wait_s)
