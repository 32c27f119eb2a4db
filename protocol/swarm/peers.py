"""What a node knows of the others: where they are, how they served it, and why one is not connected."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from protocol.clock import Clock
from protocol.errors import AssayError
from protocol.swarm.wire import Status
from protocol.weights.score import Score
from protocol.weights.sources import E_SOURCE_SLOW

#: Peers remembered; those that were never connected are forgotten first.
MAX_PEERS: Final = 512
#: Addresses remembered of one peer.
MAX_ADDRESSES: Final = 8
#: Chunks of one peer remembered.
_MAX_HELD: Final = 16_384
#: Waits before a peer is dialled again, in seconds.
_FIRST_DIAL_S: Final = 1.0
_LAST_DIAL_S: Final = 120.0
#: For so long after we were slow ourselves nobody is blamed for it, in seconds.
_FORGIVING_S: Final = 20.0
#: Deadlines in a row a peer may let pass before it is asked no more.
_SLOW_STRIKES: Final = 3


@dataclass
class Peer:
    """One other node. Times are seconds of a monotonic clock."""

    id: str  #: libp2p peer id
    node_id: str | None = None  #: as the coordinator says
    name: str | None = None
    addresses: list[str] = field(default_factory=list)
    found_by: set[str] = field(default_factory=set)  #: rendezvous, dht, inbound
    connected: bool = False
    why: str = "not dialled yet"  #: why it is not connected; empty while it is
    dials_failed: int = 0  #: in a row
    dial_at: float = 0.0
    served: int = 0  #: bytes we sent it
    in_flight: int = 0  #: wishes it has not answered
    broken_promises: int = 0  #: chunks in a row that were coming to it and never came
    held: dict[str, Status] = field(default_factory=dict)  #: what it said to have
    score: Score = field(default_factory=lambda: Score(""))

    def view(self, now: float) -> dict[str, Any]:
        """For a human or a machine to read."""
        why = f"dropped: {self.score.dropped}" if self.score.dropped else self.why
        if not self.connected and not self.score.dropped and self.dial_at > now:
            why += f"; next try in {self.dial_at - now:.0f} s"
        return {
            "peer_id": self.id, "node_id": self.node_id, "name": self.name, "addresses": list(self.addresses),
            "found_by": sorted(self.found_by), "connected": self.connected, "why": why, "bytes_served": self.served,
            "bytes_fetched": self.score.delivered, "failures": self.score.failures,
            "broken_promises": self.broken_promises,
            "mb_s": None if self.score.rate is None else round(self.score.rate / 1e6, 3),
            "rests_s": round(max(0.0, self.score.rests_until - now), 1), "dropped": self.score.dropped,
        }


class PeerBook:
    """All peers. Thread-safe: the swarm's thread writes, others read."""

    def __init__(self, own_id: str, clock: Clock, seed: int | None = None):
        self.own_id, self._clock = own_id, clock
        self._lock = threading.RLock()
        self._peers: dict[str, Peer] = {}
        self._random = random.Random(seed)
        self._slow_until = 0.0

    def view(self) -> list[dict[str, Any]]:
        """Every peer, the connected ones first, then by what they gave us."""
        now = self._clock.monotonic()
        with self._lock:
            peers = sorted(self._peers.values(), key=lambda p: (not p.connected, -p.score.delivered, p.id))
            return [peer.view(now) for peer in peers]

    # -- finding -----------------------------------------------------------------------------------------

    def found(
        self, peer_id: str, addresses: Sequence[str], by: str, *, node_id: str | None = None, name: str | None = None
    ) -> None:
        """Hear of a peer; the newest addresses come first."""
        if peer_id == self.own_id:
            return
        with self._lock:
            peer = self._get(peer_id)
            known = [address for address in peer.addresses if address not in addresses]
            peer.addresses = [*addresses, *known][:MAX_ADDRESSES]
            peer.found_by.add(by)
            peer.node_id, peer.name = node_id or peer.node_id, name or peer.name

    def _get(self, peer_id: str) -> Peer:
        if peer_id not in self._peers:
            if len(self._peers) >= MAX_PEERS:
                idle = [p for p in self._peers.values() if not p.connected and p.score.dropped is None]
                if idle:
                    del self._peers[max(idle, key=lambda p: (p.dials_failed, -p.score.delivered)).id]
            self._peers[peer_id] = Peer(peer_id, score=Score(peer_id))
        return self._peers[peer_id]

    # -- connections -------------------------------------------------------------------------------------

    def to_dial(self, most: int) -> list[Peer]:
        """Peers to dial now, so that at most ``most`` are connected."""
        now = self._clock.monotonic()
        with self._lock:
            free = most - sum(peer.connected for peer in self._peers.values())
            due = []
            for peer in self._peers.values():
                if peer.connected or peer.score.dropped is not None or peer.dial_at > now:
                    continue
                if not peer.addresses:
                    peer.why = "no address known"
                elif free <= 0:
                    peer.why = f"enough others ({most}) are connected"
                else:
                    due.append(peer)
            self._random.shuffle(due)
            return due[: max(0, free)]

    def undecided(self) -> bool:
        """Whether somebody was found but not dialled yet."""
        with self._lock:
            return any(p.addresses and not p.connected and not p.dials_failed for p in self._peers.values())

    def dial_failed(self, peer_id: str, why: str) -> None:
        """It could not be reached."""
        with self._lock:
            peer = self._get(peer_id)
            wait_s = min(_LAST_DIAL_S, _FIRST_DIAL_S * 2 ** min(peer.dials_failed, 10)) * (0.5 + self._random.random())
            peer.dials_failed += 1
            peer.why, peer.dial_at = f"cannot be reached: {why}"[:300], self._clock.monotonic() + wait_s

    def see(self, connected: Iterable[str]) -> set[str]:
        """These are connected now, all others are not; returns those that came."""
        now = set(connected) - {self.own_id}
        with self._lock:
            came = {peer_id for peer_id in now if peer_id not in self._peers or not self._peers[peer_id].connected}
            for peer_id in came:
                if peer_id not in self._peers:
                    self.found(peer_id, [], "inbound")
                peer = self._get(peer_id)
                peer.connected, peer.why, peer.dials_failed, peer.dial_at = True, "", 0, 0.0
            for peer in self._peers.values():
                if peer.connected and peer.id not in now:
                    peer.connected, peer.why, peer.in_flight = False, "the connection ended", 0
                    peer.held.clear()
        return came

    # -- chunks ------------------------------------------------------------------------------------------

    def ready(self) -> list[Peer]:
        """Connected peers that may be asked now, the best first; those with fewer wishes open come first."""
        now = self._clock.monotonic()
        with self._lock:
            able = [
                p for p in self._peers.values()
                if p.connected and p.score.dropped is None and p.score.rests_until <= now
            ]
            self._random.shuffle(able)
            return sorted(able, key=lambda p: (p.in_flight, -p.score.value))

    def holds(self, peer: Peer, statuses: dict[str, Status]) -> None:
        """Note what a peer says to have."""
        with self._lock:
            if len(peer.held) + len(statuses) > _MAX_HELD:
                peer.held.clear()
            peer.held.update(statuses)

    def sent(self, peer_id: str, nbytes: int) -> None:
        """We served it."""
        with self._lock:
            self._get(peer_id).served += nbytes

    def delivers(self, peer: Peer, nbytes: int, seconds: float) -> None:
        """It served us, and the bytes were right."""
        with self._lock:
            peer.score.delivers(nbytes, seconds)

    def fails(self, peer: Peer, *, slow: bool = False, why: str = "") -> bool:
        """It did not serve us, for no bad reason; True when that happened too often and it is dropped."""
        with self._lock:
            now = self._clock.monotonic()
            slow = slow and now >= self._slow_until
            peer.score.fails(now, slow=slow)
            if slow and peer.score.slow_in_a_row >= _SLOW_STRIKES and peer.score.dropped is None:
                peer.score.dropped = f"{E_SOURCE_SLOW}: too slow {_SLOW_STRIKES} times in a row: {why}"
            return peer.score.dropped is not None

    def we_are_slow(self) -> None:
        """Our own machine is overloaded: who seems slow now may not be."""
        self._slow_until = self._clock.monotonic() + _FORGIVING_S

    def drop(self, peer_id: str, error: AssayError) -> None:
        """It broke a rule: ask it no more in this run."""
        with self._lock:
            peer = self._get(peer_id)
            peer.score.fails(self._clock.monotonic())
            if peer.score.dropped is None:
                peer.score.dropped = str(error)[:300]

    def dropped(self, peer_id: str) -> bool:
        """Whether we deal with it no more."""
        with self._lock:
            return peer_id in self._peers and self._peers[peer_id].score.dropped is not None
