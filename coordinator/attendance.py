"""When the coordinator last served, so that nobody is late for what could not be handed in while it was away."""

from __future__ import annotations

from typing import Final

from sqlalchemy.orm import Session

from coordinator.models import Meta

#: How much older than the last moment of service what is on disk may be; a write per so many milliseconds.
NOTED_EVERY_MS: Final = 5_000
_NAME: Final = "served_ms"


def note(session: Session, now_ms: int, *, at_once: bool = False) -> None:
    """Write down that the coordinator serves, unless that was done a moment ago (and ``at_once`` is not set)."""
    before = last(session)
    if at_once or before is None or not 0 <= now_ms - before < NOTED_EVERY_MS:
        session.merge(Meta(name=_NAME, value=str(now_ms).encode()))


def last(session: Session) -> int | None:
    """When the coordinator is known to have served last, in milliseconds; None when it never did."""
    row = session.get(Meta, _NAME)
    return None if row is None else int(row.value)
