from __future__ import annotations

import pytest

from protocol.errors import PeerFault
from protocol.swarm.bandwidth import Bandwidth
from protocol.swarm.peers import MAX_PEERS, Peer, PeerBook
from protocol.swarm.shelf import COMING_S, Shelf
from protocol.swarm.wire import Status
from tests.fakes.clock import FakeClock

ADDRESS = "/ip4/192.0.2.1/tcp/4101"
KEY = "5a" * 32


@pytest.fixture
def book(clock: FakeClock) -> PeerBook:
    return PeerBook("me", clock, seed=0)


def only(book: PeerBook) -> Peer:
    (peer,) = book.ready()
    return peer


def why(book: PeerBook, peer_id: str) -> str:
    return next(str(view["why"]) for view in book.view() if view["peer_id"] == peer_id)


def test_why_a_peer_is_not_connected_is_always_said(book: PeerBook, clock: FakeClock) -> None:
    book.found("a", [ADDRESS], "rendezvous", node_id="ab" * 32, name="node-a")
    assert why(book, "a") == "not dialled yet"
    book.dial_failed("a", "ConnectionRefusedError")
    assert why(book, "a").startswith("cannot be reached: ConnectionRefusedError; next try in")
    book.see(["a"])
    assert why(book, "a") == ""
    book.see([])
    assert why(book, "a") == "the connection ended"
    book.drop("a", PeerFault("E_OBJECT_HASH", "wrong bytes"))
    assert why(book, "a").startswith("dropped: E_OBJECT_HASH")


def test_dials_are_spaced_out_and_limited(book: PeerBook, clock: FakeClock) -> None:
    for name in "abc":
        book.found(name, [ADDRESS], "rendezvous")
    book.found("lost", [], "dht")
    assert len(book.to_dial(2)) == 2
    book.see(["a", "b"])
    assert book.to_dial(2) == []
    assert why(book, "c") == "enough others (2) are connected"
    assert why(book, "lost") == "no address known"
    waits = []
    for _ in range(12):
        book.dial_failed("c", "no")
        waits.append(next(float(v["why"].split()[-2]) for v in book.view() if v["peer_id"] == "c"))
        assert "c" not in [peer.id for peer in book.to_dial(8)]
        clock.advance(200)
    assert waits[0] <= 2
    assert 60 <= waits[-1] <= 180
    assert [peer.id for peer in book.to_dial(8)] == ["c"]


def test_we_are_not_our_own_peer_and_addresses_are_bounded(book: PeerBook) -> None:
    book.found("me", [ADDRESS], "dht")
    assert book.view() == []
    for port in range(20):
        book.found("a", [f"/ip4/192.0.2.1/tcp/{port + 1}"], "dht")
    (view,) = book.view()
    assert view["addresses"][0] == "/ip4/192.0.2.1/tcp/20"
    assert len(view["addresses"]) == 8


def test_the_book_is_bounded_and_keeps_whom_it_is_connected_to(book: PeerBook) -> None:
    book.see(["friend"])
    for i in range(MAX_PEERS + 50):
        book.found(f"peer-{i}", [ADDRESS], "dht")
    views = book.view()
    assert len(views) == MAX_PEERS
    assert views[0]["peer_id"] == "friend"


def test_slow_three_times_in_a_row_is_too_often(book: PeerBook, clock: FakeClock) -> None:
    book.see(["a"])
    peer = only(book)
    assert not book.fails(peer, slow=True)
    assert book.ready() == []
    clock.advance(60)
    assert not book.fails(only(book), slow=True)
    clock.advance(60)
    book.delivers(only(book), 1000, 0.1)
    assert not book.fails(only(book), slow=True)
    clock.advance(60)
    assert not book.fails(only(book), slow=True)
    clock.advance(60)
    assert book.fails(only(book), slow=True, why="no answer")
    assert book.dropped("a")
    assert why(book, "a").startswith("dropped: E_SOURCE_SLOW")
    clock.advance(600)
    assert book.ready() == []


def test_nobody_is_slow_while_we_are(book: PeerBook, clock: FakeClock) -> None:
    book.see(["a"])
    for _ in range(5):
        book.we_are_slow()
        assert not book.fails(only(book), slow=True)
        clock.advance(60)
    assert not book.dropped("a")


def test_the_least_busy_comes_first_then_the_fastest(book: PeerBook) -> None:
    book.see(["slow", "fast", "busy"])
    peers = {peer.id: peer for peer in book.ready()}
    for name, rate in (("slow", 10), ("fast", 1000), ("busy", 10_000)):
        book.delivers(peers[name], rate, 1.0)
    peers["busy"].in_flight = 1
    assert [peer.id for peer in book.ready()] == ["fast", "slow", "busy"]


def test_a_limit_lets_a_short_burst_through_and_then_holds_its_rate(clock: FakeClock) -> None:
    line = Bandwidth(1000.0, clock)
    clock.advance(10)
    assert line.grant(250) == 0.0
    assert line.grant(1000) == 0.0
    assert line.queue_s() == pytest.approx(1.0)
    assert line.grant(500) == pytest.approx(1.0)
    clock.advance(1.5)
    assert line.queue_s() == 0.0
    assert Bandwidth(None, clock).grant(10**12) == 0.0
    assert line.total == 1750


class Chunks:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def has(self, sha256: str) -> bool:
        return sha256 in self.held

    def size(self, sha256: str) -> int:
        return len(self.held[sha256])

    def read(self, sha256: str, start: int, end: int) -> bytes:
        return self.held[sha256][start:end]


def test_a_chunk_is_said_to_be_coming_only_while_something_comes(clock: FakeClock) -> None:
    chunks = Chunks()
    shelf = Shelf(chunks, clock)
    rang: list[bool] = []
    shelf.on_change = lambda: rang.append(True)
    assert shelf.status(KEY) is Status.ABSENT
    shelf.expect([KEY, "00" * 32])
    assert shelf.status(KEY) is Status.COMING
    clock.advance(COMING_S)
    assert shelf.status(KEY) is Status.ABSENT
    shelf.settle(["00" * 32])
    assert shelf.status(KEY) is Status.COMING
    chunks.held[KEY] = b"0123456789"
    shelf.settle([KEY])
    assert shelf.status(KEY) is Status.HERE
    assert rang == [True, True]
    assert shelf.read(KEY, 4, 100) == (b"456789", 10)
    assert shelf.read(KEY, 10, 1) is None
