"""The swarm as the rest of a process sees it: a thread of its own with a small blocking interface.

The thread runs a trio loop with the libp2p host; what passes between it and others is bytes. If it dies, it is said
why, and it is started again after a while; fetching then goes by the store alone.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from protocol.api import PeersReply
from protocol.clock import Clock
from protocol.envelope import Envelope
from protocol.errors import AssayError, LocalFault, PeerFault
from protocol.identity import Identity
from protocol.store import missing
from protocol.swarm.address import dialable, peer_id_of
from protocol.swarm.announce import PeerAnnounce
from protocol.swarm.heads import Heads
from protocol.swarm.limits import Limits
from protocol.swarm.log_notes import LogNotes
from protocol.swarm.peers import PeerBook
from protocol.swarm.shelf import Chunks, Shelf
from protocol.swarm.wire import E_SWARM, turn, weight

if TYPE_CHECKING:
    import trio

    from protocol.swarm.host import Host

logger = logging.getLogger(__name__)

#: Where we listen: the coordinator names us and others to each other.
Announce = Callable[[PeerAnnounce], PeersReply]

#: How long after the start the first fetch waits for peers, in seconds.
_SETTLE_S: Final = 3.0
_BLINK_S: Final = 0.05
#: How long loading libp2p and listening may take, in seconds.
_START_S: Final = 30.0
#: Rest after the host died, in seconds: first, longest.
_REST_S: Final = (2.0, 60.0)
#: Announcements while the swarm is young, in seconds after one another; later as the coordinator says.
_EAGER_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0)
_MAX_ASKED: Final = 32

_R = TypeVar("_R")


def installed() -> bool:
    """Whether the optional packages of the swarm are here."""
    return all(importlib.util.find_spec(name) is not None for name in ("libp2p", "trio", "multiaddr"))


class Swarm:
    """A node's part in the swarm. ``fetch``, ``plan`` and ``tell`` may be called from any thread but the swarm's.

    Args:
        chunks: what we serve: verified chunks.
        announce: tells the coordinator and hears of others; None: peers come by other ways.
        notes: what is heard of the run's log; None: the node takes no part in passing its heads on.
    """

    def __init__(
        self, identity: Identity, run_id: str, learner_key: str, limits: Limits, chunks: Chunks, clock: Clock, *,
        announce: Announce | None = None, on_head: Callable[[], None] = lambda: None,
        notes: LogNotes | None = None,
    ):
        self.notes = notes
        self._identity, self._run_id, self._limits, self._clock = identity, run_id, limits, clock
        self._announce, self._on_head = announce, on_head
        self.book = PeerBook(peer_id_of(identity.public_key), clock)
        self.shelf, self.heads = Shelf(chunks, clock), Heads(learner_key, run_id)
        self._host: Host | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop: trio.Event | None = None
        self._stopping, self._tried = threading.Event(), threading.Event()
        self._met = threading.Event()  #: the meeting point answered, or there is none
        self._started_at = -math.inf
        self._listening_at: float | None = None
        self._why = "not started yet"
        self._thread = threading.Thread(target=self._live, name="swarm", daemon=True)

    # -- life --------------------------------------------------------------------------------------------

    def start(self, *, wait: bool = False) -> None:
        """Begin; with ``wait``, return once it listens. It goes on trying when it cannot.

        Raises:
            LocalFault: ``E_SWARM`` when it does not listen yet, saying why.
        """
        self._started_at = self._clock.monotonic()
        if self._announce is None:
            self._met.set()
        self._thread.start()
        if wait and not (self._tried.wait(_START_S) and self._host is not None):
            raise LocalFault(E_SWARM, "the swarm does not listen", got=self._why)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End; connections are closed."""
        self._stopping.set()
        if self._stop is not None:
            self._soon(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _live(self) -> None:
        import trio

        rest_s = _REST_S[0]
        while not self._stopping.is_set():
            began = self._clock.monotonic()
            try:
                trio.run(self._main)
            except LocalFault as error:
                self._why = str(error)
                logger.warning("no swarm: %s", error, extra={"code": error.code})
            except Exception as error:
                if self._stopping.is_set():
                    logger.info("the swarm ended badly", extra={"detail": _words(error)})
                    continue
                self._why = f"the host died: {_words(error)}"
                logger.exception("the swarm failed, the store serves meanwhile")
            finally:
                self._host = self._token = self._listening_at = None
                self.book.see(())
                self._tried.set()
            if self._clock.monotonic() - began > 10 * _REST_S[1]:
                rest_s = _REST_S[0]
            self._stopping.wait(rest_s)
            rest_s = min(2 * rest_s, _REST_S[1])

    async def _main(self) -> None:
        import trio

        from protocol.swarm.host import Host

        self._stop = trio.Event()
        host = Host(
            self._identity, self._run_id, self._limits, self.book, self.shelf, self.heads, self._clock,
            lambda _: self._on_head(), self.notes,
        )
        async with host.running() as nursery:
            self._host, self._token = host, trio.lowlevel.current_trio_token()
            self._listening_at = self._clock.monotonic()
            self.shelf.on_change = lambda: self._soon(host.server.wake)
            self._why = ""
            logger.info("swarm listens", extra={"peer": self.book.own_id, "addresses": host.addresses})
            if self._announce is not None:
                nursery.start_soon(self._meet, host)
            self._tried.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()
        self._why = "stopped"

    async def _meet(self, host: Host) -> None:
        """Tell the coordinator where we listen, hear of others, again and again."""
        import trio

        turn = 0
        while True:
            wait_s = _EAGER_S[min(turn, len(_EAGER_S) - 1)]
            try:
                reply = await trio.to_thread.run_sync(self._say_where, host.addresses, abandon_on_cancel=True)
                host.seen_from = reply.seen_from
                self._hear_of(reply)
                self._met.set()
                if turn >= len(_EAGER_S):
                    wait_s = max(1.0, reply.announce_again_ms / 1000)
            except AssayError as error:
                logger.info("no word from the meeting point", extra={"code": error.code, "detail": str(error)[:200]})
            turn += 1
            await trio.sleep(wait_s)

    def _say_where(self, addresses: list[str]) -> PeersReply:
        assert self._announce is not None
        return self._announce(PeerAnnounce(
            run_id=self._run_id, node_id=self._identity.id, addresses=(list(self._limits.announced) or addresses)[:8],
            max_peers=_MAX_ASKED, issued_at_ms=self._clock.now_ms(),
        ))

    def _hear_of(self, reply: PeersReply) -> None:
        for peer in reply.peers:
            try:
                peer_id = peer_id_of(bytes.fromhex(peer.public_key))
            except ValueError:
                continue
            addresses = [address for address in peer.addresses if dialable(address)]
            self.book.found(peer_id, addresses, "rendezvous", node_id=peer.node_id, name=peer.name)

    # -- for the rest of the process ---------------------------------------------------------------------

    def plan(self, keys: Sequence[str]) -> list[str]:
        """Say that these chunks are to be fetched; the order in which to do it, those that are our turn first."""
        self._settle()
        self.shelf.expect(keys)
        self._call(lambda host: host.client.survey(keys), None)
        own = self.book.own_id
        ids = [*(peer.id for peer in self.book.ready()), own]
        return sorted(keys, key=lambda key: (turn(key, ids).index(own), weight(key, own)))

    def _settle(self) -> None:
        """Right after the start, give the first peers a moment to be connected: without them all turns are ours."""
        while not self._stopping.is_set():
            listening = self._listening_at
            if listening is None and self._tried.is_set():
                return
            if listening is not None and self._met.is_set() and not self.book.undecided():
                return
            until = self._started_at + _START_S if listening is None else listening + _SETTLE_S
            if self._clock.monotonic() >= until:
                return
            self._stopping.wait(_BLINK_S)

    def fetch(self, key: str, size: int, *, whole_swarm: bool = False) -> bytes:
        """A chunk, verified, from peers; see :meth:`protocol.swarm.ask.Client.fetch`.

        Raises:
            LocalFault: ``E_NOT_FOUND``: nobody has it, ask the store.
        """
        if not self.book.ready():
            raise missing(key)

        async def act(host: Host) -> bytes | None:
            try:
                return await host.client.fetch(key, size, whole_swarm=whole_swarm)
            except LocalFault:
                return None

        data = self._call(act, None)
        if data is None:
            raise missing(key)
        return data

    def tell(self, head: Envelope) -> None:
        """Pass a head on that we got elsewhere, unless the swarm knows it already."""
        data = head.to_bytes()
        try:
            news = self.heads.hear(data, self._clock.now_ms())
        except PeerFault:
            return
        if news:
            self._call(lambda host: host.tell(data), None)

    def tell_note(self, note: str) -> None:
        """Pass on a head of the run's log that the coordinator gave us, unless the swarm knows it already."""
        data = note.encode()
        try:
            news = self.notes is None or self.notes.hear(data, own=True)
        except PeerFault:
            return
        if news:
            self._call(lambda host: host.tell_note(data), None)

    def view(self) -> dict[str, Any]:
        """How the swarm stands, for status files."""
        host = self._host
        peers = self.book.view()
        return {
            "peer_id": self.book.own_id, "running": host is not None, "why": self._why,
            "addresses": [] if host is None else [f"{address}/p2p/{self.book.own_id}" for address in host.addresses],
            "connected": sum(peer["connected"] for peer in peers), "head_version": self.heads.version,
            "bytes_served": 0 if host is None else host.up.total,
            "bytes_fetched": sum(peer["bytes_fetched"] for peer in peers), "peers": peers,
        }

    # -- between threads ---------------------------------------------------------------------------------

    def _call(self, act: Callable[[Host], Awaitable[_R]], otherwise: _R) -> _R:
        """``act`` in the swarm's thread; ``otherwise`` when the swarm is not running or ends meanwhile."""
        import trio

        host, token = self._host, self._token
        if host is None or token is None:
            return otherwise
        try:
            answer: _R = trio.from_thread.run(act, host, trio_token=token)
            return answer
        except (trio.RunFinishedError, trio.Cancelled, BaseExceptionGroup):
            return otherwise

    def _soon(self, act: Callable[[], object]) -> None:
        import trio

        token = self._token
        if token is not None:
            try:
                token.run_sync_soon(act)
            except trio.RunFinishedError:
                return


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]
