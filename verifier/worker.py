"""The daemon: claims submissions one by one, judges them, and reports signed verdicts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Final, Self

from protocol.api import AuditJob, ReplicaRef
from protocol.client import CoordinatorClient
from protocol.clock import Clock, SystemClock
from protocol.errors import E_WRONG_KEY, AssayError, LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import AuditClaim, CheckpointHead, Lease, Receipt, Verdict
from protocol.model_files import fetch_model_files
from protocol.root_trust import open_run_manifest
from protocol.store import open_store
from protocol.weights.cache import ChunkCache
from protocol.weights.layout import Layout
from protocol.weights.pool import SourcePool
from protocol.weights.sources import ChunkSource, HttpSource, source_at, source_of
from protocol.weights.state_root import usable_hash
from verifier.checkpoints import CheckpointBook
from verifier.config import VerifierConfig
from verifier.exposition import Exposition
from verifier.findings import Judgement, Report
from verifier.model_shelf import ModelShelf
from verifier.session import Session
from verifier.states import E_VERSION_MISSING, StateRing
from verifier.submission import Submission
from verifier.tokens import Rewards

logger = logging.getLogger(__name__)

#: Wait after a failed exchange with the coordinator, in seconds; doubles up to the second number.
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 30.0


class Worker:
    """One verifier at work. ``fetch`` gets an object by hash; ``on_verdict`` is told each outcome."""

    def __init__(
        self, client: CoordinatorClient, identity: Identity, session: Session, fetch: Callable[[str], bytes],
        *, clock: Clock | None = None, poll_s: float = 0.25, close: Callable[[], None] = lambda: None,
        on_verdict: Callable[[str], None] = lambda _: None,
    ):
        self._client, self._identity, self._session, self._fetch = client, identity, session, fetch
        self._clock: Clock = clock or SystemClock()
        self._poll_s, self._close, self._on_verdict = poll_s, close, on_verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until ``stopping()``; the submission in hand is finished first."""
        pause_s = _FIRST_PAUSE_S
        while not stopping():
            try:
                busy = self.step()
                pause_s = _FIRST_PAUSE_S
            except AssayError as error:
                logger.warning("no exchange with the coordinator", extra={"code": error.code, "why": str(error)})
                self._wait(pause_s, stopping)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                continue
            if not busy:
                self._wait(self._poll_s, stopping)

    def step(self) -> bool:
        """Judge one submission; False when there is none.

        Raises:
            AssayError: the coordinator cannot be reached or refuses what we send.
        """
        claim = AuditClaim(
            run_id=self._session.run.run_id, verifier_id=self._identity.id, nonce=secrets.token_hex(16),
            issued_at_ms=self._clock.now_ms(),
        )
        job = self._client.claim_audit(claim)
        if job is None:
            return False
        started = self._clock.monotonic()
        judgement = self._judge(job)
        verdict = self._verdict(job, judgement)
        self._client.verdict(verdict)
        self._on_verdict(verdict.outcome)
        logger.info("verdict", extra={
            "outcome": verdict.outcome, "code": verdict.code, "node": verdict.node_id[:16], "lease": verdict.lease_id,
            "tiers": verdict.tiers, "tokens": verdict.tokens, "seconds": round(self._clock.monotonic() - started, 3),
        })
        return True

    def _judge(self, job: AuditJob) -> Judgement:
        """The judgement; inconclusive when what we need cannot be had."""
        report = Report()
        try:
            self.refresh()
            submission = self._submission(job)
        except (LocalFault, PeerFault, Transient) as error:
            report.fault("A.0 material", error, blames_node=False)
            return report.judgement()
        return self._session.judge([submission])[0]

    def refresh(self) -> None:
        """Learn of every published version.

        Raises:
            AssayError: the coordinator cannot be reached, or the learner's messages are wrong.
        """
        run, book = self._session.run, self._session.book
        head = CheckpointHead.open(self._client.head(), run.roles.learner, run_id=run.run_id)
        while book.newest < head.version:
            before = book.newest
            book.add(self._client.checkpoints(before + 1, head.version))
            if book.newest == before:
                raise LocalFault(
                    E_VERSION_MISSING, "the coordinator shows a head and not its manifest", expected=head.version,
                    got=before,
                )

    def _submission(self, job: AuditJob) -> Submission:
        run = self._session.run
        receipt = Receipt.open(job.receipt, run.roles.coordinator, run_id=run.run_id)
        return Submission(
            lease=job.lease, commitment=job.commitment, receipt=job.receipt,
            node_public_key=bytes.fromhex(job.node_public_key), bundle=self._fetch(receipt.object_sha256),
            drawn=job.drawn, confirm=job.confirm, replica=None if job.replica is None else self._replica(job.replica),
        )

    def _replica(self, twin: ReplicaRef) -> Submission | None:
        """Another node's work on the unit; None when it cannot be had, which is no reason not to judge this one."""
        run = self._session.run
        try:
            receipt = Receipt.open(twin.receipt, run.roles.coordinator, run_id=run.run_id)
            bundle = self._fetch(receipt.object_sha256)
        except AssayError as error:
            logger.warning("no replica to compare with", extra={"code": error.code, "why": str(error)})
            return None
        key = bytes.fromhex(twin.node_public_key)
        return Submission(twin.lease, twin.commitment, twin.receipt, key, bundle, drawn=False)

    def _verdict(self, job: AuditJob, judgement: Judgement) -> Verdict:
        """A verdict on a receipt; what it says about lease and node is what the coordinator signed."""
        receipt = Receipt.from_payload(job.receipt.payload)
        samples = Lease.from_payload(job.lease.payload).samples
        rewards = dict(zip(judgement.samples, judgement.rewards_micro, strict=False))
        complete = judgement.outcome == "pass" and set(rewards) == set(samples)
        return Verdict(
            run_id=self._session.run.run_id, verifier_id=self._identity.id, node_id=receipt.node_id,
            lease_id=receipt.lease_id, receipt_sha256=job.receipt.digest, outcome=judgement.outcome,
            code=judgement.code, tiers=list(judgement.tiers), findings=list(judgement.findings),
            samples=samples if complete else [], rewards_micro=[rewards[s] for s in samples] if complete else [],
            tokens=judgement.tokens, scores=list(judgement.scores) if complete else [],
            diverges=judgement.diverges, issued_at_ms=self._clock.now_ms(),
        )

    def _wait(self, seconds: float, stopping: Callable[[], bool]) -> None:
        end = self._clock.monotonic() + seconds
        while not stopping() and (left := end - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, 0.25))


def start(config: VerifierConfig, client: CoordinatorClient, identity: Identity, clock: Clock) -> Worker:
    """Read and check the run manifest, fetch the model's small files, and put a worker together.

    Leaving its context drops the connections to where its weights come from.

    Raises:
        PeerFault: the manifest is not signed by the root key, is past its expiry, or names an unknown hash function.
        LocalFault: ``E_CONFIG`` for a device that is not here; ``E_HASH_MISSING``; ``E_WRONG_KEY`` when the run does
            not name our key; files cannot be had.
        Transient: the coordinator cannot be reached.
    """
    run = open_run_manifest(client.run_manifest(), config.root, now_ms=clock.now_ms())
    if identity.public_key.hex() not in run.roles.verifiers:
        raise LocalFault(
            E_WRONG_KEY, "the run does not name this key as a verifier's", expected=", ".join(run.roles.verifiers),
            got=identity.public_key.hex(), hint="ask the operator, or pass the right file with --key",
        )
    usable_hash(run.model.state_hash)
    from protocol.reference import usable_device  # torch, after all that can go wrong without it

    device = usable_device(config.device)
    fetch = client.fetch if config.store is None else open_store(config.store).get
    model_dir = fetch_model_files(run.model.files, config.work / "model", fetch)
    layout = Layout.from_bytes(fetch(run.model.layout_sha256))
    book = CheckpointBook(run)
    pool = _pool(config, clock)
    states = StateRing(layout, book, pool.fetch, kept_undos=config.kept_undos)
    shelf = ModelShelf(model_dir, layout, states, device=device, threads=config.threads)
    session = Session(run, book, Rewards(run, model_dir, fetch), shelf)
    exposition = Exposition(config.work / "metrics.prom", states.moves)
    return Worker(
        client, identity, session, fetch, clock=clock, poll_s=config.poll_s, close=pool.close,
        on_verdict=exposition.verdict,
    )


def _pool(config: VerifierConfig, clock: Clock) -> SourcePool:
    """Where chunks of weights come from: the store when it can be read directly, the coordinator, mirrors."""
    sources: list[ChunkSource] = [] if config.store is None else [source_of(open_store(config.store), "store")]
    sources += [HttpSource.coordinator(config.coordinator), *map(source_at, config.mirrors)]
    return SourcePool(sources, ChunkCache(config.work / "chunks", max_bytes=config.chunk_cache_mb * 2**20), clock=clock)
