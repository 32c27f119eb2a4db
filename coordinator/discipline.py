"""Bans, and what they undo."""

from __future__ import annotations

from typing import Final

from sqlalchemy.orm import Session

from coordinator import event_log, ledger
from coordinator.groups import Groups
from coordinator.models import Node, NodeState
from coordinator.registry import require_node
from protocol.errors import code

E_BANNED_BY_OPERATOR: Final = code("E_BANNED_BY_OPERATOR", "the operator banned this node for the reason it gave")


class Discipline:
    """Shuts nodes out and lets them in again."""

    def __init__(self, groups: Groups):
        self._groups = groups

    def ban(
        self,
        session: Session,
        node: Node,
        now_ms: int,
        *,
        code: str = E_BANNED_BY_OPERATOR,
        reason: str,
        receipt_id: str | None = None,
        until_ms: int | None = None,
    ) -> None:
        """Ban a node, void its unsettled credit and offer its unconsumed work to others. Repeating it is harmless."""
        if node.state == NodeState.BANNED and node.ban_until_ms is None:
            return
        node.state, node.ban_code, node.ban_reason = NodeState.BANNED, code, reason[:400]
        node.ban_receipt_id, node.ban_until_ms, node.audited_passes = receipt_id, until_ms, 0
        ledger.void_node(session, node.id, now_ms)
        self._groups.release_node(session, node)
        event_log.append(
            session, now_ms, "banned",
            {"node_id": node.id, "code": code, "reason": reason[:400], "receipt_id": receipt_id, "until_ms": until_ms},
        )

    def unban(self, session: Session, node_id: str, now_ms: int, reason: str) -> None:
        """Let a node work again; its trust starts from nothing.

        Raises:
            LocalFault: ``E_NOT_FOUND``.
        """
        node = require_node(session, node_id)
        node.state, node.ban_code, node.ban_reason = NodeState.ACTIVE, None, None
        node.ban_receipt_id, node.ban_until_ms, node.audited_passes = None, None, 0
        node.suspicion_milli = node.suspicion_rollouts = 0
        node.luck_milli = node.worse_milli = node.length_milli = node.shorter_milli = 0
        node.pinned_ms = None
        event_log.append(session, now_ms, "unbanned", {"node_id": node_id, "reason": reason})
