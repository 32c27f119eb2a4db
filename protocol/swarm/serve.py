"""The answering side of the stream protocols. Runs in the swarm's trio thread.

What one peer can make us hold is bounded: so many streams, one piece each, a deadline on every read and write.
Spec: ``docs/spec/swarm.md``, "Serving".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import trio

from protocol.errors import E_UNREACHABLE, LocalFault, PeerFault, Transient
from protocol.swarm import wire
from protocol.swarm.bandwidth import Bandwidth
from protocol.swarm.heads import Heads
from protocol.swarm.peers import PeerBook
from protocol.swarm.shelf import Shelf
from protocol.swarm.wire import Answer, Status, Wish

if TYPE_CHECKING:
    from protocol.swarm.line import Line

logger = logging.getLogger(__name__)

#: Streams served at once: of one peer, of all.
MAX_STREAMS_PER_PEER: Final = 8
MAX_STREAMS: Final = 128
#: A stream without a wish for so long is closed, in seconds.
IDLE_S: Final = 30.0
#: Longest time for an answer to leave: so many seconds, and its size at the least rate worth serving.
WRITE_S: Final = 10.0
LEAST_RATE: Final = 16 * 2**10
#: We are busy when what was granted before fills our line for longer than this, in seconds.
BUSY_S: Final = 3.0


class Server:
    """Serves chunks, lists and heads."""

    def __init__(
        self, book: PeerBook, shelf: Shelf, heads: Heads, up: Bandwidth,
        drop: Callable[[str, PeerFault], Awaitable[None]],
    ):
        self._book, self._shelf, self._heads, self._up, self._drop = book, shelf, heads, up, drop
        self._streams: Counter[str] = Counter()
        self._changed = trio.Event()

    def wake(self) -> None:
        """The shelf changed: those who wait look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def chunks(self, line: Line) -> None:
        """Answer wishes until the peer is done or silent."""
        await self._receive(line, self._chunks)

    async def have(self, line: Line) -> None:
        """Say how we stand towards a list of keys."""
        await self._receive(line, self._have)

    async def head(self, line: Line) -> None:
        """Give the newest head we know; nothing when there is none."""
        await self._receive(line, self._head)

    async def _receive(self, line: Line, serve: Callable[[Line], Awaitable[None]]) -> None:
        """Take a stream in, within the limits; whatever happens, end it."""
        peer_id = line.peer_id
        full = self._streams[peer_id] >= MAX_STREAMS_PER_PEER or self._streams.total() >= MAX_STREAMS
        if full or self._book.dropped(peer_id):
            await line.reset()
            return
        self._streams[peer_id] += 1
        try:
            await serve(line)
            await line.close()
        except (Transient, trio.TooSlowError):
            await line.reset()
        except PeerFault as error:
            await line.reset()
            await self._drop(peer_id, error)
        except LocalFault as error:
            logger.warning("a peer could not be served: %s", error, extra={"peer": peer_id, "code": error.code})
            await line.reset()
        finally:
            self._streams[peer_id] -= 1
            if not self._streams[peer_id]:
                del self._streams[peer_id]

    async def _chunks(self, line: Line) -> None:
        while True:
            with trio.fail_after(IDLE_S):
                data = await line.read(wire.WISH_BYTES)
            if not data:
                return
            await self._answer(line, Wish.decode(data))

    async def _have(self, line: Line) -> None:
        with trio.fail_after(IDLE_S):
            count = wire.decode_count(await _all(line, wire.COUNT_BYTES), wire.MAX_KEYS)
            keys = wire.decode_keys(await _all(line, count * wire.KEY_BYTES))
        statuses = bytes(self._shelf.status(key) for key in keys)
        with trio.fail_after(WRITE_S):
            await line.write(statuses)

    async def _head(self, line: Line) -> None:
        head = self._heads.newest
        if head is not None:
            with trio.fail_after(WRITE_S):
                await line.write(wire.encode_count(len(head)) + head)

    async def _answer(self, line: Line, wish: Wish) -> None:
        status = await self._await(wish)
        if status is Status.HERE and self._up.queue_s() > BUSY_S:
            status = Status.BUSY
        answer, data = Answer(status), b""
        if status is Status.HERE:
            piece = await trio.to_thread.run_sync(self._shelf.read, wish.key, wish.start, wish.length)
            if piece is None:
                answer = Answer(Status.ABSENT)
            else:
                data, total = piece
                answer = Answer(Status.HERE, total, len(data))
        await trio.sleep(self._up.grant(len(data)))
        with trio.fail_after(WRITE_S + len(data) / LEAST_RATE):
            await line.write(answer.encode() + data)
        self._book.sent(line.peer_id, len(data))

    async def _await(self, wish: Wish) -> Status:
        """How we stand towards the chunk, at the latest after the time the peer is ready to wait for it."""
        with trio.move_on_after(wish.wait_ms / 1000):
            while self._shelf.status(wish.key) is not Status.HERE:
                await self._changed.wait()
        return self._shelf.status(wish.key)


async def _all(line: Line, count: int) -> bytes:
    data = await line.read(count)
    if len(data) < count:
        raise Transient(E_UNREACHABLE, f"{line.peer_id} left before it asked", expected=f"{count} bytes", got=len(data))
    return data
