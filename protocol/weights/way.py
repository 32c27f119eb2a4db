"""The cheapest way to a version: which diffs, skips and anchor to fetch, and what the other ways would cost.

Versions are nodes and whatever leads to one is an edge that costs its stored bytes; the search goes backwards from the
version wanted (Dijkstra 1959), so that skips are only asked for where they can matter. Spec: ``docs/spec/weights.md``,
"The cheapest way".
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from protocol.errors import AssayError, PeerFault
from protocol.messages import ChunkRef
from protocol.weights.link import E_CHECKPOINT_GAP, Link
from protocol.weights.skips import FindSkips, announced_skips

logger = logging.getLogger(__name__)

#: Most versions whose skips are asked for in one search.
_MAX_LOOKUPS: Final = 64
#: The node before any version: nothing is held.
_NOTHING: Final = -1


@dataclass(frozen=True)
class Step:
    """One edge of the way: ``refs`` lead from version ``start`` (None: from nothing) to that of ``link``."""

    kind: Literal["anchor", "diff", "skip"]
    start: int | None
    link: Link
    refs: Sequence[ChunkRef]
    relay: str | None = None  #: public key of a skip's builder

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(ref.size_bytes for ref in self.refs)


@dataclass(frozen=True)
class Way:
    """A way from what is held to ``target``, and the bytes of the ways that were not taken."""

    steps: Sequence[Step]
    fresh: Sequence[Link]  #: the checked links it was made from, the last one the target
    held: int | None
    chain_bytes: int | None  #: one diff after another; None when no unbroken chain leads there
    anchor_bytes: int | None  #: the newest anchor and the diffs after it; None without an anchor

    @property
    def target(self) -> Link:
        """The version it leads to."""
        return self.fresh[-1]

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(step.nbytes for step in self.steps)

    @property
    def refs(self) -> list[ChunkRef]:
        """Every chunk on the way, in order."""
        return [ref for step in self.steps for ref in step.refs]

    def describe(self) -> str:
        """The plan in words: how each version is reached, its bytes, and what the other ways would have cost."""
        words = [f"version {self.held}" if self.held is not None else "nothing held"]
        words += [f"{step.kind} to {step.link.version} ({step.nbytes:,} B)" for step in self.steps]
        ways = [("diffs one by one", self.chain_bytes), ("newest anchor and diffs", self.anchor_bytes)]
        others = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in ways if nbytes is not None)
        return f"{' -> '.join(words)}: {self.nbytes:,} B in all ({others})"


def cheapest_way(
    fresh: Sequence[Link], held: Link | None, find: FindSkips | None, *, refused_relays: Collection[str] = (),
    without: Collection[tuple[str, int]] = (),
) -> Way:
    """The way with the fewest bytes, and among those the one with the fewest steps.

    ``fresh`` are checked links in a row, the last one the target; the first need not follow ``held``. ``without`` holds
    kind and version of steps that cannot be had.

    Raises:
        PeerFault: ``E_CHECKPOINT_GAP`` when no way leads to the target.
    """
    links = {link.version: link for link in fresh}
    if held is not None:
        links[held.version] = held
    source, target = (_NOTHING if held is None else held.version), fresh[-1].version
    edges = _Edges(links, find, refused_relays, without, not_below=max(source, 0))
    best: dict[int, tuple[int, int]] = {target: (0, 0)}
    after: dict[int, Step] = {}  # the edge that leaves a version
    queue, done = [(0, 0, target)], set()
    reached = None
    while queue and reached is None:
        cost, count, version = heapq.heappop(queue)
        if version in done:
            continue
        done.add(version)
        if version in (source, _NOTHING):
            reached = version
            break
        for step in edges.to(version):
            start = _NOTHING if step.start is None else step.start
            candidate = (cost + step.nbytes, count + 1)
            if start not in best or candidate < best[start]:
                best[start], after[start] = candidate, step
                heapq.heappush(queue, (*candidate, start))
    if reached is None:
        raise PeerFault(
            E_CHECKPOINT_GAP, f"no way leads to version {target}",
            expected="an anchor" if held is None else f"version {held.version + 1} or an anchor",
            got=f"versions {fresh[0].version} to {target}",
        )
    return Way(
        _walk(after, reached, target), fresh, None if held is None else held.version,
        _chain_bytes(links, held, target), _anchor_bytes(links, target),
    )


class _Edges:
    """What leads to each version. Skips are asked for at most ``_MAX_LOOKUPS`` times, and no more after a failure."""

    def __init__(
        self, links: Mapping[int, Link], find: FindSkips | None, refused: Collection[str],
        without: Collection[tuple[str, int]], *, not_below: int,
    ):
        self._links, self._find, self._refused, self._not_below = links, find, refused, not_below
        self._without = without
        self._manifests = {version: link.manifest for version, link in links.items()}
        self._lookups = 0

    def to(self, version: int) -> list[Step]:
        """Diff, anchor and skips that end at ``version``."""
        link = self._links[version]
        steps = []
        if link.manifest.diff and version - 1 in self._links and ("diff", version) not in self._without:
            steps.append(Step("diff", version - 1, link, link.manifest.diff))
        if link.manifest.anchor and ("anchor", version) not in self._without:
            steps.append(Step("anchor", None, link, link.manifest.anchor))
        return [*steps, *self._skips(link)]

    def _skips(self, link: Link) -> list[Step]:
        if self._find is None or self._lookups >= _MAX_LOOKUPS or link.version - self._not_below < 2:
            return []
        self._lookups += 1
        try:
            skips = announced_skips(self._find, link.manifest, self._manifests, self._refused)
        except AssayError as error:
            logger.info("skips cannot be asked for", extra={"code": error.code})
            self._find = None
            return []
        return [Step("skip", skip.from_version, link, skip.chunks, skip.relay) for skip in skips]


def _walk(after: Mapping[int, Step], start: int, target: int) -> list[Step]:
    steps = []
    while start != target:
        steps.append(after[start])
        start = steps[-1].link.version
    return steps


def _chain_bytes(links: Mapping[int, Link], held: Link | None, target: int) -> int | None:
    if held is None:
        return None
    versions = range(held.version + 1, target + 1)
    if any(version not in links for version in versions):
        return None
    return sum(ref.size_bytes for version in versions for ref in links[version].manifest.diff)


def _anchor_bytes(links: Mapping[int, Link], target: int) -> int | None:
    total = 0
    for version in range(target, -1, -1):
        link = links.get(version)
        if link is None:
            return None
        if link.manifest.anchor:
            return total + sum(ref.size_bytes for ref in link.manifest.anchor)
        total += sum(ref.size_bytes for ref in link.manifest.diff)
    return None
