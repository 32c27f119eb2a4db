"""Objects as they are handed out: each is hashed when it is first asked for, and again when its file is another one.

A download in parts would otherwise hash the whole object for every part.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Final

from protocol.store import Store, check_hash

#: Objects whose check is remembered.
_REMEMBERED: Final = 65_536
#: Bytes of an object in memory while it is hashed.
_PIECE_BYTES: Final = 2**20


class Shelf:
    """Reads a store for others. Thread-safe."""

    def __init__(self, store: Store):
        self._store = store
        self._checked: OrderedDict[str, tuple[tuple[int, ...], int]] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, sha256: str) -> int:
        """Bytes of an object that is known to be whole.

        Raises:
            LocalFault: ``E_NOT_FOUND``, ``E_OBJECT_HASH`` (the store damaged it), ``E_STORE``.
            Transient: the store cannot be reached.
        """
        stamp = self._store.stamp(sha256)
        with self._lock:
            known = self._checked.get(sha256)
            if known is not None and known[0] == stamp:
                self._checked.move_to_end(sha256)
                return known[1]
        size = self._hash(sha256)
        if stamp is not None and stamp == self._store.stamp(sha256):
            with self._lock:
                self._checked[sha256] = stamp, size
                while len(self._checked) > _REMEMBERED:
                    self._checked.popitem(last=False)
        return size

    def _hash(self, sha256: str) -> int:
        """Read all of an object, a piece at a time, and check its hash; its size in bytes."""
        digest, size = hashlib.sha256(), 0
        while piece := self._store.read(sha256, size, size + _PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
        check_hash(sha256, digest.hexdigest())
        return size

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` of an object whose :meth:`size` was asked for just before."""
        return self._store.read(sha256, start, end)
