"""The units a node holds, shared between the thread that leases, the engine's thread and the thread that uploads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from node.engine import Finished
from node.unit import Unit, unit_of_key


class Workload:
    """Accepted units until they are complete or given up. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in while its thread holds it
        self._units: dict[str, Unit] = {}
        self._incoming: list[Unit] = []
        self._returns: dict[str, str] = {}
        self.news = threading.Event()  #: set when there is something to take
        self.room = threading.Event()  #: set when there is room for work, or something to hand back

    @property
    def open_samples(self) -> int:
        """Samples accepted and not generated yet."""
        with self._lock:
            return sum(len(unit.lease.samples) - len(unit.rollouts) for unit in self._units.values())

    def units(self) -> list[Unit]:
        """All accepted units."""
        with self._lock:
            return list(self._units.values())

    def accept(self, unit: Unit) -> bool:
        """Take a unit on; False when it is held already."""
        with self._lock:
            if unit.id in self._units:
                return False
            self._units[unit.id] = unit
            self._incoming.append(unit)
        self.news.set()
        return True

    def take_incoming(self) -> list[Unit]:
        """Units accepted since the last call."""
        with self._lock:
            taken, self._incoming = self._incoming, []
        return taken

    def finished(self, done: Finished) -> Unit | None:
        """Note a rollout; the unit, when it was its last one."""
        with self._lock:
            unit = self._units.get(unit_of_key(done.request.key))
            if unit is None:
                return None
            unit.rollouts[done.request.sample] = done.rollout
            complete = self._units.pop(unit.id) if unit.complete else None
        self.room.set()
        return complete

    def give_up(self, which: Callable[[Unit], bool], reason: str) -> list[Unit]:
        """Remove the units that ``which`` picks, to be handed back for ``reason``; they are returned."""
        with self._lock:
            picked = [unit for unit in self._units.values() if which(unit)]
            for unit in picked:
                del self._units[unit.id]
                self._returns[unit.id] = reason
            self._incoming = [unit for unit in self._incoming if unit.id in self._units]
        if picked:
            self.room.set()
        return picked

    def refuse(self, lease_id: str, reason: str) -> None:
        """Hand a lease back that was never accepted."""
        with self._lock:
            self._returns[lease_id] = reason
        self.room.set()

    def take_returns(self) -> dict[str, str]:
        """Lease ids to hand back, with the reason of each."""
        with self._lock:
            taken, self._returns = self._returns, {}
        return taken

    def put_returns(self, returns: dict[str, str]) -> None:
        """Hand these back later: it did not work now."""
        with self._lock:
            self._returns = returns | self._returns


def keys_of(units: Iterable[Unit]) -> list[str]:
    """Request keys of all samples of ``units``."""
    return [key for unit in units for key in unit.request_keys()]
