"""Epochs of the audit draw: a key is committed to when its epoch begins and revealed when it ends.

An epoch ends with its time, or once the run is complete: then no receipt stays under a key that nobody is told.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import event_log
from coordinator.models import Epoch, Receipt
from coordinator.run import Run
from protocol import audit_draw


class Epochs:
    """The draw keys of a run. ``new_key`` is replaced in tests."""

    def __init__(self, run: Run, new_key: Callable[[], bytes] = lambda: secrets.token_bytes(32)):
        self._policy, self._new_key = run.manifest.audit, new_key

    def current(self, session: Session, now_ms: int) -> Epoch:
        """The epoch of this moment, begun now when the last one is over."""
        last = _newest(session)
        if last is not None and now_ms < last.began_ms + self._policy.epoch_ms:
            return last
        return self._next(session, last, now_ms)

    def settle(self, session: Session, now_ms: int) -> None:
        """End the epoch of this moment if it drew a receipt, whatever its age: nobody waits for a run that is over.

        The next one begins at once, so that a later receipt is drawn by a key that is still secret.
        """
        last = self.current(session, now_ms)
        if session.scalar(select(Receipt.id).where(Receipt.epoch == last.id).limit(1)) is not None:
            self._next(session, last, now_ms)

    def begin_anew(self, session: Session, now_ms: int) -> None:
        """End the epoch of this moment, whoever may know its key, and begin the next."""
        self._next(session, _newest(session), now_ms)

    def _next(self, session: Session, last: Epoch | None, now_ms: int) -> Epoch:
        if last is not None:
            last.ended_ms = now_ms
            event_log.append(session, now_ms, "epoch-revealed", {"epoch": last.id, "key": last.key.hex()})
        key = self._new_key()
        epoch = Epoch(id=last.id + 1 if last else 0, key=key, key_sha256=audit_draw.commit_to(key), began_ms=now_ms)
        session.add(epoch)
        session.flush()
        event_log.append(session, now_ms, "epoch-began", {"epoch": epoch.id, "key_sha256": epoch.key_sha256})
        return epoch


def _newest(session: Session) -> Epoch | None:
    return session.scalars(select(Epoch).order_by(Epoch.id.desc()).limit(1)).first()


def describe(session: Session) -> list[dict[str, Any]]:
    """All epochs, newest first; the key of the one that is not over stays secret."""
    return [
        {
            "epoch": row.id, "key_sha256": row.key_sha256, "began_ms": row.began_ms, "ended_ms": row.ended_ms,
            "key": row.key.hex() if row.ended_ms is not None else None,
        }
        for row in session.scalars(select(Epoch).order_by(Epoch.id.desc()).limit(1000))
    ]


def draws_of(session: Session, epoch: int, first: int, limit: int) -> list[dict[str, Any]]:
    """Receipts of one epoch from number ``first`` on, with the rate each was drawn at; the key repeats the draw."""
    ended = session.get(Epoch, epoch)
    query = select(Receipt).where(Receipt.epoch == epoch).order_by(Receipt.received_ms, Receipt.id)
    rows = session.scalars(query.offset(first).limit(limit))
    return [
        {
            "receipt_id": row.id, "receipt_sha256": row.sha256, "commitment_sha256": row.commitment_sha256,
            "rate_ppm": row.rate_ppm,
            "drawn": row.drawn if ended is not None and ended.ended_ms is not None else None,
        }
        for row in rows
    ]
