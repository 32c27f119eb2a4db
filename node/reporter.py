"""The thread that writes status.json and asks the coordinator what became of our work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from node.explanation import ban_in_words
from node.health import Health, Outcome
from node.home import Home
from node.worker import Worker
from protocol.clock import Clock
from protocol.errors import AssayError

_RATE_WINDOW: Final = 15  #: reports over which tokens/s is measured


class Registry(Protocol):
    """Who knows our record; :class:`protocol.client.CoordinatorClient` is one."""

    def node(self, node_id: str) -> dict[str, Any]:
        """One node's record."""
        ...


class Reporter(Worker):
    """Writes what the daemon is doing, and why it is not."""

    name = "status"

    def __init__(
        self, health: Health, registry: Registry, home: Home, node_id: str, look: Callable[[], dict[str, Any]],
        clock: Clock, *, report_s: float, contact_s: float, peers: Callable[[], dict[str, Any]],
    ):
        super().__init__(health)
        self._registry, self._home, self._node_id, self._look = registry, home, node_id, look
        self._clock, self._report_s, self._contact_s, self._peers = clock, report_s, contact_s, peers
        self._asked_at = clock.monotonic() - contact_s
        self._rate: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)

    def work(self) -> float:
        """One report."""
        self.write()
        if self._clock.monotonic() - self._asked_at >= self._contact_s:
            record = self._ask()
            if record.get("state") == "banned":
                self.health.end(
                    Outcome.REFUSED, f"banned: {ban_in_words(record)}"
                )
        return self._report_s

    def conclude(self) -> None:
        """The last report: what became of our work is asked once more, so that the counts it leaves are the final ones.

        Raises:
            LocalFault: it cannot be written.
        """
        try:
            self._ask()
        except AssayError as error:
            self.health.fault("end", error)
        self.write()

    def _ask(self) -> dict[str, Any]:
        self._asked_at = self._clock.monotonic()
        record = self._registry.node(self._node_id)
        self.health.contact()
        self.health.know(record)
        return record

    def write(self) -> None:
        """Write status.json and peers.json now.

        Raises:
            LocalFault: they cannot be written.
        """
        status, peers = self.status(), self._peers()
        self._home.write_status(status)
        self._home.write_peers(peers | {"updated_at_ms": status["updated_at_ms"]})

    def status(self) -> dict[str, Any]:
        """The status as it is now."""
        status = self._look() | self.health.snapshot()
        self._rate.append((self._clock.monotonic(), int(status["tokens"])))
        (start, before), (end, now) = self._rate[0], self._rate[-1]
        status["tokens_per_s"] = round((now - before) / (end - start), 1) if end > start else 0.0
        contact = status["last_contact_ms"]
        now_ms = self._clock.now_ms()
        status["last_contact_age_s"] = None if contact is None else round((now_ms - contact) / 1000, 1)
        status["troubles"] = self.health.troubles()
        status["why"] = self._why(status)
        status["updated_at_ms"] = now_ms
        return status

    def _why(self, status: dict[str, Any]) -> str:
        """Why nothing is generated; empty while something is."""
        if self.health.ending is not None:
            return self.health.ending[1]
        if status["open_samples"]:
            return ""
        troubles = status["troubles"]
        return "; ".join(f"{trouble['about']}: {trouble['what']}" for trouble in troubles) or "waiting for a lease"
