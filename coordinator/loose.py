"""Objects that nodes sent, or may send, and that nothing names yet: few per node, and gone after a while.

Kept in memory. A restart forgets them: what is in the store by then stays there.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from protocol.store import Store

#: How long an object waits for a commitment that names it, in milliseconds.
KEPT_MS: Final = 3_600_000


class Loose:
    """Whose the loose objects are. Thread-safe; raises what the store raises when it deletes.

    Args:
        longest_ms: time after which no upload that was granted before can still be under way.
    """

    def __init__(self, store: Store, longest_ms: float):
        self._store, self._longest_ms = store, longest_ms
        self._lock = threading.Lock()
        self._of: dict[str, OrderedDict[str, int]] = {}  #: node -> object -> when it was heard of last
        self._allowed: dict[str, int] = {}
        self._named: dict[str, int] = {}  #: object -> when it was named: not loose again, whatever is sent late
        self._given_up: dict[str, int] = {}  #: object -> when; deleted once more when no upload of it can be under way
        self._naming: Counter[str] = Counter()  #: objects that are about to be named

    def grant(self, node: str, sha256: str, allowed: int, now_ms: int) -> None:
        """A node may send an object that is not there. Of more than ``allowed`` its oldest are given up."""
        with self._lock:
            self._allowed[node] = allowed
            self._note(node, sha256, now_ms)

    def share(self, node: str, sha256: str, now_ms: int) -> None:
        """A node counts on an object that may be there; when it is a loose one, it is this node's too."""
        with self._lock:
            if self._is_loose(sha256):
                self._note(node, sha256, now_ms)

    def sending(self, node: str, sha256: str) -> bool:
        """Whether a node may still send what it was granted."""
        with self._lock:
            return sha256 in self._of.get(node, ())

    def sent(self, node: str, sha256: str, now_ms: int) -> None:
        """A node sent an object, which is there. If it was given up meanwhile, it is deleted."""
        with self._lock:
            if sha256 in self._of.get(node, ()):
                self._note(node, sha256, now_ms)
            elif not self._is_wanted(sha256):
                self._store.delete(sha256)

    @contextmanager
    def naming(self, names: Iterable[str], now_ms: int) -> Iterator[None]:
        """Objects are named by what is recorded within; when that raises, they are as loose as before."""
        names = set(names)
        with self._lock:
            taken = [
                (node, sha256, objects.pop(sha256))
                for sha256 in names for node, objects in self._of.items() if sha256 in objects
            ]
            self._naming.update(names)
        named = False
        try:
            yield
            named = True
        finally:
            with self._lock:
                self._naming -= Counter(names)
                if named:
                    self._named |= dict.fromkeys(names, now_ms)
                    for objects in self._of.values():
                        for sha256 in names & objects.keys():
                            del objects[sha256]
                else:
                    self._put_back(taken)

    def _put_back(self, taken: list[tuple[str, str, int]]) -> None:
        for node, sha256, heard_ms in taken:
            if sha256 not in self._named:
                mine = self._of.setdefault(node, OrderedDict())
                mine[sha256] = heard_ms
                mine.move_to_end(sha256, last=False)

    def sweep(self, now_ms: int) -> None:
        """Delete what nobody has named in time."""
        with self._lock:
            for node in list(self._of):
                mine = self._of[node]
                for sha256 in [sha256 for sha256, heard_ms in mine.items() if heard_ms < now_ms - KEPT_MS]:
                    self._drop(node, sha256, now_ms)
                if not mine:
                    del self._of[node]
                    self._allowed.pop(node, None)
            over_ms = now_ms - self._longest_ms
            for sha256 in [sha256 for sha256, given_up_ms in self._given_up.items() if given_up_ms < over_ms]:
                del self._given_up[sha256]
                if not self._is_wanted(sha256):
                    self._store.delete(sha256)
            self._named = {sha256: named_ms for sha256, named_ms in self._named.items() if named_ms >= over_ms}

    def _note(self, node: str, sha256: str, now_ms: int) -> None:
        if sha256 in self._named:
            return
        mine = self._of.setdefault(node, OrderedDict())
        mine[sha256] = now_ms
        mine.move_to_end(sha256)
        while len(mine) > max(1, self._allowed.get(node, 1)):
            self._drop(node, next(iter(mine)), now_ms)

    def _drop(self, node: str, sha256: str, now_ms: int) -> None:
        del self._of[node][sha256]
        if not self._is_wanted(sha256):
            self._store.delete(sha256)
            self._given_up[sha256] = now_ms

    def _is_loose(self, sha256: str) -> bool:
        return any(sha256 in objects for objects in self._of.values())

    def _is_wanted(self, sha256: str) -> bool:
        return sha256 in self._named or sha256 in self._naming or self._is_loose(sha256)
