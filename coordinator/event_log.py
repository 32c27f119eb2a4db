"""The run's log: what the coordinator did, each act a leaf of one Merkle tree that only grows.

Every complete subtree's hash is kept (two rows per entry), so that heads and proofs cost O(log n) look-ups.
Spec: ``docs/spec/log.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.models import Event, LogNode
from protocol import transparency
from protocol.errors import E_NOT_FOUND, LocalFault
from protocol.identity import Identity
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead, origin_of
from protocol.log_proof import LogProof, ProvenEntry

#: Most entries one answer holds.
MAX_ENTRIES: Final = 1000


def append(session: Session, at_ms: int, kind: str, body: Mapping[str, Any]) -> LogEntry:
    """Add an entry within the transaction that does what it tells."""
    entry = LogEntry(size(session), at_ms, kind, body)
    receipt_id = body.get("receipt_id")
    session.add(Event(index=entry.index, kind=kind, receipt_id=receipt_id, data=entry.data))
    for level, index, node in transparency.grown(_subtrees(session), entry.index, entry.leaf):
        session.add(LogNode(level=level, index=index, hash=node))
    session.flush()
    return entry


def size(session: Session) -> int:
    """Number of entries."""
    last = session.scalars(select(Event.index).order_by(Event.index.desc()).limit(1)).first()
    return 0 if last is None else last + 1


def head(session: Session, run_id: str, at: int | None = None) -> LogHead:
    """The head over the first ``at`` entries; over all of them when it is None.

    Raises:
        LocalFault: ``E_NOT_FOUND`` when there are not that many.
    """
    count = _up_to(session, at)
    return LogHead(origin_of(run_id), count, transparency.root(_subtrees(session), count))


def entries(session: Session, first: int, limit: int) -> list[LogEntry]:
    """Up to ``limit`` entries from number ``first`` on."""
    rows = select(Event.data).where(Event.index >= first).order_by(Event.index).limit(min(limit, MAX_ENTRIES))
    return [LogEntry.from_bytes(data) for data in session.scalars(rows)]


def about(session: Session, receipt_id: str) -> list[LogEntry]:
    """The newest entries on a receipt, oldest first."""
    rows = select(Event.data).where(Event.receipt_id == receipt_id).order_by(Event.index.desc()).limit(MAX_ENTRIES)
    return [LogEntry.from_bytes(data) for data in session.scalars(rows)][::-1]


def proof_about(session: Session, receipt_id: str, run_id: str, identity: Identity) -> LogProof:
    """All that the log holds on a receipt, under the newest head."""
    top = head(session, run_id)
    return LogProof(
        top.sign(identity),
        tuple(
            ProvenEntry(entry, tuple(inclusion_proof(session, entry.index, top.size)))
            for entry in about(session, receipt_id)
        ),
    )


def entry(session: Session, index: int) -> LogEntry:
    """One entry.

    Raises:
        LocalFault: ``E_NOT_FOUND``.
    """
    found = session.get(Event, index)
    if found is None:
        raise LocalFault(E_NOT_FOUND, "the log has no such entry", expected=f"below {size(session)}", got=index)
    return LogEntry.from_bytes(found.data)


def inclusion_proof(session: Session, index: int, at: int) -> list[bytes]:
    """Proof that entry ``index`` is among the first ``at``.

    Raises:
        LocalFault: ``E_NOT_FOUND`` when it is not.
    """
    if not 0 <= index < _up_to(session, at):
        raise LocalFault(E_NOT_FOUND, "the log has no such entry", expected=f"below {at}", got=index)
    return transparency.inclusion_proof(_subtrees(session), index, at)


def consistency_proof(session: Session, old: int, new: int) -> list[bytes]:
    """Proof that the first ``new`` entries begin with the first ``old``.

    Raises:
        LocalFault: ``E_NOT_FOUND`` when there are not that many.
    """
    if old > _up_to(session, new):
        raise LocalFault(E_NOT_FOUND, "the later head has fewer entries", expected=f"at least {old}", got=new)
    return transparency.consistency_proof(_subtrees(session), old, new)


def _up_to(session: Session, at: int | None) -> int:
    count = size(session)
    if at is not None and at > count:
        raise LocalFault(E_NOT_FOUND, "the log has fewer entries", expected=f"at most {count}", got=at)
    return count if at is None else at


def _subtrees(session: Session) -> transparency.Subtrees:
    def subtree(level: int, index: int) -> bytes:
        return session.get_one(LogNode, (level, index)).hash

    return subtree
