"""What the owner of a node allows the swarm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Settings of a host."""

    listen: str  #: multiaddr, for example /ip4/0.0.0.0/tcp/4101
    max_peers: int  #: connections we make; as many again may come in
    up_bytes_s: float | None  #: bandwidth for what we serve
    down_bytes_s: float | None  #: bandwidth for what we fetch
    announced: tuple[str, ...] = ()  #: addresses told to others; none: where we listen
