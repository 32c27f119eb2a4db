"""Real libp2p hosts on loopback: exchange, rogues; life without the swarm, without the store."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libp2p", reason="the swarm needs the extra 'swarm' (libp2p, trio)")

import trio

from protocol.errors import LocalFault, Transient
from protocol.messages import ChunkRef
from protocol.swarm import ask, host, serve, wire
from protocol.swarm.line import Line
from protocol.swarm.wire import Answer, Status
from tests.fakes.swarm import CountingSource, Member, Rogue
from tests.fakes.waiting import until

pytestmark = [
    pytest.mark.timeout(400),
    # The library leaves some of its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Close = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that honest peers keep on a busy machine; a test that needs one to pass sets it shorter."""
    monkeypatch.setattr(ask, "CHUNK_S", 60.0)
    monkeypatch.setattr(ask, "STALL_S", 60.0)
    monkeypatch.setattr(ask, "OPEN_S", 60.0)
    monkeypatch.setattr(ask, "STAGGER_MS", 500)
    monkeypatch.setattr(ask, "PATIENCE_S", 60.0)


def blob(seed: int, size: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(size)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def refs(blobs: list[bytes]) -> list[ChunkRef]:
    return [ChunkRef(sha256=sha(b), size_bytes=len(b), max_output_bytes=1) for b in blobs]


# -- exchange --------------------------------------------------------------------------------------------


def test_a_chunk_of_several_pieces_comes_from_a_peer_and_is_accounted_for(tmp_path: Path, closing: Close) -> None:
    one, two = closing(Member(tmp_path, "one")), closing(Member(tmp_path, "two"))
    data = blob(1, 2 * wire.MAX_PIECE_BYTES + 17)
    key = one.keep(data)
    two.meet(one)
    assert two.chunks.fetch(key, len(data)) == data
    assert two.cache.get(key) == data
    assert two.source.asked == []
    assert two.peer(one)["bytes_fetched"] == len(data)
    until(lambda: one.peer(two)["bytes_served"] == len(data))  # counted when the last piece has left
    assert two.peer(one)["why"] == ""


def test_each_chunk_leaves_the_store_once_however_many_nodes_want_it(
    tmp_path: Path, closing: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "STAGGER_MS", wire.MAX_WAIT_MS)  # whoever is first begins in time
    blobs = [blob(i, 50_000) for i in range(12)]
    objects = {sha(b): b for b in blobs}
    members = [closing(Member(tmp_path, f"node-{i}", CountingSource(objects))) for i in range(3)]
    members[0].meet(*members[1:])
    members[1].meet(members[2])

    async def all_at_once() -> None:
        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(trio.to_thread.run_sync, member.chunks.fetch_all, refs(blobs))

    trio.run(all_at_once)
    for member in members:
        assert all(member.cache.get(key) == data for key, data in objects.items())
    asked = [key for member in members for key in member.source.asked]
    assert sorted(asked) == sorted(objects)
    assert all(member.source.asked for member in members)


def test_a_latecomer_takes_nothing_from_the_store(tmp_path: Path, closing: Close) -> None:
    blobs = [blob(i, 20_000) for i in range(6)]
    one = closing(Member(tmp_path, "one"))
    late = closing(Member(tmp_path, "late", CountingSource({sha(b): b for b in blobs})))
    for data in blobs:
        one.keep(data)
    late.meet(one)
    late.chunks.fetch_all(refs(blobs))
    assert late.source.asked == []
    assert all(late.cache.get(sha(data)) == data for data in blobs)


# -- without the one or the other ------------------------------------------------------------------------


def test_with_the_store_blocked_peers_are_enough(tmp_path: Path, closing: Close) -> None:
    data = blob(2)
    one = closing(Member(tmp_path, "one", CountingSource({sha(data): data})))
    two = closing(Member(tmp_path, "two", CountingSource({}, blocked=True)))
    two.meet(one)
    one.chunks.fetch_all(refs([data]))
    two.chunks.fetch_all(refs([data]))
    assert two.cache.get(sha(data)) == data


def test_with_the_swarm_blocked_the_store_is_enough_and_the_status_says_why(tmp_path: Path, closing: Close) -> None:
    data = blob(3)
    one = closing(Member(tmp_path, "one", CountingSource({sha(data): data})))
    with_nobody = Rogue("gone")
    with_nobody.close()
    one.swarm.book.found(with_nobody.id, [with_nobody.address], "test")
    until(lambda: re.search("cannot be reached.*refused", one.peer(with_nobody)["why"].lower()))
    one.chunks.fetch_all(refs([data]))
    assert one.source.asked == [sha(data)]
    assert not one.peer(with_nobody)["connected"]


def test_a_host_that_cannot_listen_leaves_the_store(tmp_path: Path, closing: Close) -> None:
    one = closing(Member(tmp_path, "one"))
    with pytest.raises(LocalFault) as caught:
        Member(tmp_path, "two", listen=one.address)
    assert caught.value.code == "E_SWARM"


# -- rogues ----------------------------------------------------------------------------------------------


async def says_it_has_all(line: Line) -> None:
    count = wire.decode_count(await line.read(4), wire.MAX_KEYS)
    await line.read(count * wire.KEY_BYTES)
    await line.write(bytes(count))
    await line.close()


async def wrong_bytes(line: Line) -> None:
    while data := await line.read(wire.WISH_BYTES):
        wish = wire.Wish.decode(data)
        await line.write(Answer(Status.HERE, 300_000, wish.length).encode() + bytes(wish.length))


async def another_length(line: Line) -> None:
    wish = wire.Wish.decode(await line.read(wire.WISH_BYTES))
    await line.write(Answer(Status.HERE, 300_000, wish.length + 1).encode() + bytes(wish.length + 1))


async def another_size(line: Line) -> None:
    wish = wire.Wish.decode(await line.read(wire.WISH_BYTES))
    await line.write(Answer(Status.HERE, 300_001, wish.length).encode() + bytes(wish.length))


async def no_such_status(line: Line) -> None:
    await line.read(wire.WISH_BYTES)
    await line.write(b"\x09" + bytes(12))


async def never_ends(line: Line) -> None:
    await line.read(wire.WISH_BYTES)
    while True:
        await line.write(b"\xff" * 65_536)


async def stalls(line: Line) -> None:
    wish = wire.Wish.decode(await line.read(wire.WISH_BYTES))
    await line.write(Answer(Status.HERE, wish.length, wish.length).encode() + b"a")
    await trio.sleep(60)


async def is_silent(line: Line) -> None:
    await trio.sleep(60)


async def always_coming(line: Line) -> None:
    while await line.read(wire.WISH_BYTES):
        await trio.sleep(0.2)
        await line.write(Answer(Status.COMING).encode())


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (wrong_bytes, "E_OBJECT_HASH"), (another_length, "E_SWARM_WIRE"), (another_size, "E_SWARM_WIRE"),
        (no_such_status, "E_SWARM_WIRE"), (never_ends, "E_SWARM_WIRE"),
    ],
)
def test_a_peer_that_breaks_a_rule_is_named_dropped_and_done_without(
    tmp_path: Path, closing: Close, how: Callable[[Line], Any], code: str
) -> None:
    data = blob(5)
    rogue = closing(Rogue("rogue", chunks=how, have=says_it_has_all))
    one = closing(Member(tmp_path, "one", CountingSource({sha(data): data})))
    one.meet(rogue)
    assert one.chunks.fetch(sha(data), len(data)) == data
    assert one.source.asked == [sha(data)]
    until(lambda: not one.peer(rogue)["connected"])
    assert one.peer(rogue)["dropped"].startswith(code)
    assert one.peer(rogue)["why"].startswith(f"dropped: {code}")
    assert one.swarm.view()["running"]


@pytest.mark.parametrize("how", [stalls, is_silent])
def test_a_peer_that_is_slow_again_and_again_is_dropped(
    tmp_path: Path, closing: Close, monkeypatch: pytest.MonkeyPatch, how: Callable[[Line], Any]
) -> None:
    monkeypatch.setattr(ask, "CHUNK_S", 0.2)
    monkeypatch.setattr(host, "_LATE_S", math.inf)  # a peer is blamed only while we keep up: say that we do
    blobs = [blob(i, 1000) for i in range(3)]
    rogue = closing(Rogue("rogue", chunks=how, have=says_it_has_all))
    one = closing(Member(tmp_path, "one", CountingSource({sha(b): b for b in blobs})))
    one.meet(rogue)
    for data in blobs:
        assert one.chunks.fetch(sha(data), len(data)) == data
        if one.peer(rogue)["dropped"]:
            break
        until(one.swarm.book.ready)  # it has rested
    assert one.peer(rogue)["dropped"].startswith("E_SOURCE_SLOW")


def test_promises_that_are_not_kept_are_believed_ever_less(
    tmp_path: Path, closing: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "PATIENCE_S", 0.5)
    rogue = closing(Rogue("rogue", chunks=always_coming))
    one = closing(Member(tmp_path, "one", CountingSource({})))
    one.meet(rogue)
    blobs = [blob(i, 1000) for i in range(40)]
    theirs = [data for data in blobs if wire.turn(sha(data), [one.id, rogue.id])[0] == rogue.id]
    one.source.objects = {sha(data): data for data in theirs}
    for kept, data in enumerate(theirs[:3]):
        assert one.peer(rogue)["broken_promises"] == kept
        assert one.chunks.fetch(sha(data), len(data)) == data
    assert one.source.asked == [sha(data) for data in theirs[:3]]
    assert one.peer(rogue)["dropped"] is None


@pytest.mark.parametrize(
    ("protocol", "question"),
    [
        (wire.chunk_protocol, bytes(40) + (wire.MAX_PIECE_BYTES + 1).to_bytes(4, "big") + bytes(4)),
        (wire.have_protocol, (wire.MAX_KEYS + 1).to_bytes(4, "big")),
    ],
    ids=["a piece too large", "too many keys"],
)
def test_who_asks_out_of_bounds_is_dropped(
    tmp_path: Path, closing: Close, protocol: Callable[[str], str], question: bytes
) -> None:
    one = closing(Member(tmp_path, "one"))
    rogue = closing(Rogue("rogue"))
    one.meet(rogue)

    async def act(its: host.Host) -> None:
        line = await its._open(one.id, protocol("ab" * 16))
        await line.write(question)
        await line.close()

    rogue.do(act)
    until(lambda: one.peer(rogue)["dropped"])
    assert one.peer(rogue)["dropped"].startswith("E_SWARM_WIRE")


def test_a_host_of_another_run_is_left_alone(tmp_path: Path, closing: Close) -> None:
    data = blob(6)
    one = closing(Member(tmp_path, "one", CountingSource({sha(data): data})))
    other = closing(Rogue("other", run_id="cd" * 16))
    one.meet(other)
    assert one.chunks.fetch(sha(data), len(data)) == data
    until(lambda: one.peer(other)["dropped"])
    assert one.peer(other)["dropped"].startswith("E_SWARM_WIRE")
    assert "another run" in one.peer(other)["dropped"]


def test_one_peer_holds_only_so_many_streams(tmp_path: Path, closing: Close) -> None:
    one, rogue = closing(Member(tmp_path, "one")), closing(Rogue("rogue"))
    one.meet(rogue)

    lines: list[Line] = []

    async def one_more(its: host.Host) -> None:
        line = await its._open(one.id, wire.chunk_protocol("ab" * 16))
        await line.write(wire.Wish("00" * 32, 0, 1, wire.MAX_WAIT_MS).encode())
        lines.append(line)

    async def one_too_many(its: host.Host) -> bytes:
        try:
            line = await its._open(one.id, wire.chunk_protocol("ab" * 16))
            with trio.fail_after(60):
                return await line.read(1)
        except Transient:
            return b""

    for _ in range(serve.MAX_STREAMS_PER_PEER):
        rogue.do(one_more)
    assert rogue.do(one_too_many) == b""
    assert one.peer(rogue)["dropped"] is None
    assert one.swarm.view()["running"]
    assert one.peer(rogue)["connected"]
