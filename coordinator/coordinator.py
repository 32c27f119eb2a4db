"""The coordinator as one object: the nouns of this part, wired together, each act one transaction."""

from __future__ import annotations

import logging
import threading
from typing import Any

import anyio
from sqlalchemy.orm import Session

from coordinator import attendance, checkpoints, evidence, invites, status
from coordinator.audits import Audits
from coordinator.batches import Batches
from coordinator.checkpoints import Checkpoints
from coordinator.config import CoordinatorConfig
from coordinator.database import Database
from coordinator.discipline import Discipline
from coordinator.epochs import Epochs
from coordinator.groups import Groups
from coordinator.keyring import Keyring
from coordinator.leases import Leases
from coordinator.loose import Loose
from coordinator.prompts import Prompts
from coordinator.registry import Registry
from coordinator.rendezvous import Rendezvous
from coordinator.replicas import Replicas
from coordinator.run import Run
from coordinator.screens import Screens
from coordinator.shelf import Shelf
from coordinator.submissions import Submissions
from coordinator.uploads import Uploads
from protocol import evidence as evidence_file
from protocol.api import (
    Ack,
    AdmittedGroup,
    BatchReply,
    ClaimReply,
    LeaseReply,
    PeersReply,
    RegisterReply,
    SubmitReply,
    UploadReply,
)
from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.errors import E_RATE_LIMITED, Transient
from protocol.messages import AdmittedRequest, CheckpointManifest, Commitment, UploadRequest
from protocol.store import Store

logger = logging.getLogger(__name__)


class Coordinator:
    """Everything one coordinator process does. Methods may be called from any thread; each raises ``AssayError``."""

    def __init__(
        self,
        config: CoordinatorConfig,
        run: Run,
        keyring: Keyring,
        database: Database,
        store: Store,
        prompts: Prompts,
        clock: Clock,
    ):
        self.config, self.run, self.keyring = config, run, keyring
        self.database, self.store, self.clock = database, store, clock
        self.shelf = Shelf(store)
        self.registry = Registry(run, config.max_clock_skew_ms)
        self.rendezvous = Rendezvous(self.registry)
        self.groups = Groups(run, prompts, config.batches_ahead)
        self.epochs = Epochs(run)
        self.replicas = Replicas(run)
        self.leases = Leases(run, keyring.identity, self.registry, self.groups, self.replicas, config)
        self.submissions = Submissions(run, keyring.identity, self.registry, self.epochs, self.replicas)
        self.discipline = Discipline(self.groups)
        self.audits = Audits(run, self.groups, self.discipline, self.replicas, config)
        self.batches = Batches(run, self.groups, self.replicas, config)
        self.screens = Screens(run)
        self.checkpoints = Checkpoints(run, self.groups)
        self.uploads = Uploads(store, keyring.upload_secret, config)
        self.loose = Loose(store, config.longest_upload_ms)
        self._since_ms = clock.now_ms()
        #: evidence files that are put together at the same time: each holds its bundle in memory
        self.collecting = anyio.CapacityLimiter(2)
        #: messages of the learner and of verifiers, or of whoever says so, that are parsed at the same time
        self.parsing = anyio.CapacityLimiter(4)
        self._status: tuple[float, dict[str, Any] | None] = (0.0, None)
        self._status_lock = threading.Lock()
        self._stop = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_forever, name="sweeper", daemon=True)

    # -- nodes -------------------------------------------------------------------------------------------

    def register(self, envelope: Envelope) -> RegisterReply:
        """``POST /v1/nodes``."""
        with self.database.write() as session:
            return self.registry.register(session, envelope, self.clock.now_ms())

    def lease(self, envelope: Envelope) -> LeaseReply:
        """``POST /v1/leases``."""
        with self.database.write() as session:
            return self.leases.request(session, envelope, self.clock.now_ms())

    def return_leases(self, envelope: Envelope) -> Ack:
        """``POST /v1/lease-returns``."""
        with self.database.write() as session:
            return self.leases.hand_back(session, envelope, self.clock.now_ms())

    def announce(self, envelope: Envelope, seen_from: str) -> PeersReply:
        """``POST /v1/peers``."""
        with self.database.write() as session:
            return self.rendezvous.announce(session, envelope, seen_from, self.clock.now_ms())

    def grant_upload(self, envelope: Envelope) -> UploadReply:
        """``POST /v1/uploads``. The store is asked for nodes only, while the database is not held."""
        with self.database.write() as session:
            request, node = self.registry.authenticate(session, envelope, UploadRequest, self.clock.now_ms())
        self.uploads.check_size(request)
        now_ms, sha256 = self.clock.now_ms(), request.object_sha256
        self.loose.share(node.id, sha256, now_ms)
        if self.store.has(sha256):
            return UploadReply(url="", exists=True)
        with self.database.read() as session:
            allowed = self.submissions.may_upload(session, node)
        self.loose.grant(node.id, sha256, allowed, now_ms)
        return self.uploads.grant(request, now_ms)

    def check_upload(self, node: str, sha256: str, expires_ms: int) -> bool:
        """Whether the object of an upload address of ours is there already.

        Raises:
            Transient: ``E_RATE_LIMITED`` when it is not, and the address was given up for others of the node.
        """
        if self.loose.sending(node, sha256) or expires_ms - self.config.upload_ms < self._since_ms:
            return False  # what an earlier process granted is known to nobody
        if self.store.has(sha256):
            return True
        raise Transient(E_RATE_LIMITED, "this upload was given up for others of its node", hint="ask again (POST)")

    def note_upload(self, node: str, sha256: str, expires_ms: int) -> None:
        """An object was uploaded, and is loose until something names it."""
        if expires_ms - self.config.upload_ms >= self._since_ms:
            self.loose.sent(node, sha256, self.clock.now_ms())

    def submit(self, envelope: Envelope) -> SubmitReply:
        """``POST /v1/submissions``. The store is asked for nodes only, before the database is held."""
        with self.database.read() as session:
            claimed, _ = self.registry.authenticate(session, envelope, Commitment, self.clock.now_ms())
        with self.loose.naming([claimed.object_sha256], self.clock.now_ms()):
            stored = self.store.size(claimed.object_sha256) if self.store.has(claimed.object_sha256) else None
            with self.database.write() as session:
                now_ms = self.clock.now_ms()
                reply = self.submissions.submit(session, envelope, stored, now_ms)
                self._settle_draws(session, now_ms)
                return reply

    # -- verifiers and the learner -----------------------------------------------------------------------

    def claim_audit(self, envelope: Envelope) -> ClaimReply:
        """``POST /v1/audits/claim``."""
        with self.database.write() as session:
            return self.audits.claim(session, envelope, self.clock.now_ms())

    def verdict(self, envelope: Envelope) -> Ack:
        """``POST /v1/verdicts``."""
        with self.database.write() as session:
            return self.audits.verdict(session, envelope, self.clock.now_ms())

    def publish_checkpoint(self, envelope: Envelope) -> Ack:
        """``POST /v1/checkpoints``."""
        self.run.from_learner(envelope, CheckpointManifest)
        named = [chunk.sha256 for chunk in checkpoints.chunks(envelope)]
        with self.loose.naming(named, self.clock.now_ms()):
            missing = next((sha256 for sha256 in named if not self.store.has(sha256)), None)
            with self.database.write() as session:
                return self.checkpoints.publish(session, envelope, missing, self.clock.now_ms())

    def publish_head(self, envelope: Envelope) -> Ack:
        """``POST /v1/head``."""
        with self.database.write() as session:
            now_ms = self.clock.now_ms()
            reply = self.checkpoints.set_head(session, envelope, now_ms)
            self._settle_draws(session, now_ms)
            return reply

    def post_batch(self, envelope: Envelope) -> Ack:
        """``POST /v1/batches``."""
        with self.database.write() as session:
            return self.batches.plan(session, envelope, self.clock.now_ms())

    def post_update(self, envelope: Envelope) -> Ack:
        """``POST /v1/updates``."""
        with self.database.write() as session:
            return self.batches.update(session, envelope, self.clock.now_ms())

    def post_screen(self, envelope: Envelope) -> Ack:
        """``POST /v1/screens``."""
        with self.database.write() as session:
            return self.screens.report(session, envelope, self.clock.now_ms())

    def admitted(self, envelope: Envelope) -> list[AdmittedGroup]:
        """``POST /v1/admitted``."""
        request = self.run.from_learner(envelope, AdmittedRequest)
        now_ms = self.clock.now_ms()
        self.registry.check_date(request.issued_at_ms, now_ms)
        with self.database.read() as session:
            return self.batches.admitted(session, request.limit, now_ms)

    def batch(self, version: int) -> BatchReply:
        """``GET /v1/batches/{version}``."""
        with self.database.read() as session:
            return self.batches.batch(session, version)

    # -- everybody ---------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """``GET /v1/status``; the same one for all who ask within ``status_ms``."""
        with self._status_lock:
            made_at, made = self._status
            if made is None or self.clock.monotonic() - made_at >= self.config.status_ms / 1000:
                with self.database.read() as session:
                    made = status.snapshot(session, self.run, self.groups, self.clock.now_ms())
                self._status = self.clock.monotonic(), made
            return made

    def evidence(self, receipt_id: str) -> bytes:
        """``GET /v1/evidence/{receipt_id}``."""
        with self.database.read() as session:
            self.replicas.check_shown(session, evidence.require_receipt(session, receipt_id))
            found = evidence.collect(session, self.run, self.store, self.keyring.identity, receipt_id)
        return evidence_file.encode(found)

    # -- the operator ------------------------------------------------------------------------------------

    def invite(self, *, label: str, ttl_ms: int, uses: int | None) -> str:
        """A new join token."""
        with self.database.write() as session:
            return invites.create(session, self.clock.now_ms(), label=label, ttl_ms=ttl_ms, uses=uses)

    # -- life --------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Collect expired leases and loose objects, and begin a new epoch when the old one is over."""
        with self.database.write() as session:
            now_ms = self.clock.now_ms()
            self.leases.expire(session, now_ms)
            self.epochs.current(session, now_ms)
            self._settle_draws(session, now_ms)
            attendance.note(session, now_ms)
        self.loose.sweep(now_ms)  # last: a store that fails stops nothing else

    def _settle_draws(self, session: Session, now_ms: int) -> None:
        """Of a complete run no draw stays secret: whoever takes its log can repeat every one."""
        if self.groups.is_complete(session):
            self.epochs.settle(session, now_ms)

    def start(self) -> None:
        """Give open leases the time back that the coordinator was away, and begin to sweep now and then."""
        with self.database.write() as session:
            now_ms = self.clock.now_ms()
            self.leases.resume(session, attendance.last(session), now_ms)
            attendance.note(session, now_ms, at_once=True)
        self._sweeper.start()

    def close(self) -> None:
        """Stop sweeping and drop the database connections."""
        self._stop.set()
        if self._sweeper.is_alive():
            self._sweeper.join(timeout=10)
            self._note_end()
        self.database.close()

    def _note_end(self) -> None:
        try:
            with self.database.write() as session:
                attendance.note(session, self.clock.now_ms(), at_once=True)
        except Transient as error:
            about = {"code": error.code, "detail": str(error)}
            logger.warning("the end was not written down; leases get a few seconds more", extra=about)

    def _sweep_forever(self) -> None:
        said = ""
        while not self._stop.wait(self.config.sweep_s):
            try:
                self.sweep()
                said = ""
            except Transient as error:
                if error.code != said:  # once: a database that is damaged stays so
                    logger.warning("sweep failed; trying again", extra={"code": error.code, "detail": str(error)})
                said = error.code
            except Exception:  # the boundary of a background task: whatever it was, the next round tries again
                logger.exception("sweep failed")
