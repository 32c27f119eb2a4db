"""What a node offers to the swarm: verified chunks on its disk, and the word that others are on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from protocol.clock import Clock
from protocol.errors import E_NOT_FOUND, LocalFault
from protocol.swarm.wire import Status

#: A chunk is said to be coming for so long after the last one came, in seconds: a node that is stuck does not make
#: others wait for it.
COMING_S: Final = 30.0


class Chunks(Protocol):
    """Verified chunks by SHA-256; :class:`protocol.store.DirectoryStore` is one."""

    def has(self, sha256: str) -> bool:
        """Whether it is there."""
        ...

    def size(self, sha256: str) -> int:
        """Its bytes."""
        ...

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """A part of it."""
        ...


class Shelf:
    """Chunks to serve. Thread-safe."""

    def __init__(self, chunks: Chunks, clock: Clock):
        self._chunks, self._clock = chunks, clock
        self._lock = threading.Lock()
        self._coming: set[str] = set()
        self._moved_at = 0.0
        self.on_change: Callable[[], None] = lambda: None  #: called from any thread when a wait may be over

    @property
    def moved_at(self) -> float:
        """When a chunk came last, or began to be expected, in seconds of the clock."""
        with self._lock:
            return self._moved_at

    def status(self, key: str) -> Status:
        """Whether the chunk is here, coming or neither."""
        if self._chunks.has(key):
            return Status.HERE
        with self._lock:
            fresh = self._clock.monotonic() - self._moved_at < COMING_S
            return Status.COMING if fresh and key in self._coming else Status.ABSENT

    def read(self, key: str, start: int, length: int) -> tuple[bytes, int] | None:
        """A piece and the size of the whole; None when the chunk is not here or the piece lies outside."""
        try:
            total = self._chunks.size(key)
            if start >= total:
                return None
            return self._chunks.read(key, start, min(total, start + length)), total
        except LocalFault as error:
            if error.code == E_NOT_FOUND:
                return None
            raise

    def expect(self, keys: Iterable[str]) -> None:
        """These are being fetched."""
        with self._lock:
            self._coming.update(keys)
            self._moved_at = self._clock.monotonic()

    def settle(self, keys: Iterable[str], *, came: bool = True) -> None:
        """These came, or will not."""
        with self._lock:
            self._coming.difference_update(keys)
            if came:
                self._moved_at = self._clock.monotonic()
        self.on_change()
