"""The append-only log: what the coordinator did, each entry bound to the one before by its hash.

Hash of an entry = SHA-256 over the canonical JSON of {seq, at_ms, kind, body, previous_sha256}.
Spec: ``docs/spec/http-api.md``, "Event log".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.models import Event
from protocol import canonical
from protocol.errors import PeerFault, code

E_LOG_CHAIN = code("E_LOG_CHAIN", "the event log is not the unbroken chain it claims to be")

#: What the first entry names as the hash before it.
GENESIS: Final = "0" * 64
#: Most entries one answer holds.
MAX_ENTRIES: Final = 1000


def append(session: Session, at_ms: int, kind: str, body: Mapping[str, Any]) -> Event:
    """Add an entry within the transaction that does what it tells."""
    last = session.scalars(select(Event).order_by(Event.seq.desc()).limit(1)).first()
    seq, previous = (last.seq + 1, last.sha256) if last else (1, GENESIS)
    row = Event(
        seq=seq, at_ms=at_ms, kind=kind, body=dict(body), previous_sha256=previous,
        sha256=entry_hash(seq, at_ms, kind, body, previous),
    )
    session.add(row)
    session.flush()
    return row


def entries(session: Session, after: int, limit: int) -> list[dict[str, Any]]:
    """Up to ``limit`` entries that follow number ``after``."""
    rows = session.scalars(select(Event).where(Event.seq > after).order_by(Event.seq).limit(min(limit, MAX_ENTRIES)))
    return [
        {
            "seq": row.seq, "at_ms": row.at_ms, "kind": row.kind, "body": row.body,
            "previous_sha256": row.previous_sha256, "sha256": row.sha256,
        }
        for row in rows
    ]


def entry_hash(seq: int, at_ms: int, kind: str, body: Mapping[str, Any], previous_sha256: str) -> str:
    """Hex SHA-256 that binds an entry to all before it."""
    return canonical.digest(
        {"seq": seq, "at_ms": at_ms, "kind": kind, "body": dict(body), "previous_sha256": previous_sha256}
    )


def check_chain(log: Iterable[Mapping[str, Any]], *, seq: int = 0, sha256: str = GENESIS) -> tuple[int, str]:
    """Number and hash of the last entry, once every entry follows the one before, from (``seq``, ``sha256``) on.

    Raises:
        PeerFault: ``E_LOG_CHAIN`` naming the first entry that does not.
    """
    for entry in log:
        right = entry_hash(entry["seq"], entry["at_ms"], entry["kind"], entry["body"], entry["previous_sha256"])
        if (entry["seq"], entry["previous_sha256"], entry["sha256"]) != (seq + 1, sha256, right):
            raise PeerFault(
                E_LOG_CHAIN, f"entry {entry['seq']} does not follow", expected=f"entry {seq + 1} after {sha256[:16]}",
                got=f"previous {entry['previous_sha256'][:16]}, hash {entry['sha256'][:16]}",
            )
        seq, sha256 = seq + 1, right
    return seq, sha256
