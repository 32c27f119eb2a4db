"""Places for uploads: few at a time, dealt fairly between addresses, then between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from protocol.errors import E_RATE_LIMITED, Transient


@dataclass(eq=False)
class _Place:
    node: str
    address: str
    sha256: str
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Places:
    """Who is sending us an object. For one event loop, not for threads.

    While there is room, whoever may upload gets a place. When there is none, a newcomer takes that of the address, or
    else of the node, that holds at least two more than it does; so nobody's slow or silent uploads keep others out.
    """

    def __init__(self, total: int, per_node: int):
        self._total, self._per_node = total, per_node
        self._held: list[_Place] = []

    @property
    def held(self) -> int:
        """Places that are taken."""
        return len(self._held)

    @contextmanager
    def hold(self, node: str, address: str, sha256: str) -> Iterator[None]:
        """A place for the time of one upload. The same object of the same node again takes over its own place: what
        came before is a connection that broke.

        Raises:
            Transient: ``E_RATE_LIMITED`` when there is no place, or another one needed this one.
        """
        self._make_room(node, address, sha256)
        place = _Place(node, address, sha256)
        self._held.append(place)
        try:
            with place.scope:
                yield
        finally:
            self._leave(place)
        if place.scope.cancelled_caught:
            raise _busy("another upload takes this one's place", f"a fair share of {self._total}")

    def _make_room(self, node: str, address: str, sha256: str) -> None:
        for place in [p for p in self._held if (p.node, p.sha256) == (node, sha256)]:
            self._drop(place)
        if sum(place.node == node for place in self._held) >= self._per_node:
            raise _busy("too many uploads of one node at once", f"<= {self._per_node}")
        if len(self._held) < self._total:
            return
        victim = self._richest(lambda place: place.address, address) or self._richest(lambda place: place.node, node)
        if victim is None:
            raise _busy("too many uploads at once", f"<= {self._total}")
        self._drop(victim)

    def _richest(self, owner: Callable[[_Place], str], newcomer: str) -> _Place | None:
        """The newest place of whoever holds most, if that is at least two more than the newcomer holds."""
        counts = Counter(map(owner, self._held))
        most, count = counts.most_common(1)[0]
        if count < counts[newcomer] + 2:
            return None
        theirs = [place for place in self._held if owner(place) == most]
        node, _ = Counter(place.node for place in theirs).most_common(1)[0]
        return [place for place in theirs if place.node == node][-1]

    def _drop(self, place: _Place) -> None:
        place.scope.cancel()
        self._leave(place)

    def _leave(self, place: _Place) -> None:
        if place in self._held:
            self._held.remove(place)


def _busy(what: str, expected: str) -> Transient:
    busy = Transient(E_RATE_LIMITED, what, expected=expected)
    busy.retry_after_s = 1.0
    return busy
