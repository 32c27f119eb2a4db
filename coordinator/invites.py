"""Join tokens: scoped to this run, expiring, revocable, kept as hashes."""

from __future__ import annotations

import hashlib

from sqlalchemy.orm import Session

from coordinator import event_log
from coordinator.keyring import new_token
from coordinator.models import JoinToken
from protocol.api import E_JOIN_TOKEN
from protocol.errors import E_NOT_FOUND, LocalFault, PeerFault


def create(session: Session, now_ms: int, *, label: str, ttl_ms: int, uses: int | None, token: str = "") -> str:
    """A new join token, good for ``uses`` nodes (None: any number) within ``ttl_ms``."""
    token = token or new_token()
    session.add(
        JoinToken(
            token_sha256=_digest(token), label=label, created_ms=now_ms, expires_ms=now_ms + ttl_ms, uses_left=uses,
            revoked_ms=None,
        )
    )
    event_log.append(session, now_ms, "invited", {"token_sha256": _digest(token), "label": label, "uses": uses})
    return token


def redeem(session: Session, now_ms: int, token: str | None) -> None:
    """Use a token for one new node.

    Raises:
        PeerFault: ``E_JOIN_TOKEN``.
    """
    row = session.get(JoinToken, _digest(token)) if token else None
    if row is None:
        raise _refused("a token that the operator gave out", "none" if token is None else "an unknown token")
    if row.revoked_ms is not None:
        raise _refused("a valid token", "a revoked token")
    if now_ms > row.expires_ms:
        raise _refused(f"a token used before {row.expires_ms}", f"now {now_ms}")
    if row.uses_left is not None:
        if row.uses_left < 1:
            raise _refused("a token with uses left", "a used token")
        row.uses_left -= 1


def revoke(session: Session, now_ms: int, token_sha256: str, reason: str) -> None:
    """Make a token useless.

    Raises:
        LocalFault: ``E_NOT_FOUND``.
    """
    row = session.get(JoinToken, token_sha256)
    if row is None:
        raise LocalFault(E_NOT_FOUND, "no such invitation", got=token_sha256)
    row.revoked_ms = now_ms
    event_log.append(session, now_ms, "invitation-revoked", {"token_sha256": token_sha256, "reason": reason})


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _refused(expected: str, got: str) -> PeerFault:
    return PeerFault(
        E_JOIN_TOKEN, "the join token is not accepted", expected=expected, got=got,
        hint="ask the operator for a new link (assay coordinator invite)",
    )
