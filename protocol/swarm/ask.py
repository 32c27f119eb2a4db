"""The asking side of the stream protocols. Runs in the swarm's trio thread.

Everything a peer says is checked: lengths before reading, the hash before use, a deadline on every wait. A peer that
breaks a rule is named and dropped. Spec: ``docs/spec/swarm.md``, "Fetching".
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from protocol.clock import Clock
from protocol.errors import E_OBJECT_HASH, E_UNREACHABLE, PeerFault, Transient
from protocol.store import missing
from protocol.swarm import wire
from protocol.swarm.bandwidth import Bandwidth
from protocol.swarm.peers import Peer, PeerBook
from protocol.swarm.shelf import Shelf
from protocol.swarm.wire import Answer, Status, Wish, turn

if TYPE_CHECKING:
    from protocol.swarm.line import Line

#: Longest time to open a stream or to get a list, in seconds.
OPEN_S: Final = 10.0
#: Longest time for a chunk: so many seconds, and its size at the least rate worth having.
CHUNK_S: Final = 10.0
LEAST_RATE: Final = 256 * 2**10
#: Longest time without a byte in the middle of an answer, in seconds.
STALL_S: Final = 5.0
#: How long a peer whose turn it is may take to begin, in seconds: it may not have heard of the chunk yet.
STAGGER_MS: Final = 1500
#: How long a chunk that is coming to a peer is waited for while nothing else comes to us either, in seconds. Half as
#: long for each time in a row that the peer did not keep its word.
PATIENCE_S: Final = 30.0
#: The longest such wait, whatever else comes, in seconds.
LONGEST_S: Final = 300.0
#: Peers whose turn is before ours that are waited for.
MAX_TURNS: Final = 3
#: Peers asked who has what.
MAX_SURVEYED: Final = 16
#: Idle streams kept to one peer, and for how long, in seconds: shorter than the server's own patience.
_IDLE_LINES: Final = 4
_IDLE_S: Final = 20.0

_R = TypeVar("_R")
OpenLine = Callable[[str, str], Awaitable["Line"]]
Drop = Callable[[str, PeerFault], Awaitable[None]]


class Client:
    """Fetches chunks from peers."""

    def __init__(
        self, run_id: str, book: PeerBook, shelf: Shelf, open_line: OpenLine, drop: Drop, down: Bandwidth, clock: Clock
    ):
        self._book, self._shelf, self._open, self._drop = book, shelf, open_line, drop
        self._down, self._clock = down, clock
        self._chunk, self._have = wire.chunk_protocol(run_id), wire.have_protocol(run_id)
        self._head = wire.head_protocol(run_id)
        self._idle: dict[str, list[tuple[float, Line]]] = {}

    # -- who has what ------------------------------------------------------------------------------------

    async def survey(self, keys: Sequence[str]) -> None:
        """Ask the best peers how they stand towards these chunks, all at once."""
        async with trio.open_nursery() as nursery:
            for peer in self._book.ready()[:MAX_SURVEYED]:
                for first in range(0, len(keys), wire.MAX_KEYS):
                    nursery.start_soon(self._ask_what, peer, keys[first : first + wire.MAX_KEYS])

    async def _ask_what(self, peer: Peer, keys: Sequence[str]) -> None:
        async def ask() -> dict[str, Status]:
            async with self._talk(peer, self._have) as line:
                with trio.fail_after(OPEN_S):
                    await line.write(wire.encode_keys(keys))
                    statuses = wire.decode_statuses(await _exactly(line, len(keys)))
                return dict(zip(keys, statuses, strict=True))

        self._book.holds(peer, await self._blaming(peer, ask) or dict.fromkeys(keys, Status.ABSENT))

    async def head(self, peer: Peer) -> bytes | None:
        """The newest head a peer knows, unchecked."""

        async def ask() -> bytes | None:
            async with self._talk(peer, self._head) as line:
                with trio.fail_after(OPEN_S):
                    count = await line.read(wire.COUNT_BYTES)
                    return await _exactly(line, wire.decode_count(count, wire.MAX_HEAD_BYTES)) if count else None

        return await self._blaming(peer, ask)

    # -- chunks ------------------------------------------------------------------------------------------

    async def fetch(self, key: str, size: int, *, whole_swarm: bool = False) -> bytes:
        """The chunk of ``size`` bytes, its hash verified.

        From whoever has it; else from those whose turn it is to get it from the store, as long as ours is later. With
        ``whole_swarm`` everybody's turn is before ours: the store did not give it to us.

        Raises:
            LocalFault: ``E_NOT_FOUND`` when no peer gave it: it is our turn to ask the store.
        """
        ready = self._book.ready()
        if whole_swarm or any(key not in peer.held for peer in ready):
            await self.survey([key])
        asked: set[str] = set()
        while (holder := self._holder(key, asked)) is not None:
            asked.add(holder.id)
            status, data = await self._get(holder, key, size, 0)
            if status is Status.HERE:
                return data
        for peer in self._before_us(key, whole_swarm=whole_swarm):
            waited = await self._wait_for(peer, key, size)
            if waited is not None:
                return waited
        raise missing(key)

    def _holder(self, key: str, asked: set[str]) -> Peer | None:
        """A peer that has the chunk and was not asked yet: the least busy, then the fastest."""
        able = (p for p in self._book.ready() if p.id not in asked and p.held.get(key) is Status.HERE)
        return next(able, None)

    def _before_us(self, key: str, *, whole_swarm: bool) -> list[Peer]:
        ready = {peer.id: peer for peer in self._book.ready()}
        order = turn(key, [*ready, self._book.own_id])
        if not whole_swarm:
            order = order[: order.index(self._book.own_id)]
        return [ready[peer_id] for peer_id in order if peer_id in ready][:MAX_TURNS]

    async def _wait_for(self, peer: Peer, key: str, size: int) -> bytes | None:
        """The chunk from a peer that is to get it first; None when it does not, or takes too long."""
        began = self._clock.monotonic()
        wait_ms = STAGGER_MS
        while True:
            status, data = await self._get(peer, key, size, wait_ms)
            if status is Status.HERE:
                peer.broken_promises = 0
                return data
            if status is not Status.COMING:
                return None
            patience_s = PATIENCE_S / 2**peer.broken_promises
            give_up = min(max(began, self._shelf.moved_at) + patience_s, began + LONGEST_S)
            left_ms = int(1000 * (give_up - self._clock.monotonic()))
            if left_ms <= 0:
                peer.broken_promises = min(peer.broken_promises + 1, 10)
                return None
            wait_ms = min(left_ms, wire.MAX_WAIT_MS)

    async def _get(self, peer: Peer, key: str, size: int, wait_ms: int) -> tuple[Status, bytes]:
        """The chunk, verified, or how the peer stands towards it."""

        async def ask() -> tuple[Status, bytes]:
            async with self._talk(peer, self._chunk, keep=True) as line:
                return await self._pieces(line, peer, key, size, wait_ms)

        status, data = await self._blaming(peer, ask) or (Status.ABSENT, b"")
        self._book.holds(peer, {key: status})
        return status, data

    async def _pieces(self, line: Line, peer: Peer, key: str, size: int, wait_ms: int) -> tuple[Status, bytes]:
        data, spent_s = bytearray(), 0.0
        limit_s = wait_ms / 1000 + CHUNK_S + size / LEAST_RATE
        while len(data) < size:
            wish = Wish(key, len(data), min(wire.MAX_PIECE_BYTES, size - len(data)), wait_ms)
            await trio.sleep(self._down.grant(wish.length))
            with trio.fail_after(max(0.0, limit_s - spent_s)):
                await line.write(wish.encode())
                answer = Answer.decode(await _exactly(line, wire.ANSWER_BYTES), wish, size)
                began = self._clock.monotonic()
                if answer.status is not Status.HERE:
                    return answer.status, b""
                data += await _exactly(line, answer.length, stall_s=STALL_S)
            spent_s += self._clock.monotonic() - began
        got = (await trio.to_thread.run_sync(hashlib.sha256, data)).hexdigest()
        if got != key:
            raise PeerFault(E_OBJECT_HASH, f"wrong bytes from {peer.id}", expected=key, got=got)
        self._book.delivers(peer, size, spent_s)
        return Status.HERE, bytes(data)

    # -- streams -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _talk(self, peer: Peer, protocol: str, *, keep: bool = False) -> AsyncIterator[Line]:
        """A stream to a peer; given up unless all went well."""
        line = self._kept(peer.id) if keep else None
        if line is None:
            with trio.fail_after(OPEN_S):
                line = await self._open(peer.id, protocol)
        peer.in_flight += 1
        try:
            yield line
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await line.reset()
            raise
        finally:
            peer.in_flight = max(0, peer.in_flight - 1)
        idle = self._idle.setdefault(peer.id, [])
        if keep and len(idle) < _IDLE_LINES:
            idle.append((self._clock.monotonic(), line))
        else:
            await line.close()

    def _kept(self, peer_id: str) -> Line | None:
        idle = self._idle.get(peer_id, [])
        while idle:
            since, line = idle.pop()
            if self._clock.monotonic() - since < _IDLE_S:
                return line
        return None

    def forget(self, peer_id: str) -> None:
        """Its connection ended: its streams are of no use any more."""
        self._idle.pop(peer_id, None)

    async def _blaming(self, peer: Peer, ask: Callable[[], Awaitable[_R]]) -> _R | None:
        """What ``ask`` gives; None when it fails, which is the peer's fault."""
        try:
            return await ask()
        except trio.TooSlowError:
            await self._too_slow(peer, "no answer in time")
        except Transient as error:
            self._book.fails(peer, why=str(error))
        except PeerFault as error:
            await self._drop(peer.id, error)
        return None

    async def _too_slow(self, peer: Peer, why: str) -> None:
        if self._book.fails(peer, slow=True, why=why):
            await self._drop(peer.id, PeerFault(wire.E_SWARM_WIRE, why))


async def _exactly(line: Line, count: int, stall_s: float | None = None) -> bytes:
    data = await line.read(count, stall_s=stall_s)
    if len(data) < count:
        raise Transient(E_UNREACHABLE, f"the stream to {line.peer_id} ended", expected=f"{count} bytes", got=len(data))
    return data
