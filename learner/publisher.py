"""What leaves the learner: chunks and manifests into the store, heads and receipts to the coordinator.

The head is signed again and again by a thread of its own, also during a long step, so that a reader can tell a quiet
learner from a frozen view.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from learner.config import PublishConfig
from protocol.api import E_CHECKPOINT_CHAIN
from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.errors import AssayError
from protocol.identity import Identity
from protocol.messages import CheckpointManifest, RunManifest, UpdateReceipt
from protocol.store import Store
from protocol.weights.catch_up import CatchUpCost
from protocol.weights.chain import PublishedVersion, publish, sign_head
from protocol.weights.layout import Layout, State
from protocol.weights.skips import SKIP_LENGTHS, SkipMaker
from protocol.weights.trail import Trail

logger = logging.getLogger(__name__)


class Announcements(Protocol):
    """Where a learner announces; ``protocol.client.CoordinatorClient`` is one."""

    def publish_checkpoint(self, manifest: Envelope) -> object:
        """Publish a checkpoint manifest."""
        ...

    def publish_head(self, head: Envelope) -> object:
        """Say which version is the newest."""
        ...

    def post_update(self, receipt: UpdateReceipt) -> object:
        """Report a finished step."""
        ...


def fresh_beacon() -> str:
    """32 bytes of the operating system's randomness, hex."""
    return secrets.token_hex(32)


class Publisher:
    """Makes versions and tells of them. Everything it does may be done again."""

    def __init__(self, client: Announcements, store: Store, identity: Identity, manifest: RunManifest, layout: Layout,
                 config: PublishConfig, clock: Clock, beacon: Callable[[], str] = fresh_beacon):
        self._client, self._store, self._identity = client, store, identity
        self._manifest, self._layout, self._config = manifest, layout, config
        self._clock, self._beacon = clock, beacon
        self._catch_up, self._trail = CatchUpCost(), Trail(layout.nbytes)
        self._maker = SkipMaker(store, identity, manifest.run_id, layout)
        self._recent: dict[int, CheckpointManifest] = {}
        self._lock = threading.Lock()
        self._newest: tuple[int, Envelope] | None = None
        self._stop, self._forgotten = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def make(self, previous: tuple[CheckpointManifest, Envelope] | None, old: State | None,
             new: State) -> PublishedVersion:
        """Put the next version into the store; nobody knows of it yet.

        Raises:
            LocalFault, Transient: of the store.
        """
        version = 0 if previous is None else previous[0].version + 1
        made = publish(
            self._store, self._identity, self._manifest.run_id, self._layout, previous, old, new,
            anchor=lambda diff_bytes: self._anchor_due(version, diff_bytes), clock=self._clock, beacon=self._beacon(),
            state_hash=self._manifest.model.state_hash,
        )
        self.recall([made.manifest])
        if self._config.skips:
            self._trail.step(version, old, new)
        return made

    def recall(self, manifests: Iterable[CheckpointManifest]) -> None:
        """Versions published before, ascending, from an anchor on; so that the next anchor comes when it is due."""
        for manifest in manifests:
            self._catch_up.add(manifest)
            self._recent[manifest.version] = manifest
        for version in [version for version in self._recent if version < max(self._recent) - max(SKIP_LENGTHS)]:
            del self._recent[version]

    def _anchor_due(self, version: int, diff_bytes: int) -> bool:
        config, last = self._config, self._catch_up.anchor
        if version % config.anchor_every_versions == 0:
            return True
        share = self._catch_up.share(version, diff_bytes)
        if share is None or last is None or version - last < config.anchor_least_versions:
            return False
        return share > config.anchor_at_cost

    def tell(self, version: int, manifest: Envelope, receipt: UpdateReceipt | None) -> None:
        """Tell the coordinator of ``version``: manifest, head, update receipt.

        Raises:
            AssayError: what the coordinator answered.
        """
        self._client.publish_checkpoint(manifest)
        self.renew(version, manifest)
        if receipt is not None:
            self._client.post_update(receipt)
        self._make_skips(version)

    def _make_skips(self, version: int) -> None:
        """Announce merged diffs to a version that is out; a run does not depend on them."""
        due = [base for base in self._maker.due(version) if base in self._recent]
        if not due or self._trail.version != version:
            return
        bases = ((self._recent[base], state) for base, state in self._trail.back_to(due))
        try:
            skips = self._maker.make(self._recent[version], self._trail.state, bases)
        except AssayError as error:
            logger.warning("skips were not made", extra={"code": error.code, "detail": str(error)})
            return
        for skip in skips:
            self._catch_up.add_skip(skip)
            logger.info("skip made", extra={"from": skip.from_version, "to": version, "bytes": skip.nbytes})

    def renew(self, version: int, manifest: Envelope) -> None:
        """Go on signing heads of a ``version`` that was told of before.

        Raises:
            AssayError: what the coordinator answered.
        """
        with self._lock:
            self._newest = (version, manifest)
        self.beat()

    def beat(self, ttl_ms: int | None = None) -> None:
        """Sign the newest head again and send it; does nothing before the first version.

        Raises:
            AssayError: what the coordinator answered.
        """
        with self._lock:
            if self._newest is None:
                return
            version, manifest = self._newest
            head = sign_head(
                self._identity, manifest, run_id=self._manifest.run_id, version=version, clock=self._clock,
                ttl_ms=self._config.head_ttl_ms if ttl_ms is None else ttl_ms,
            )
            self._client.publish_head(head)

    def beat_last(self) -> None:
        """Sign a head that lasts as long as the run: there will be no newer version."""
        self.beat(max(self._config.head_ttl_ms, self._manifest.expires_at_ms - self._clock.now_ms()))

    def start(self) -> None:
        """Begin to sign the head again every ``heartbeat_ms``."""
        self._thread = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop signing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    def forgotten(self) -> bool:
        """Whether the coordinator said, since this was asked last, that it lacks the version of the head."""
        found = self._forgotten.is_set()
        self._forgotten.clear()
        return found

    def _beat_on(self) -> None:
        while not self._stop.wait(self._config.heartbeat_ms / 1000):
            self._beat_once()

    def _beat_once(self) -> None:
        try:
            self.beat()
        except AssayError as error:
            if error.code == E_CHECKPOINT_CHAIN:
                self._forgotten.set()
            logger.warning("the head was not renewed", extra={"code": error.code, "detail": str(error)})
