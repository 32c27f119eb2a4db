"""Signed heads of the run's log that peers pass on, so that a coordinator cannot show two logs to two nodes.

What one node was shown reaches the others, however few it talks to; each compares it with what it was shown itself
(:mod:`node.witness`). No network here. Spec: ``docs/spec/swarm.md``, "The log".
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from protocol.errors import E_TOO_LARGE, PeerFault
from protocol.log_head import LogHead
from protocol.signed_note import malformed
from protocol.swarm.wire import MAX_HEAD_BYTES


class LogNotes:
    """The largest log head the coordinator signed, as far as we heard. Thread-safe.

    Args:
        on_note: called, in the thread of :meth:`hear`, with every note that came from a peer and says something new.
    """

    def __init__(self, coordinator_key: bytes, run_id: str, on_note: Callable[[str], None] = lambda _: None):
        self._key, self._run_id, self._on_note = coordinator_key, run_id, on_note
        self._lock = threading.Lock()
        self._largest: LogHead | None = None
        self._contradicted = False

    @property
    def size(self) -> int:
        """Entries of the largest log heard of; -1 before the first."""
        with self._lock:
            return -1 if self._largest is None else self._largest.size

    def hear(self, data: bytes, *, own: bool = False) -> bool:
        """Take a note in; True when it is to travel on: it is larger than those before, or contradicts the largest.

        ``own``: the coordinator gave it to us; nobody is told of it. One contradiction travels, and no more: two
        signed heads are proof enough, and a coordinator could sign any number.

        Raises:
            PeerFault: it is not the coordinator's word: ``E_TOO_LARGE``, ``E_NOTE``, ``E_LOG_ORIGIN``, ``E_SIGNATURE``.
        """
        if len(data) > MAX_HEAD_BYTES:
            raise PeerFault(E_TOO_LARGE, "log head too large", expected=f"<= {MAX_HEAD_BYTES} bytes", got=len(data))
        try:
            note = data.decode()
        except UnicodeDecodeError:
            raise malformed("UTF-8", repr(data[:80])) from None
        head = LogHead.open(note, self._run_id, self._key)
        with self._lock:
            known = self._largest
            contradicts = known is not None and head.size == known.size and head.root != known.root
            travels = known is None or head.size > known.size or (contradicts and not self._contradicted)
            self._contradicted |= contradicts
            if known is None or head.size > known.size:
                self._largest = head
        if not own and head != known:
            self._on_note(note)
        return travels
