"""A relay: follows a run and announces the skips that are missing. It needs no trust, only a store to write to."""

from __future__ import annotations

from protocol.weights.catalogue import Catalogue
from protocol.weights.layout import State, copy_state
from protocol.weights.pool import SourcePool
from protocol.weights.skips import SKIP_LENGTHS, CheckpointSkip, SkipMaker
from protocol.weights.trail import Trail


def build_skips(catalogue: Catalogue, pool: SourcePool, maker: SkipMaker, *, since: int = 0) -> list[CheckpointSkip]:
    """Make the skips to versions from ``since`` on that nobody has announced yet; those that were made.

    Every version is followed, verified, from the newest anchor that leaves room for the longest skip. Three states and
    the undo logs of the last versions (at most as large as one state) are in memory.

    Raises:
        AssayError: a chunk cannot be had or is wrong; the store cannot be written to.
    """
    follower, trail = catalogue.follower(pool), Trail(catalogue.layout.nbytes)
    earliest = max(0, since - max(SKIP_LENGTHS))
    start = max(m.version for m in catalogue.manifests if m.anchor and m.version <= earliest)
    made: list[CheckpointSkip] = []
    before: State | None = None
    for link in catalogue.links[start:]:
        follower.advance([link.envelope])
        state = copy_state(follower.state)
        trail.step(link.version, before, state)
        before = state
        due = maker.due(link.version) if link.version >= since else []
        if due:
            bases = ((catalogue.manifests[version], base) for version, base in trail.back_to(due))
            made += maker.make(link.manifest, state, bases)
    return made
