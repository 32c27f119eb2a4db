"""The thread that turns finished units into signed commitments, keeps them on disk and delivers them."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from typing import Final, Protocol

from node.health import Health
from node.spool import Receipts, Spool, Spooled
from node.unit import Unit
from node.worker import Worker
from protocol.api import E_NODE_BANNED, SubmitReply
from protocol.bundle import bundle_root, encode
from protocol.clock import Clock
from protocol.errors import LocalFault, PeerFault, Transient, code
from protocol.identity import Identity
from protocol.messages import Commitment, Receipt, RunManifest, UploadRequest

E_RECEIPT = code("E_RECEIPT", "a receipt is for other work than the one that was handed in")

_LOG = logging.getLogger(__name__)
_WAIT_S: Final = 0.2


class Office(Protocol):
    """Where work is handed in; :class:`protocol.client.CoordinatorClient` is one."""

    def upload(self, request: UploadRequest, data: bytes) -> None:
        """Put an object in the store."""
        ...

    def submit(self, commitment: Commitment) -> SubmitReply:
        """Commit to a finished lease."""
        ...


class Uploader(Worker):
    """Spool first, then upload and submit; what is on disk at the start is delivered first."""

    name = "uploads"

    def __init__(
        self, health: Health, office: Office, spool: Spool, receipts: Receipts, run: RunManifest, identity: Identity,
        profile: str, clock: Clock,
    ):
        super().__init__(health)
        self._office, self._spool, self._receipts = office, spool, receipts
        self._manifest, self._identity, self._profile, self._clock = run, identity, profile, clock
        self._finished: queue.SimpleQueue[Unit] = queue.SimpleQueue()
        self._pending = list(spool.ids())
        self._lock, self._backlog = threading.Lock(), len(self._pending)

    @property
    def backlog(self) -> int:
        """Finished leases without a receipt."""
        return self._backlog

    def put(self, unit: Unit) -> None:
        """Take over a complete unit."""
        self._change_backlog(1)
        self._finished.put(unit)

    def work(self) -> float:
        """Spool what is finished, then deliver one item.

        Raises:
            LocalFault: the spool failed.
            Transient: the coordinator or the store did not answer; the item stays.
        """
        try:
            self._keep(self._finished.get(timeout=0 if self._pending else _WAIT_S))
        except queue.Empty:
            if not self._pending:
                return 0.0
        while not self._finished.empty():
            self._keep(self._finished.get())
        self._deliver(self._pending[0])
        self._pending.pop(0)
        self._change_backlog(-1)
        return 0.0

    def _change_backlog(self, by: int) -> None:
        with self._lock:
            self._backlog += by

    def _keep(self, unit: Unit) -> None:
        """Encode and spool a unit; when that fails it is tried again later."""
        try:
            self._spool.put(self._sealed(unit))
        except LocalFault:
            self._finished.put(unit)
            raise
        self._pending.append(unit.id)

    def _sealed(self, unit: Unit) -> Spooled:
        bundle = unit.bundle()
        data = encode(bundle)
        commitment = Commitment(
            run_id=self._manifest.run_id, node_id=self._identity.id, lease_id=unit.id,
            lease_sha256=unit.envelope.digest, bundle_root=bundle_root(bundle, unit.envelope.digest),
            object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data), rollouts=len(bundle.rollouts),
            tokens=sum(len(rollout) for rollout in bundle.rollouts), profile=self._profile,
            issued_at_ms=self._clock.now_ms(),
        )
        return Spooled(commitment, data)

    def _deliver(self, lease_id: str) -> None:
        """Upload and submit one item; what the coordinator will never take is dropped and counted."""
        try:
            item = self._spool.get(lease_id)
            receipt = self._submit(item)
        except PeerFault as error:
            if error.code == E_NODE_BANNED:
                raise
            self.health.refused(error)
            _LOG.warning("work refused: %s", error, extra={"code": error.code, "lease_id": lease_id})
        except LocalFault as error:
            self.health.refused(error)
            _LOG.error("work lost: %s", error, extra={"code": error.code, "lease_id": lease_id})
        else:
            self._receipts.add(lease_id, receipt)
            self.health.count("submitted")
            self.health.count("submitted_rollouts", item.commitment.rollouts)
            self.health.count("submitted_tokens", item.commitment.tokens)
            _LOG.info("work handed in", extra={"lease_id": lease_id, "tokens": item.commitment.tokens})
        self._spool.drop(lease_id)

    def _submit(self, item: Spooled) -> dict[str, object]:
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
        return reply.receipt.to_dict()
