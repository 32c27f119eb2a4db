"""Who takes part: registration, authentication of node messages, what is known about each node."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import event_log, invites
from coordinator.models import Checkpoint, Credit, CreditState, Drill, Node, NodeReason, NodeState
from coordinator.run import Run, require_signer
from protocol.api import (
    E_CLOCK_SKEW,
    E_NODE_BANNED,
    E_NODE_UNKNOWN,
    E_NODE_VERSION,
    E_PROFILE,
    E_PROTOCOL_VERSION,
    RegisterReply,
)
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, LocalFault, PeerFault
from protocol.messages import (
    Commitment,
    LeaseRequest,
    LeaseReturn,
    NodeHello,
    UploadRequest,
    opened_by,
)
from protocol.swarm.announce import PeerAnnounce

_NodeMessage = TypeVar("_NodeMessage", LeaseRequest, LeaseReturn, PeerAnnounce, UploadRequest, Commitment)


class Registry:
    """The nodes of a run."""

    def __init__(self, run: Run, max_clock_skew_ms: int):
        self._run, self._max_clock_skew_ms = run, max_clock_skew_ms

    def register(self, session: Session, envelope: Envelope, now_ms: int) -> RegisterReply:
        """Take a node in, or greet one that is known.

        Raises:
            PeerFault: ``E_JOIN_TOKEN``, ``E_PROFILE``, ``E_PROTOCOL_VERSION``, ``E_CLOCK_SKEW``, and what is wrong
                with the envelope.
        """
        claimed = self._run.peek(envelope, NodeHello)
        node_id = opened_by(claimed.public_key)
        require_signer(envelope, node_id, "the key it names")
        hello = NodeHello.open(envelope, claimed.public_key, run_id=self._run.id)
        self.check_date(hello.issued_at_ms, now_ms)
        self._check_abilities(hello)
        node = session.get(Node, node_id)
        if node is None:
            invites.redeem(session, now_ms, hello.join_token)
            node = self._add(session, node_id, hello, now_ms)
        elif node.profile != hello.profile:
            # A new profile is an unknown one: trust in the old one says nothing about it. Suspicion stays, or whoever
            # has gathered some would drop it under another name.
            node.audited_passes = 0
            event_log.append(session, now_ms, "profile-changed", {"node_id": node_id, "profile": hello.profile})
        node.name, node.profile, node.protocol_version = hello.name, hello.profile, hello.protocol_version
        node.last_seen_ms = now_ms
        lift_lapsed_ban(node, now_ms)
        return RegisterReply(node_id=node_id, state=node.state)

    def authenticate(
        self, session: Session, envelope: Envelope, cls: type[_NodeMessage], now_ms: int
    ) -> tuple[_NodeMessage, Node]:
        """A node's message and the node that signed it.

        Raises:
            PeerFault: ``E_NODE_UNKNOWN``, ``E_NODE_BANNED``, ``E_WRONG_KEY``, ``E_CLOCK_SKEW``, and what is wrong
                with the envelope.
        """
        claimed = self._run.peek(envelope, cls)
        node = session.get(Node, claimed.node_id)
        if node is None:
            raise PeerFault(
                E_NODE_UNKNOWN, "this node is not registered", got=claimed.node_id, hint="assay node join LINK"
            )
        require_signer(envelope, node.id, "the node it names")
        message = cls.open(envelope, node.public_key, run_id=self._run.id)
        self.check_date(message.issued_at_ms, now_ms)
        lift_lapsed_ban(node, now_ms)
        if node.state == NodeState.BANNED:
            raise PeerFault(
                E_NODE_BANNED, f"this node is banned: {node.ban_reason}", got=node.ban_code,
                hint=f"the evidence: GET /v1/evidence/{node.ban_receipt_id}" if node.ban_receipt_id else None,
            )
        node.last_seen_ms = now_ms
        return message, node

    def see_version(self, session: Session, node: Node, version: int) -> None:
        """Note the newest version a node says to hold.

        Raises:
            PeerFault: ``E_NODE_VERSION`` when that version was never published.
        """
        newest = session.scalar(select(func.max(Checkpoint.version)))
        if version > (newest or 0):
            raise PeerFault(E_NODE_VERSION, "no such version", expected=f"<= {newest or 0}", got=version)
        node.version = version

    def _add(self, session: Session, node_id: str, hello: NodeHello, now_ms: int) -> Node:
        node = Node(
            id=node_id, public_key=hello.public_key, name=hello.name, profile=hello.profile,
            protocol_version=hello.protocol_version, state=NodeState.ACTIVE, joined_ms=now_ms, last_seen_ms=now_ms,
        )
        session.add(node)
        session.flush()
        body = {"node_id": node_id, "public_key": hello.public_key, "profile": hello.profile}
        event_log.append(session, now_ms, "node-registered", body)
        return node

    def check_date(self, issued_at_ms: int, now_ms: int) -> None:
        """Refuse a message that was dated too long ago or ahead.

        Raises:
            PeerFault: ``E_CLOCK_SKEW``.
        """
        if abs(issued_at_ms - now_ms) > self._max_clock_skew_ms:
            raise PeerFault(
                E_CLOCK_SKEW, "the message's date is too far from our clock",
                expected=f"within {self._max_clock_skew_ms} ms of {now_ms}", got=issued_at_ms,
                hint="set the sender's clock (for example with NTP)",
            )

    def _check_abilities(self, hello: NodeHello) -> None:
        listed = hello.profile in self._run.profile_names
        if not listed and not self._run.manifest.audit.unknown_profiles:
            raise PeerFault(
                E_PROFILE, "this run has no such engine profile", expected=", ".join(sorted(self._run.profile_names)),
                got=hello.profile,
            )
        if hello.protocol_version < self._run.manifest.protocol_min:
            raise PeerFault(
                E_PROTOCOL_VERSION, "this run needs a newer protocol version",
                expected=f">= {self._run.manifest.protocol_min}", got=hello.protocol_version, hint="update Assay",
            )


def lift_lapsed_ban(node: Node, now_ms: int) -> None:
    """A ban with an end ends."""
    if node.state == NodeState.BANNED and node.ban_until_ms is not None and now_ms >= node.ban_until_ms:
        node.state, node.ban_code, node.ban_reason = NodeState.ACTIVE, None, None
        node.ban_receipt_id, node.ban_until_ms = None, None


def require_node(session: Session, node_id: str) -> Node:
    """A registered node.

    Raises:
        LocalFault: ``E_NOT_FOUND``.
    """
    node = session.get(Node, node_id)
    if node is None:
        raise LocalFault(E_NOT_FOUND, "no such node", got=node_id[:80])
    return node


def describe(session: Session, nodes: list[Node], head_version: int) -> list[dict[str, Any]]:
    """Nodes as the API shows them."""
    ids = [node.id for node in nodes]
    reasons: dict[str, dict[str, int]] = {}
    for row in session.scalars(select(NodeReason).where(NodeReason.node_id.in_(ids))):
        reasons.setdefault(row.node_id, {})[row.code] = row.count
    credit: dict[str, dict[str, int]] = {}
    sums = select(Credit.node_id, Credit.state, func.sum(Credit.tokens)).where(Credit.node_id.in_(ids))
    for node_id, state, tokens in session.execute(sums.group_by(Credit.node_id, Credit.state)):
        credit.setdefault(node_id, {})[state] = int(tokens)
    drills = {d.node_id: d.attack for d in session.scalars(select(Drill).where(Drill.node_id.in_(ids)))}
    return [
        {
            "id": node.id, "name": node.name, "state": node.state, "drill": drills.get(node.id),
            "profile": node.profile, "version": node.version, "lag": max(0, head_version - node.version),
            "accepted": node.accepted, "rejected": node.rejected, "inconclusive": node.inconclusive,
            "reasons": reasons.get(node.id, {}), "credit": credit.get(node.id, {}).get(CreditState.SETTLED, 0),
            "credit_pending": credit.get(node.id, {}).get(CreditState.PENDING, 0), "tokens": node.tokens,
            "dropped": node.dropped, "forfeited": node.forfeited, "audited_passes": node.audited_passes,
            "forced_audits": node.forced_audits, "suspicion_milli": node.suspicion_milli,
            "suspicion_rollouts": node.suspicion_rollouts, "luck_milli": node.luck_milli,
            "length_milli": node.length_milli, "worse_milli": node.worse_milli, "shorter_milli": node.shorter_milli,
            "pinned_ms": node.pinned_ms,
            "ban_code": node.ban_code, "ban_reason": node.ban_reason, "ban_receipt_id": node.ban_receipt_id,
            "ban_until_ms": node.ban_until_ms, "joined_ms": node.joined_ms, "last_seen_ms": node.last_seen_ms,
        }
        for node in nodes
    ]
