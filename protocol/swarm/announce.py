"""The message with which a node says where its swarm host listens."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from protocol.messages import Hex32, Message, Millis

PeerAddress = Annotated[
    str, Field(pattern=r"^/(ip4/[0-9.]{7,15}|ip6/[0-9a-f:]{2,39}|dns[46]/[a-z0-9.-]{1,253})/tcp/[0-9]{1,5}$")
]  #: where a swarm host listens, as a multiaddr without the peer's id


class PeerAnnounce(Message):
    """A node says where its swarm host listens, and asks where those of others do."""

    TYPE: ClassVar[str] = "application/vnd.assay.peer-announce.v1+json"
    node_id: Hex32
    addresses: Annotated[list[PeerAddress], Field(max_length=8)]  #: none: forget me
    max_peers: Annotated[int, Field(ge=0, le=64)]  #: how many others it wants to hear of
    issued_at_ms: Millis
