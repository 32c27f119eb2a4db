"""Connections: few per address, a deadline for what must come, a pace for what must be taken.

Uvicorn itself waits without end for the head of a request and for a reader, and counts connections only as a whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.edge import network_of

logger = logging.getLogger(__name__)

#: How often a reader that has fallen behind is looked at, in seconds.
LOOK_S: Final = 30.0


class Connections:
    """What is open. For one event loop, not for threads.

    Args:
        total: connections at once. The next one takes the place of one that waits for a request, of the address that
            holds most of those; when there is none, it is refused.
        per_address: connections of one address (an IPv6 network) at once.
        head_s: time for the head of a request, in seconds.
        bytes_per_s: slowest pace of a reader, once it has fallen behind.
        look_s: how often such a reader is looked at, in seconds.
    """

    def __init__(self, total: int, per_address: int, head_s: float, bytes_per_s: float, look_s: float):
        self.total, self.per_address = total, per_address
        self.head_s, self.bytes_per_s, self.look_s = head_s, bytes_per_s, look_s
        self._open: dict[Connection, None] = {}
        self._of: Counter[str] = Counter()

    def enter(self, connection: Connection) -> bool:
        """Count a new connection; False when there is no room for it."""
        if not connection.trusted and self._of[connection.network] >= self.per_address:
            return False
        if len(self._open) >= self.total and not self._make_room():
            return False
        self._open[connection] = None
        self._of[connection.network] += 1
        return True

    def leave(self, connection: Connection) -> None:
        """Count a connection no more; nothing happens when it was not counted."""
        if connection in self._open:
            del self._open[connection]
            self._of[connection.network] -= 1
            if not self._of[connection.network]:
                del self._of[connection.network]

    def _make_room(self) -> bool:
        waiting = [connection for connection in self._open if connection.waits]
        if not waiting:
            return False
        most, _ = Counter(connection.network for connection in waiting).most_common(1)[0]
        longest = next(connection for connection in waiting if connection.network == most)
        self.leave(longest)
        longest.transport.abort()
        return True


class Connection(H11Protocol):
    """One connection to a server whose ``connections`` it is counted among."""

    connections_of_server: Connections
    trusted_hosts: Any  #: proxies: they speak for others, and are not limited as one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, or close it; then its first request has to come in time."""
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        self.network, self.trusted = network_of(host), host in self.trusted_hosts
        self._head: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._left = 0
        if not self.connections_of_server.enter(self):
            logger.warning("connection refused", extra={"address": host})
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It holds nothing any more."""
        self.connections_of_server.leave(self)
        for timer in (self._head, self._look):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        """Bytes outside of a request are the head of the next one, or the rest of a body that was refused."""
        super().data_received(data)
        if not self.waits:
            self._stop_head()
        elif self._head is None:
            self._await_head()

    def pause_writing(self) -> None:
        """The reader has fallen behind."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The reader has caught up."""
        super().resume_writing()
        self._stop_watching()

    def on_response_complete(self) -> None:
        """What is left of the answer has to be read as well, whether the connection is kept or not."""
        super().on_response_complete()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Look again in a while whether the reader took enough of what waits for it in our memory."""
        self._stop_watching()
        self._left = self.transport.get_write_buffer_size()
        if self._left:
            self._look = self.loop.call_later(self.connections_of_server.look_s, self._look_again)

    def _look_again(self) -> None:
        rules, left = self.connections_of_server, self.transport.get_write_buffer_size()
        if left and self._left - left < rules.bytes_per_s * rules.look_s:
            self.transport.abort()
        else:
            self._watch_reader()

    def _await_head(self) -> None:
        self._head = self.loop.call_later(self.connections_of_server.head_s, self._no_head)

    def _no_head(self) -> None:
        self._head = None
        if self.waits:
            self.transport.abort()

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _stop_watching(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None


def counted(connections: Connections, trusted_hosts: Any) -> type[Connection]:
    """The protocol of a server whose connections are counted there.

    Args:
        trusted_hosts: whatever says with ``in`` whether an address is a proxy's.
    """
    return type("CountedConnection", (Connection,), {
        "connections_of_server": connections, "trusted_hosts": trusted_hosts,
    })
