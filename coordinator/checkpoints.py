"""The published versions: an unbroken chain of manifests and the newest signed head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import event_log
from coordinator.groups import RESTORED, Groups, head_version
from coordinator.models import Batch, Checkpoint, Meta
from coordinator.restoration import was_restored
from coordinator.run import Run
from protocol.api import E_CHECKPOINT_CHAIN, E_OBJECT_MISSING, Ack
from protocol.envelope import Envelope
from protocol.errors import E_EXPIRED, E_NOT_FOUND, LocalFault, PeerFault
from protocol.messages import CheckpointHead, CheckpointManifest, ChunkRef

#: Most manifests of one answer, and most bytes of those after its first.
MAX_PAGE: Final = 1000
MAX_PAGE_BYTES: Final = 4 * 2**20


class Checkpoints:
    """Takes the learner's manifests and heads."""

    def __init__(self, run: Run, groups: Groups):
        self._run, self._groups = run, groups

    def publish(self, session: Session, envelope: Envelope, missing: str | None, now_ms: int) -> Ack:
        """Record the next version.

        Args:
            missing: hash of a chunk that is not in the store, if there is one.

        Raises:
            PeerFault: ``E_WRONG_KEY``, ``E_CHECKPOINT_CHAIN``, ``E_OBJECT_MISSING``, and what is wrong with the
                envelope.
        """
        manifest = self._run.from_learner(envelope, CheckpointManifest)
        known = session.get(Checkpoint, manifest.version)
        if known is not None:
            _require_equal("manifest of this version", known.sha256, envelope.digest)
            return Ack(duplicate=True)
        self._check_follows(session, manifest)
        if missing is not None:
            raise PeerFault(E_OBJECT_MISSING, "a chunk of the checkpoint is not in the store", got=missing)
        session.add(
            Checkpoint(
                version=manifest.version, sha256=envelope.digest, envelope=envelope.to_bytes(),
                state_root=manifest.state_root, beacon=manifest.beacon, diff_bytes=_stored(manifest.diff),
                anchor_bytes=_stored(manifest.anchor), full_bytes=sum(c.max_output_bytes for c in manifest.anchor),
                published_ms=manifest.published_at_ms, received_ms=now_ms,
            )
        )
        body = {"version": manifest.version, "sha256": envelope.digest, "state_root": manifest.state_root}
        event_log.append(session, now_ms, "checkpoint", body)
        return Ack()

    def set_head(self, session: Session, envelope: Envelope, now_ms: int) -> Ack:
        """Take the newest head; a new version cancels what has become too stale.

        In a restored database, a version whose batch is not in the books cancels all work that is not consumed: the
        learner may have trained on the same rollouts before.

        Raises:
            PeerFault: ``E_WRONG_KEY``, ``E_EXPIRED``, ``E_CHECKPOINT_CHAIN``, and what is wrong with the envelope.
        """
        head = self._run.from_learner(envelope, CheckpointHead)
        if now_ms > head.expires_at_ms:
            raise PeerFault(E_EXPIRED, "the head is past its expiry", expected=f"> {now_ms}", got=head.expires_at_ms)
        checkpoint = session.get(Checkpoint, head.version)
        if checkpoint is None:
            raise PeerFault(
                E_CHECKPOINT_CHAIN, "the head names a version that is not published",
                expected=f"<= {session.scalar(select(func.max(Checkpoint.version)))}", got=head.version,
                hint="publish the manifests of the versions between first (a learner does so by itself)",
            )
        _require_equal("manifest_sha256", checkpoint.sha256, head.manifest_sha256)
        before = head_version(session)
        if before is not None and head.version < before:
            raise PeerFault(
                E_CHECKPOINT_CHAIN, "a head never goes back", expected=f">= {before}", got=head.version,
                hint="the learner's work directory is older than the run: put the newer one back",
            )
        _set_meta(session, "head", envelope.to_bytes())
        _set_meta(session, "head_version", str(head.version).encode())
        session.flush()
        if head.version != before:
            body = {"version": head.version, "sha256": envelope.digest}
            event_log.append(session, now_ms, "head", body)
            self._groups.cancel_stale(session, now_ms)
            if head.version and was_restored(session) and session.get(Batch, head.version) is None:
                self._groups.cancel_live(session, RESTORED, now_ms)
        return Ack(duplicate=head.version == before)

    def _check_follows(self, session: Session, manifest: CheckpointManifest) -> None:
        newest = session.scalars(select(Checkpoint).order_by(Checkpoint.version.desc()).limit(1)).first()
        _require_equal("version", newest.version + 1 if newest else 0, manifest.version)
        _require_equal("parent_sha256", newest.sha256 if newest else None, manifest.parent_sha256)
        _require_equal("layout_sha256", self._run.manifest.model.layout_sha256, manifest.layout_sha256)
        _require_equal("state_hash", self._run.manifest.model.state_hash, manifest.state_hash)
        if manifest.diff:
            _require_equal("base_root", newest.state_root if newest else None, manifest.base_root)
        if not manifest.diff and not manifest.anchor:
            raise PeerFault(E_CHECKPOINT_CHAIN, "a checkpoint needs a diff or an anchor", got="neither")


def chunks(envelope: Envelope) -> list[ChunkRef]:
    """All objects that a checkpoint manifest (unchecked) names.

    Raises:
        PeerFault: ``E_JSON`` or ``E_SCHEMA``.
    """
    return CheckpointManifest.from_payload(envelope.payload).objects


def head(session: Session) -> Envelope:
    """The newest signed head.

    Raises:
        LocalFault: ``E_NOT_FOUND`` before the first.
    """
    row = session.get(Meta, "head")
    if row is None:
        raise LocalFault(E_NOT_FOUND, "no checkpoint is published yet", hint="start the learner, then ask again")
    return Envelope.from_bytes(row.value)


def manifest(session: Session, version: int) -> Envelope:
    """The manifest of one version.

    Raises:
        LocalFault: ``E_NOT_FOUND``.
    """
    row = session.get(Checkpoint, version)
    if row is None:
        raise LocalFault(E_NOT_FOUND, "no such version", got=version)
    return Envelope.from_bytes(row.envelope)


def manifests(session: Session, first: int, last: int) -> list[Envelope]:
    """Manifests of versions ``first`` to ``last``, at most 1000, and after the first one no more than 4 MiB."""
    query = select(Checkpoint.envelope).where(Checkpoint.version.between(first, last)).order_by(Checkpoint.version)
    found: list[Envelope] = []
    room = MAX_PAGE_BYTES
    for data in session.scalars(query.limit(MAX_PAGE).execution_options(yield_per=16)):
        room -= len(data)
        if room < 0 and found:
            break
        found.append(Envelope.from_bytes(data))
    return found


def _stored(refs: Iterable[ChunkRef]) -> int:
    return sum(ref.size_bytes for ref in refs)


def _set_meta(session: Session, name: str, value: bytes) -> None:
    session.merge(Meta(name=name, value=value))


def _require_equal(field: str, expected: object, got: object) -> None:
    if expected != got:
        raise PeerFault(E_CHECKPOINT_CHAIN, f"the checkpoint's {field} does not fit", expected=expected, got=got)
