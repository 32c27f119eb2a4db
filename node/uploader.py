"""The threads that turn finished units into commitments, keep them on disk and deliver them."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from typing import Final, Protocol

from node.health import Health
from node.spool import E_SPOOL, Receipts, Spool, Spooled
from node.unit import Unit
from node.worker import Worker
from protocol.api import E_COMMITMENT_CHECKPOINT, E_NODE_BANNED, E_OBJECT_MISSING, SubmitReply
from protocol.bundle import bundle_root, encode
from protocol.clock import Clock
from protocol.errors import AssayError, LocalFault, PeerFault, Transient, code
from protocol.identity import Identity
from protocol.messages import Commitment, Receipt, RunManifest, UploadRequest, UsedCheckpoint

E_RECEIPT = code("E_RECEIPT", "a receipt is for other work than the one that was handed in")

_LOG = logging.getLogger(__name__)
_WAIT_S: Final = 0.2
#: Refusals that another try may end: an upload that was given up on its way, a version that a restored coordinator is
#: about to be told.
PASSING: Final = frozenset({E_OBJECT_MISSING, E_COMMITMENT_CHECKPOINT})
#: Items delivered at once; most of the time of one is waiting for answers.
SIDE_BY_SIDE: Final = 4


class Office(Protocol):
    """Where work is handed in; :class:`protocol.client.CoordinatorClient` is one."""

    def upload(self, request: UploadRequest, data: bytes) -> None:
        """Put an object in the store."""
        ...

    def submit(self, commitment: Commitment) -> SubmitReply:
        """Commit to a finished lease."""
        ...


class Manifests(Protocol):
    """By which manifests the weights were made; :class:`node.weights.Weights` is one."""

    def digest_of(self, version: int) -> str:
        """Digest of the manifest whose weights the engine had under ``version``."""
        ...


class Outbox:
    """Finished leases on their way out. All methods may be called from any thread."""

    def __init__(self, spool: Spool):
        self.spool = spool
        self.finished: queue.SimpleQueue[Unit] = queue.SimpleQueue()
        self.spooled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        kept = spool.ids()
        self._backlog = len(kept)
        for lease_id in kept:
            self.spooled.put(lease_id)

    @property
    def backlog(self) -> int:
        """Finished leases without a receipt."""
        return self._backlog

    def put(self, unit: Unit) -> None:
        """Take over a complete unit."""
        with self._lock:
            self._backlog += 1
        self.finished.put(unit)

    def drop(self, lease_id: str) -> None:
        """A lease is handed in, or lost."""
        self.spool.drop(lease_id)
        with self._lock:
            self._backlog -= 1


class Sealer(Worker):
    """Spools finished units: nothing leaves the node before it is safe on disk."""

    name = "sealing"

    def __init__(
        self, health: Health, outbox: Outbox, weights: Manifests, run: RunManifest, identity: Identity, profile: str,
        clock: Clock,
    ):
        super().__init__(health)
        self._outbox, self._weights, self._manifest, self._identity = outbox, weights, run, identity
        self._profile, self._clock = profile, clock

    def work(self) -> float:
        """Encode and spool one unit.

        Raises:
            LocalFault: the spool failed, or the manifest of a version is unknown; the unit is tried again later.
        """
        try:
            unit = self._outbox.finished.get(timeout=_WAIT_S)
        except queue.Empty:
            return 0.0
        try:
            self._outbox.spool.put(self._sealed(unit))
        except LocalFault:
            self._outbox.finished.put(unit)
            raise
        self._outbox.spooled.put(unit.id)
        return 0.0

    def _sealed(self, unit: Unit) -> Spooled:
        bundle = unit.bundle()
        data = encode(bundle)
        versions = {segment.version for rollout in bundle.rollouts for segment in rollout.segments}
        commitment = Commitment(
            run_id=self._manifest.run_id, node_id=self._identity.id, lease_id=unit.id,
            lease_sha256=unit.envelope.digest, bundle_root=bundle_root(bundle, unit.envelope.digest),
            object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data), rollouts=len(bundle.rollouts),
            tokens=sum(len(rollout) for rollout in bundle.rollouts),
            checkpoints=[
                UsedCheckpoint(version=version, manifest_sha256=self._weights.digest_of(version))
                for version in sorted(versions)
            ],
            profile=self._profile, issued_at_ms=self._clock.now_ms(),
        )
        return Spooled(commitment, data)


class Uploader(Worker):
    """Uploads and submits what is spooled; several run side by side. What was on disk at the start goes first."""

    name = "uploads"

    def __init__(
        self, health: Health, office: Office, outbox: Outbox, receipts: Receipts, run: RunManifest, clock: Clock
    ):
        super().__init__(health)
        self._office, self._outbox, self._receipts = office, outbox, receipts
        self._manifest, self._clock = run, clock
        self._patience_ms = 2 * run.batch.lease_ms

    def work(self) -> float:
        """Deliver one item.

        Raises:
            PeerFault: ``E_NODE_BANNED``.
            Transient, LocalFault: the coordinator or the store did not answer, or failed; the item stays.
        """
        try:
            lease_id = self._outbox.spooled.get(timeout=_WAIT_S)
        except queue.Empty:
            return 0.0
        try:
            self._deliver(lease_id)
        except AssayError:
            self._outbox.spooled.put(lease_id)
            raise
        self._outbox.drop(lease_id)
        return 0.0

    def _deliver(self, lease_id: str) -> None:
        """Upload and submit one item; what the coordinator will never take is dropped and counted."""
        try:
            item = self._outbox.spool.get(lease_id)
            receipt_id, receipt = self._submit(item)
        except PeerFault as error:
            if error.code == E_NODE_BANNED:
                raise
            if error.code in PASSING and self._clock.now_ms() < item.commitment.issued_at_ms + self._patience_ms:
                raise Transient(error.code, f"work is not taken yet: {error.message}", got=error.got) from error
            self.health.refused(error)
            _LOG.warning("work refused: %s", error, extra={"code": error.code, "lease_id": lease_id})
        except LocalFault as error:
            if error.code != E_SPOOL:
                raise
            self.health.refused(error)
            _LOG.error("work lost: %s", error, extra={"code": error.code, "lease_id": lease_id})
        else:
            self._receipts.add(lease_id, receipt_id, receipt)
            self.health.count("submitted")
            self.health.count("submitted_rollouts", item.commitment.rollouts)
            self.health.count("submitted_tokens", item.commitment.tokens)
            _LOG.info("work handed in", extra={"lease_id": lease_id, "tokens": item.commitment.tokens})

    def _submit(self, item: Spooled) -> tuple[str, dict[str, object]]:
        commitment = item.commitment
        request = UploadRequest(
            run_id=commitment.run_id, node_id=commitment.node_id, object_sha256=commitment.object_sha256,
            object_bytes=commitment.object_bytes, issued_at_ms=self._clock.now_ms(),
        )
        self._office.upload(request, item.data)
        reply = self._office.submit(commitment)
        self.health.contact()
        receipt = Receipt.open(reply.receipt, self._manifest.roles.coordinator, run_id=commitment.run_id)
        if receipt.object_sha256 != commitment.object_sha256 or receipt.node_id != commitment.node_id:
            raise Transient(
                E_RECEIPT, "the receipt is for other work", expected=commitment.object_sha256,
                got=receipt.object_sha256,
            )
        return receipt.receipt_id, reply.receipt.to_dict()
