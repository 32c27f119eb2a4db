"""Real swarm hosts on loopback for tests, honest ones and rogues."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from protocol.clock import SystemClock
from protocol.envelope import Envelope
from protocol.errors import LocalFault
from protocol.identity import Identity
from protocol.log_head import LogHead, origin_of
from protocol.messages import CheckpointHead
from protocol.store import missing
from protocol.swarm.address import peer_id_of
from protocol.swarm.first import SwarmFirst
from protocol.swarm.heads import Heads
from protocol.swarm.host import Host
from protocol.swarm.limits import Limits
from protocol.swarm.line import Line
from protocol.swarm.log_notes import LogNotes
from protocol.swarm.peers import PeerBook
from protocol.swarm.shelf import Shelf
from protocol.swarm.swarm import Swarm
from protocol.weights.cache import ChunkCache
from protocol.weights.pool import SourcePool
from tests.fakes.waiting import PATIENCE_S, until

RUN_ID = "ab" * 16
LEARNER, COORDINATOR = Identity(b"l" * 32), Identity(b"c" * 32)
CLOCK = SystemClock()


def signed_head(version: int, *, signer: Identity = LEARNER, issued_at_ms: int = 0, **changes: Any) -> Envelope:
    """A head of the learner, or of somebody else."""
    fields = {
        "run_id": RUN_ID, "version": version, "manifest_sha256": hashlib.sha256(b"%d" % version).hexdigest(),
        "issued_at_ms": issued_at_ms, "expires_at_ms": CLOCK.now_ms() + 600_000,
    }
    return CheckpointHead.model_validate(fields | changes).sign(signer)


def signed_note(size: int, root: int = 0, *, signer: Identity = COORDINATOR) -> str:
    """A head of the run's log, by the coordinator or by somebody else."""
    return LogHead(origin_of(RUN_ID), size, bytes([root]) * 32).sign(signer)


def limits(listen: str = "/ip4/127.0.0.1/tcp/0", **changes: Any) -> Limits:
    fields: dict[str, Any] = {"max_peers": 8, "up_bytes_s": None, "down_bytes_s": None}
    return Limits(listen, **(fields | changes))


@dataclass
class CountingSource:
    """A store's source that notes what it was asked for, and may be blocked."""

    objects: dict[str, bytes]
    name: str = "store"
    blocked: bool = False
    asked: list[str] = field(default_factory=list)

    def fetch(self, key: str, start: int, end: int | None, deadline_s: float) -> bytes:
        if start == 0:
            self.asked.append(key)
        if self.blocked:
            raise LocalFault("E_STORE", "blocked")
        if key not in self.objects:
            raise missing(key)
        return self.objects[key][start:end]


class Member:
    """A node's part of the swarm, with a cache and a store behind it."""

    def __init__(self, folder: Path, seed: str, source: CountingSource | None = None, **changes: Any):
        self.identity = Identity(hashlib.sha256(seed.encode()).digest())
        self.source = source or CountingSource({})
        self.cache = ChunkCache(folder / seed)
        self.woken = threading.Event()
        self.notes: list[str] = []  #: heads of the log that peers were shown
        self.swarm = Swarm(
            self.identity, RUN_ID, LEARNER.public_key.hex(), limits(**changes), self.cache.store, CLOCK,
            on_head=self.woken.set, notes=LogNotes(COORDINATOR.public_key, RUN_ID, self.notes.append),
        )
        self.chunks = SwarmFirst(SourcePool([self.source], self.cache), self.swarm)
        self.swarm.start(wait=True)

    @property
    def id(self) -> str:
        return self.swarm.book.own_id

    @property
    def address(self) -> str:
        return str(self.swarm.view()["addresses"][0]).partition("/p2p/")[0]

    def keep(self, data: bytes) -> str:
        return self.cache.store.put(data)

    def meet(self, *others: Member | Rogue) -> None:
        """Hear of others, and be connected to them on both sides."""
        for other in others:
            self.swarm.book.found(other.id, [other.address], "test")
        for other in others:
            until(lambda other=other: self.peer(other).get("connected"))
            if isinstance(other, Member):
                until(lambda other=other: other.peer(self).get("connected"))

    def peer(self, other: Member | Rogue) -> dict[str, Any]:
        """What this one knows of another."""
        found = [peer for peer in self.swarm.book.view() if peer["peer_id"] == other.id]
        return found[0] if found else {}

    def close(self) -> None:
        self.swarm.stop()


class Rogue:
    """A host that speaks libp2p well and our protocols as it likes."""

    def __init__(
        self, seed: str, *, chunks: Callable[[Line], Awaitable[None]] | None = None,
        have: Callable[[Line], Awaitable[None]] | None = None, run_id: str = RUN_ID,
    ):
        identity = Identity(hashlib.sha256(seed.encode()).digest())
        self.id = peer_id_of(identity.public_key)
        self.address = ""
        self.host: Host
        self._identity, self._chunks, self._have, self._run_id = identity, chunks, have, run_id
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        self._stop: trio.Event
        self._thread = threading.Thread(target=lambda: trio.run(self._main), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    async def _main(self) -> None:
        book = PeerBook(self.id, CLOCK)
        heads = Heads(LEARNER.public_key.hex(), RUN_ID)
        self.host = Host(
            self._identity, self._run_id, limits(), book, Shelf(_Nothing(), CLOCK), heads, CLOCK, lambda _: None,
            LogNotes(COORDINATOR.public_key, RUN_ID),
        )
        self.host.server.chunks = self._chunks or self.host.server.chunks  # type: ignore[method-assign, assignment]
        self.host.server.have = self._have or self.host.server.have  # type: ignore[method-assign, assignment]
        self._stop = trio.Event()
        async with self.host.running():
            self.address = self.host.addresses[0]
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await self._stop.wait()

    def do(self, act: Callable[[Host], Awaitable[Any]]) -> Any:
        """Something in its own loop."""
        return trio.from_thread.run(act, self.host, trio_token=self._token)

    def close(self) -> None:
        if self._token is not None:
            self._token.run_sync_soon(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class _Nothing:
    """No chunks at all."""

    def has(self, sha256: str) -> bool:
        return False

    def size(self, sha256: str) -> int:
        raise missing(sha256)

    def read(self, sha256: str, start: int, end: int) -> bytes:
        raise missing(sha256)
