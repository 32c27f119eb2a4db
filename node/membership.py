"""The node's part in the swarm, which may be off, not installed or blocked: the node works either way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from node.config import NodeConfig
from node.weights import Chunks, Published
from node.witness import Heard
from protocol.client import CoordinatorClient
from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.identity import Identity
from protocol.messages import RunManifest
from protocol.swarm.first import SwarmFirst
from protocol.swarm.limits import Limits
from protocol.swarm.log_notes import LogNotes
from protocol.swarm.swarm import Swarm, installed
from protocol.weights.pool import SourcePool

_LOG = logging.getLogger(__name__)

_OFF: Final = "off (assay node run --swarm turns it on)"
_MISSING: Final = "libp2p is not installed (the extra 'swarm'); the store serves alone"


class Membership:
    """What connects weights and reports with the swarm, if there is one."""

    def __init__(
        self, config: NodeConfig, run: RunManifest, identity: Identity, client: CoordinatorClient, pool: SourcePool,
        clock: Clock,
    ):
        self.on_news: Callable[[], None] = lambda: None  #: called from any thread when a newer head was heard of
        self.heard = Heard()  #: heads of the run's log that peers were shown
        self._pool = pool
        self._swarm = self._make(config, run, identity, client, clock) if config.swarm else None
        self._why = _OFF if not config.swarm else _MISSING
        if config.swarm and self._swarm is None:
            _LOG.warning("no swarm: %s", _MISSING)

    def _make(
        self, config: NodeConfig, run: RunManifest, identity: Identity, client: CoordinatorClient, clock: Clock
    ) -> Swarm | None:
        if not installed():
            return None
        limits = Limits(
            config.swarm_listen, config.swarm_max_peers, up_bytes_s=_bytes_s(config.swarm_up_mb_s),
            down_bytes_s=_bytes_s(config.swarm_down_mb_s), announced=config.swarm_announce,
        )
        return Swarm(
            identity, run.run_id, run.roles.learner, limits, self._pool.cache.store, clock, announce=client.announce,
            on_head=self._hear,
            notes=LogNotes(bytes.fromhex(run.roles.coordinator), run.run_id, self.heard.add),
        )

    @property
    def chunks(self) -> Chunks:
        """Where chunks come from: peers first, or the pool alone."""
        return self._pool if self._swarm is None else SwarmFirst(self._pool, self._swarm)

    def published(self, published: Published) -> Published:
        """The same checkpoints; heads that come from there are told to the peers."""
        return published if self._swarm is None else _Telling(published, self._swarm)

    @property
    def connected(self) -> int | None:
        """Peers connected; None when there is no swarm."""
        return None if self._swarm is None else len(self._swarm.book.ready())

    def start(self) -> None:
        """Begin, in the background."""
        if self._swarm is not None:
            self._swarm.start()

    def stop(self) -> None:
        """End."""
        if self._swarm is not None:
            self._swarm.stop()

    def _hear(self) -> None:
        self.on_news()

    def tell_note(self, note: str) -> None:
        """Pass on a head of the run's log that the coordinator showed us."""
        if self._swarm is not None:
            self._swarm.tell_note(note)

    def view(self) -> dict[str, Any]:
        """How it stands, with every peer."""
        if self._swarm is None:
            return {"running": False, "why": self._why, "connected": 0, "peers": []}
        return self._swarm.view()


class _Telling:
    """Checkpoints of a coordinator whose heads are told to the swarm."""

    def __init__(self, published: Published, swarm: Swarm):
        self._published, self._swarm = published, swarm
        self.checkpoint, self.checkpoints = published.checkpoint, published.checkpoints
        self.skips = published.skips

    def head(self) -> Envelope:
        """The newest head."""
        envelope = self._published.head()
        self._swarm.tell(envelope)
        return envelope


def _bytes_s(mb_s: float | None) -> float | None:
    return None if mb_s is None else mb_s * 1e6
