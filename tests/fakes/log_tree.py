"""A transparency log's tree in memory."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.transparency import grown


class Tree:
    """Subtrees of a log in memory, by (level, index)."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self.nodes: dict[tuple[int, int], bytes] = {}
        self.size = 0
        for leaf in leaves:
            self.append(leaf)

    def append(self, leaf: bytes) -> None:
        for level, index, node in grown(self, self.size, leaf):
            assert (level, index) not in self.nodes
            self.nodes[level, index] = node
        self.size += 1

    def __call__(self, level: int, index: int) -> bytes:
        return self.nodes[level, index]
