"""The way back from the newest state: what each version changed, for as many versions as memory allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from protocol.weights.layout import State, copy_state
from protocol.weights.undo import Undo


class Trail:
    """Undo logs between consecutive states; ``max_bytes`` bounds what they hold, the oldest go first."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._undos: deque[tuple[int, Undo]] = deque()  #: version it leads back to
        self._newest: tuple[int, State] | None = None

    @property
    def version(self) -> int | None:
        """The newest version; None before the first."""
        return None if self._newest is None else self._newest[0]

    @property
    def state(self) -> State:
        """The newest state; there must be one."""
        assert self._newest is not None
        return self._newest[1]

    def step(self, version: int, old: State | None, new: State) -> None:
        """``new`` is the state of ``version`` and ``old`` that of the one before; neither may change any more."""
        if old is None or self.version != version - 1:
            self._undos.clear()
        if old is not None:
            self._undos.append((version - 1, _undo(old, new)))
        self._newest = version, new
        while sum(undo.nbytes for _, undo in self._undos) > self._max_bytes:
            self._undos.popleft()

    def back_to(self, versions: Iterable[int]) -> Iterator[tuple[int, State]]:
        """The states of those of ``versions`` that are in reach, newest first; each is valid until the next."""
        wanted, state = set(versions), None
        for before, undo in reversed(self._undos):
            state = copy_state(self.state) if state is None else state
            undo.revert(state)
            if before in wanted:
                yield before, state


def _undo(old: State, new: State) -> Undo:
    undo = Undo()
    for name, after in new.items():
        before = old[name].reshape(-1)
        where = np.flatnonzero(before != after.reshape(-1))
        if len(where):
            undo.writes.append((name, where.astype(np.uint32) if where[-1] < 2**32 else where, before[where]))
    return undo
