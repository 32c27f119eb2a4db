"""The swarm's meeting point: nodes say where they listen and hear of others. Nothing here is trusted by anybody."""

from __future__ import annotations

import ipaddress
import secrets
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coordinator.models import Node, NodeState, Peer
from coordinator.registry import Registry
from protocol.api import PeerRecord, PeersReply
from protocol.envelope import Envelope
from protocol.swarm.announce import PeerAnnounce

#: A node that has not announced itself for this long is no longer named to others, in milliseconds.
PEER_TTL_MS: Final = 180_000
_ANNOUNCE_AGAIN_MS: Final = PEER_TTL_MS // 3


class Rendezvous:
    """Who listens where."""

    def __init__(self, registry: Registry):
        self._registry = registry

    def announce(self, session: Session, envelope: Envelope, seen_from: str, now_ms: int) -> PeersReply:
        """Note where a node listens and name some others.

        An unspecified address (``0.0.0.0``, ``::``) stands for ``seen_from``, where the request came from.

        Raises:
            PeerFault: as :meth:`coordinator.registry.Registry.authenticate`.
        """
        message, node = self._registry.authenticate(session, envelope, PeerAnnounce, now_ms)
        seen_from = _sane(seen_from)
        addresses = [address for text in message.addresses if (address := _resolve(text, seen_from))]
        session.execute(delete(Peer).where(Peer.announced_ms <= now_ms - PEER_TTL_MS))
        row = session.get(Peer, node.id)
        if row is not None and not addresses:
            session.delete(row)
        elif row is not None:
            row.addresses, row.announced_ms = addresses, now_ms
        elif addresses:
            session.add(Peer(node_id=node.id, addresses=addresses, announced_ms=now_ms))
        session.flush()
        peers = [
            PeerRecord(
                node_id=other.id, public_key=other.public_key, name=other.name, addresses=peer.addresses,
                age_ms=now_ms - peer.announced_ms,
            )
            for peer, other in _sample(session, node.id, message.max_peers)
        ]
        return PeersReply(peers=peers, seen_from=seen_from, announce_again_ms=_ANNOUNCE_AGAIN_MS)


def _sample(session: Session, but: str, limit: int) -> list[tuple[Peer, Node]]:
    """Some other peers. Ids are hashes: those that follow a random point are a fair draw, and cost one index walk."""
    point = secrets.token_hex(32)
    alive = (
        select(Peer, Node).join(Node, Node.id == Peer.node_id)
        .where(Node.state == NodeState.ACTIVE, Peer.node_id != but).order_by(Peer.node_id)
    )
    found = session.execute(alive.where(Peer.node_id > point).limit(limit)).all()
    if len(found) < limit:
        found = [*found, *session.execute(alive.where(Peer.node_id <= point).limit(limit - len(found))).all()]
    return [(row[0], row[1]) for row in found]


def _sane(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return ""


def _resolve(address: str, seen_from: str) -> str | None:
    """The address with an unspecified host replaced; None when it leads nowhere."""
    _, kind, host, _, port = address.split("/")
    if not 0 < int(port) < 65_536:
        return None
    if kind.startswith("dns"):
        return address
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return None
    if not parsed.is_unspecified:
        return f"/ip{parsed.version}/{parsed}/tcp/{port}"
    return f"/ip{ipaddress.ip_address(seen_from).version}/{seen_from}/tcp/{port}" if seen_from else None
