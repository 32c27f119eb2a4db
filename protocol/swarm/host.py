"""The libp2p host: connections, discovery, gossip. Runs in the swarm's trio thread.

TCP with Noise and Yamux, nothing else is offered: no plain text to be talked down to. The host's key is the node's, so
a peer id proves a node. Spec: ``docs/spec/swarm.md``.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_keys
from libp2p.exceptions import BaseLibp2pError
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from protocol.clock import Clock
from protocol.errors import E_UNREACHABLE, PeerFault, Transient
from protocol.identity import Identity
from protocol.swarm import address, wire
from protocol.swarm.ask import Client
from protocol.swarm.bandwidth import Bandwidth
from protocol.swarm.heads import Heads
from protocol.swarm.limits import Limits
from protocol.swarm.line import Line
from protocol.swarm.log_notes import LogNotes
from protocol.swarm.peers import PeerBook
from protocol.swarm.serve import Server
from protocol.swarm.shelf import Shelf

logger = logging.getLogger(__name__)
if "LIBP2P_DEBUG" not in os.environ:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # a failed dial is no error; what matters we log ourselves

#: How often connections are looked after, in seconds.
_TEND_S: Final = 0.25
_DIAL_S: Final = 10.0
_CLOSE_S: Final = 2.0
_MAX_DIALS: Final = 8
#: How often the table is asked for peers that the coordinator did not name: first, later (seconds).
_LOOK_UP_S: Final = (5.0, 60.0)
#: How often peers are asked for the newest head, in case gossip lost it, in seconds.
_PULL_S: Final = 15.0
_PULLED: Final = 2
_GOSSIP: Final = "/meshsub/1.1.0"
#: What libp2p raises when something with a peer goes wrong.
_TROUBLE: Final = (BaseLibp2pError, OSError, ValueError, ExceptionGroup)
#: When our own loop is late by this much, in seconds, nobody is called slow for a while.
_LATE_S: Final = 0.5


class Host:
    """One libp2p host for one run. Everything but the constructor runs in one trio loop."""

    def __init__(
        self, identity: Identity, run_id: str, limits: Limits, book: PeerBook, shelf: Shelf, heads: Heads, clock: Clock,
        on_head: Callable[[bytes], None], notes: LogNotes | None = None,
    ):
        self._notes = notes
        self._run_id, self._limits, self._book, self._heads, self._clock = run_id, limits, book, heads, clock
        self._on_head = on_head
        self._nursery: trio.Nursery | None = None
        self.seen_from = ""  #: our address as others see it, once somebody told us
        self.up, self.down = Bandwidth(limits.up_bytes_s, clock), Bandwidth(limits.down_bytes_s, clock)
        self.server = Server(book, shelf, heads, self.up, self.drop)
        self.client = Client(run_id, book, shelf, self._open, self.drop, self.down, clock)
        keys = create_new_key_pair(identity.seed)
        noise = NoiseTransport(keys, noise_privkey=new_noise_keys().private_key)
        self._host = new_host(
            key_pair=keys, sec_opt={NOISE: noise}, muxer_opt={YAMUX: Yamux}, negotiate_timeout=int(_DIAL_S),
            disable_identify_address_discovery=True, addrs_factory=self._outward,
            connection_config=ConnectionConfig(
                max_connections=2 * limits.max_peers + 8, high_watermark=2 * limits.max_peers, low_watermark=0,
                min_connections=0, dial_timeout=_DIAL_S, inbound_upgrade_timeout=_DIAL_S,
                outbound_upgrade_timeout=_DIAL_S, max_connections_per_peer=2,
            ),
        )
        network: Any = self._host.get_network()
        network.retry_config = RetryConfig(max_retries=0)
        network.auto_connector.maybe_connect = _leave_it  # who is dialled, and when, is ours to decide
        self._router = GossipSub(
            protocols=[_GOSSIP], degree=6, degree_low=3, degree_high=12, heartbeat_interval=5,
            max_messages_per_topic_per_second=20.0,
        )
        topic, log_topic = wire.head_topic(run_id), wire.log_topic(run_id)
        self._gossip = Pubsub(
            self._host, self._router, strict_signing=True, max_inbound_rpc_size=8 * wire.MAX_HEAD_BYTES,
            msg_id_constructor=lambda message: hashlib.sha256(message.data).digest(),
            allowed_topics={topic, log_topic},
        )
        self._topic, self._log_topic = topic, log_topic
        self._table = KadDHT(self._host, DHTMode.SERVER, enable_providers=False, enable_values=False)

    @property
    def addresses(self) -> list[str]:
        """Where it listens, without the peer's id."""
        return [str(here).partition("/p2p/")[0] for here in self._host.get_transport_addrs()]

    def _outward(self, listening: list[Multiaddr]) -> list[Multiaddr]:
        """The addresses libp2p tells others: none that mean "here"."""
        if self._limits.announced:
            return [Multiaddr(text) for text in self._limits.announced]
        return [Multiaddr(address.outward(str(here), self.seen_from)) for here in listening]

    # -- life --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[trio.Nursery]:
        """Listen, and look after everything, until the block ends."""
        run = self._run_id
        for protocol, serve in (
            (wire.chunk_protocol(run), self.server.chunks), (wire.have_protocol(run), self.server.have),
            (wire.head_protocol(run), self.server.head),
        ):
            self._host.set_stream_handler(protocol, _handler(serve))
        self._gossip.set_topic_validator(self._topic, self._judge, False)
        self._gossip.set_topic_validator(self._log_topic, self._judge_note, False)
        async with AsyncExitStack() as stack:
            address.require_free(self._limits.listen)
            await stack.enter_async_context(self._host.run([Multiaddr(self._limits.listen)]))
            for service in (self._gossip, self._router, self._table):
                await stack.enter_async_context(background_trio_service(service))
            await self._gossip.wait_until_ready()
            await self._gossip.subscribe(self._topic)
            if self._notes is not None:
                await self._gossip.subscribe(self._log_topic)
            nursery = await stack.enter_async_context(trio.open_nursery())
            self._nursery = nursery
            for task in (self._tend, self._look_up, self._pull):
                nursery.start_soon(task)
            try:
                yield nursery
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                    await self._host.close()

    async def drop(self, peer_id: str, error: PeerFault) -> None:
        """Deal with a peer no more."""
        self._book.drop(peer_id, error)
        logger.warning("peer dropped", extra={"peer": peer_id, "code": error.code, "detail": str(error)[:300]})
        self.client.forget(peer_id)
        # Not add_to_blacklist(): its own tidying races with that of a connection which ends, and takes the host down.
        self._gossip.blacklisted_peers.add(ID.from_string(peer_id))
        await self._hang_up(peer_id)

    async def _hang_up(self, peer_id: str) -> None:
        try:
            with trio.move_on_after(_CLOSE_S):
                await self._host.disconnect(ID.from_string(peer_id))
        except _TROUBLE as error:
            logger.info("a connection ended badly", extra={"peer": peer_id, "detail": _words(error)})

    async def _open(self, peer_id: str, protocol: str) -> Line:
        try:
            return Line(peer_id, await self._host.new_stream(ID.from_string(peer_id), [protocol]))
        except _TROUBLE as error:
            if "protocols not supported" in str(error.__cause__).lower():
                raise PeerFault(
                    wire.E_SWARM_WIRE, f"{peer_id} is of another run or release", expected=protocol, got=_cause(error)
                ) from None
            raise Transient(E_UNREACHABLE, f"no stream to {peer_id}", got=_cause(error)) from None

    # -- connections -------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """See who is connected, and dial who is not."""
        async with trio.open_nursery() as dials:
            dialling: set[str] = set()
            while True:
                await self._greet(str(peer_id) for peer_id in self._host.get_connected_peers())
                for peer in self._book.to_dial(self._limits.max_peers):
                    if peer.id not in dialling and len(dialling) < _MAX_DIALS:
                        dialling.add(peer.id)
                        dials.start_soon(self._dial, peer.id, list(peer.addresses), dialling)
                due = trio.current_time() + _TEND_S
                await trio.sleep_until(due)
                if trio.current_time() > due + _LATE_S:
                    self._book.we_are_slow()

    async def _greet(self, connected: Any) -> None:
        present = set(connected)
        for peer_id in self._book.see(present):
            if self._book.dropped(peer_id):
                await self._hang_up(peer_id)
            else:
                await self._table.add_peer(ID.from_string(peer_id))

    async def _dial(self, peer_id: str, addresses: Sequence[str], dialling: set[str]) -> None:
        try:
            with trio.fail_after(_DIAL_S):
                await self._host.connect(PeerInfo(ID.from_string(peer_id), [Multiaddr(text) for text in addresses]))
        except trio.TooSlowError:
            self._book.dial_failed(peer_id, f"no answer within {_DIAL_S:g} s")
        except _TROUBLE as error:
            self._book.dial_failed(peer_id, _cause(error))
        finally:
            dialling.discard(peer_id)

    async def _look_up(self) -> None:
        """Find peers near a point of the table, which moves, so that all are found in the end."""
        wait_s, turns = _LOOK_UP_S[0], 0
        while True:
            await trio.sleep(wait_s)
            target = hashlib.sha256(f"{self._book.own_id} {turns}".encode()).digest()
            try:
                with trio.move_on_after(_LOOK_UP_S[1]):
                    near = await self._table.peer_routing.find_closest_peers_network(target)
                    for peer_id in near:
                        self._book.found(str(peer_id), self._known(peer_id), "dht")
            except _TROUBLE as error:
                logger.info("the table was of no help", extra={"detail": _words(error)})
            wait_s, turns = _LOOK_UP_S[1], turns + 1

    def _known(self, peer_id: ID) -> list[str]:
        try:
            known = self._host.get_peerstore().addrs(peer_id)
        except BaseLibp2pError:
            return []
        return [text for found in known if address.dialable(text := str(found).partition("/p2p/")[0])]

    # -- heads -------------------------------------------------------------------------------------------

    async def tell(self, head: bytes) -> None:
        """Pass a head on."""
        await self._publish(self._topic, head)

    async def tell_note(self, note: bytes) -> None:
        """Pass a head of the run's log on."""
        await self._publish(self._log_topic, note)

    async def _publish(self, topic: str, data: bytes) -> None:
        try:
            await self._gossip.publish(topic, data)
        except _TROUBLE as error:
            logger.info("head not passed on", extra={"topic": topic, "detail": _words(error)})

    def _judge(self, forwarder: ID, message: Any) -> bool:
        """Gossip's validator: True lets the message travel on. What we tell was checked before."""
        return str(forwarder) == self._book.own_id or self.hear(str(forwarder), bytes(message.data))

    def hear(self, peer_id: str, data: bytes) -> bool:
        """A head from a peer; True when it is news. Who passes on what the learner never signed is dropped."""
        try:
            news = self._heads.hear(data, self._clock.now_ms())
        except PeerFault as error:
            if error.code not in _NOT_FORGED and self._nursery is not None:
                self._nursery.start_soon(self.drop, peer_id, error)
            logger.info("head refused", extra={"peer": peer_id, "code": error.code})
            return False
        if news:
            self._on_head(data)
        return news

    def _judge_note(self, forwarder: ID, message: Any) -> bool:
        """Gossip's validator of log heads. Who passes on what the coordinator never signed is dropped."""
        peer_id = str(forwarder)
        if self._notes is None or peer_id == self._book.own_id:
            return True
        try:
            return self._notes.hear(bytes(message.data))
        except PeerFault as error:
            if self._nursery is not None:
                self._nursery.start_soon(self.drop, peer_id, error)
            logger.info("log head refused", extra={"peer": peer_id, "code": error.code})
            return False

    async def _pull(self) -> None:
        """Ask some peers for the newest head: gossip may lose messages."""
        while True:
            await trio.sleep(_PULL_S)
            for peer in self._book.ready()[:_PULLED]:
                data = await self.client.head(peer)
                if data is not None and self.hear(peer.id, data):
                    await self.tell(data)


#: Refusals that an honest peer may earn: its clock is off, or the learner contradicts itself.
_NOT_FORGED: Final = frozenset({"E_EXPIRED", "E_CHECKPOINT_MIX"})


def _handler(serve: Callable[[Line], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    async def handle(stream: Any) -> None:
        line = Line(str(stream.muxed_conn.peer_id), stream)
        try:
            await serve(line)
        except Exception:  # the boundary of a task: one stream must not end the host
            logger.exception("a stream could not be served", extra={"peer": line.peer_id})
            await line.reset()

    return handle


async def _leave_it() -> None:
    """Nothing."""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _cause(error: BaseException) -> str:
    """The innermost reason of a failed dial."""
    while (inner := _first(error) or error.__cause__ or error.__context__) is not None:
        error = inner
    return _words(error)


def _first(error: BaseException) -> BaseException | None:
    """The first of several errors that are packed into one."""
    packed = error.exceptions if isinstance(error, BaseExceptionGroup) else error.args[0] if error.args else None
    found = packed[0] if isinstance(packed, (list, tuple)) and packed else None
    return found if isinstance(found, BaseException) else None
