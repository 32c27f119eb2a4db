"""Slow, silent and greedy clients on real sockets, and whether the others still get through."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.messages import UploadRequest
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID, FakeNode, World
from tests.fakes.served import Address, begin, connect, is_closed, served, status_of
from tests.fakes.waiting import until

Serve = Callable[..., tuple[World, Address]]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(tmp_path: Path, stack: ExitStack) -> Serve:
    def serve(look_s: float = 30.0, **config: Any) -> tuple[World, Address]:
        world = World(tmp_path / "run", FakeClock(), config=config, batch={"groups_per_batch": 20})
        stack.callback(world.close)
        world.publish()
        return world, stack.enter_context(served(world, look_s))

    return serve


def grant(world: World, node: FakeNode, data: bytes) -> str:
    """Where a node puts an object."""
    request = UploadRequest(
        run_id=RUN_ID, node_id=node.key.id, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data),
        issued_at_ms=world.clock.now_ms(),
    )
    return str(world.http.post("/v1/uploads", content=request.sign(node.key).to_bytes()).json()["url"])


def worker(world: World, name: str) -> FakeNode:
    node = world.node(name).join()
    assert len(node.leases(4)) == 4  # as many objects it may send
    return node


def silent_upload(stack: ExitStack, world: World, server: Address, node: FakeNode, host: str) -> socket.socket:
    """An upload of which nothing comes but its head."""
    data = os.urandom(1000)
    connection = stack.enter_context(connect(server, host))
    connection.sendall(begin("PUT", grant(world, node, data), len(data)))
    return connection


def upload(
    world: World, server: Address, node: FakeNode, host: str, data: bytes, pace: float | None = None
) -> int | None:
    """The status of a whole upload, at a pace in bytes per second."""
    with connect(server, host) as connection:
        connection.sendall(begin("PUT", grant(world, node, data), len(data)))
        step = len(data) if pace is None else max(1, int(pace / 20))
        try:
            for start in range(0, len(data), step):
                connection.sendall(data[start : start + step])
                time.sleep(0 if pace is None else 0.05)
        except ConnectionError:
            return None
        return status_of(connection)


def test_silent_uploads_keep_nobody_out(serve: Serve, stack: ExitStack) -> None:
    world, server = serve(max_uploads=4, max_uploads_per_node=2)
    one, two, honest = (worker(world, name) for name in ("one", "two", "honest"))
    silent = [silent_upload(stack, world, server, node, "127.0.0.2") for node in (one, one, two, two)]
    until(lambda: world.coordinator.uploads.places.held == 4)
    assert upload(world, server, one, "127.0.0.9", b"a third of one node") == 429
    assert upload(world, server, honest, "127.0.0.3", b"another address") == 200
    silent.append(silent_upload(stack, world, server, one, "127.0.0.2"))  # the place that was given up meanwhile
    until(lambda: world.coordinator.uploads.places.held == 4)
    assert upload(world, server, honest, "127.0.0.2", b"another node, same address") == 200


def test_a_place_is_for_whoever_may_upload(serve: Serve, stack: ExitStack) -> None:
    """Forged addresses hold no place; one address holds one, however many connections use it."""
    world, server = serve(max_uploads=2, max_uploads_per_node=2)
    node, other = worker(world, "node"), worker(world, "other")
    url = grant(world, node, b"data")
    for change in (("sig=", "sig=00"), (f"node={node.key.id}", f"node={other.key.id}"), ("size=4", "size=5")):
        with connect(server) as connection:
            connection.sendall(begin("PUT", url.replace(*change), 4))
            assert status_of(connection) == 403
    same = [stack.enter_context(connect(server)) for _ in range(5)]
    for connection in same:
        connection.sendall(begin("PUT", url, 4))
    until(lambda: len(select.select(same, [], [], 0)[0]) == 4)  # all but the one that holds the place are answered
    assert upload(world, server, other, "127.0.0.2", b"there is room") == 200
    assert upload(world, server, node, "127.0.0.2", b"data") == 200


def test_an_upload_has_to_keep_a_pace(serve: Serve, stack: ExitStack) -> None:
    """An honest slow line comes through however long it takes; a silent or a dripping one does not."""
    world, server = serve(body_timeout_s=1.5, upload_bytes_per_s=5_000, head_timeout_s=1.5)
    node, data = worker(world, "node"), os.urandom(90_000)
    assert status_of(silent_upload(stack, world, server, node, "127.0.0.2")) == 503
    assert upload(world, server, node, "127.0.0.2", data, pace=30_000) == 200  # 3 s: longer than a silent one is given
    assert upload(world, server, node, "127.0.0.2", os.urandom(90_000), pace=1_000) in (503, None)


def test_what_is_coming_is_not_held_in_memory(serve: Serve, stack: ExitStack) -> None:
    world, server = serve()
    node, data = worker(world, "node"), os.urandom(3 * 2**20)
    connection = stack.enter_context(connect(server))
    connection.sendall(begin("PUT", grant(world, node, data), len(data)) + data[:-1])
    deadline = time.monotonic() + 20
    while not any(str(world.directory) in name for name in open_files()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(f"{world.directory}/" in name and "(deleted)" in name for name in open_files())
    connection.sendall(data[-1:])
    assert status_of(connection) == 200
    assert world.store.get(hashlib.sha256(data).hexdigest()) == data


def test_what_strangers_say_in_the_learners_place_is_not_held_in_memory(serve: Serve, stack: ExitStack) -> None:
    world, server = serve()
    connection = stack.enter_context(connect(server))
    connection.sendall(begin("POST", "/v1/verdicts", 2**21) + bytes(2**20))
    deadline = time.monotonic() + 20
    while not any(str(world.directory) in name for name in open_files()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(f"{world.directory}/" in name and "(deleted)" in name for name in open_files())
    connection.sendall(bytes(2**20))
    assert status_of(connection) == 422


def open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if ".db" not in name and ".lock" not in name:
            found.append(name)
    return found


# -- downloads ------------------------------------------------------------------------------------------------


def test_slow_readers_hold_no_objects(serve: Serve, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    world, server = serve()
    data = os.urandom(12 * 2**20)
    sha256, read, handed_out = world.store.put(data), world.store.read, []

    def counted(name: str, start: int, end: int) -> bytes:
        part = read(name, start, end)
        handed_out.append(len(part))
        return part

    assert world.coordinator.shelf.size(sha256) == len(data)
    monkeypatch.setattr(world.store, "read", counted)
    for _ in range(8):
        stack.enter_context(connect(server, buffer_bytes=4096)).sendall(begin("GET", f"/v1/objects/{sha256}"))
    until(lambda: len(handed_out) >= 8)
    time.sleep(1.5)  # whatever more it would hand out
    assert max(handed_out) <= 2**20
    assert sum(handed_out) < 8 * len(data) / 2  # what the kernel takes, and a piece for each
    url = f"http://{server[0]}:{server[1]}/v1/objects/{sha256}"
    assert httpx.get(url, timeout=20).content == data
    part = httpx.get(url, headers={"range": f"bytes=1000-{5 * 2**20}"}, timeout=20)
    assert (part.status_code, part.content) == (206, data[1000 : 5 * 2**20 + 1])
    assert part.headers["content-range"] == f"bytes 1000-{5 * 2**20}/{len(data)}"


def test_a_reader_that_stops_is_cut_off_and_one_that_is_slow_is_not(serve: Serve, stack: ExitStack) -> None:
    world, server = serve(look_s=2.0, download_bytes_per_s=20_000)
    data = os.urandom(8 * 2**20)
    url = begin("GET", f"/v1/objects/{world.store.put(data)}")
    stopped, slow = (stack.enter_context(connect(server, buffer_bytes=65_536)) for _ in range(2))
    for connection in (stopped, slow):
        connection.sendall(url)
    came = 0
    while came < len(data):  # about 2 MiB per second, with pauses: the kernel takes more in lumps of up to 1 MiB
        part = slow.recv(65_536)
        assert part
        came += len(part)
        time.sleep(0.03)
    taken = 0
    with suppress(ConnectionError):
        while part := stopped.recv(65_536):
            taken += len(part)
    assert taken < len(data)  # it ended short


def test_a_cut_object_is_noticed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    world, server = serve()
    data = os.urandom(2**20)
    sha256 = world.store.put(data)
    assert world.coordinator.shelf.size(sha256) == len(data)
    read = world.store.read
    monkeypatch.setattr(world.store, "read", lambda name, start, end: read(name, start, min(end, 2**19)))
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://{server[0]}:{server[1]}/v1/objects/{sha256}", timeout=20)


def test_evidence_is_sent_from_disk(serve: Serve) -> None:
    world, server = serve()
    [reply] = world.node().join().work(1)
    world.verifier.judge("fail", "E_REPLAY")
    [row] = world.http.get(f"/v1/nodes/{world.node().key.id}").json()["receipts"]
    assert row["sha256"] == reply.receipt.digest
    sent = httpx.get(f"http://{server[0]}:{server[1]}/v1/evidence/{row['receipt_id']}", timeout=20)
    assert sent.content == world.verifier.client.evidence(row["receipt_id"])
    assert f"{row['receipt_id']}.evidence" in sent.headers["content-disposition"]


# -- connections ----------------------------------------------------------------------------------------------


def answers(server: Address, host: str) -> bool:
    with connect(server, host) as connection:
        try:
            connection.sendall(begin("GET", "/healthz"))
        except ConnectionError:
            return False
        return status_of(connection) == 200


def test_silent_connections_keep_nobody_out(serve: Serve, stack: ExitStack) -> None:
    _, server = serve(max_connections=8, max_connections_per_address=6)
    silent = [stack.enter_context(connect(server, "127.0.0.2")) for _ in range(6)]
    assert not answers(server, "127.0.0.2")  # they come in in this order
    silent += [stack.enter_context(connect(server, "127.0.0.3")) for _ in range(2)]
    assert answers(server, "127.0.0.4")  # of those who are silent, the one that has most makes room
    assert is_closed(silent[0])


def test_a_proxy_is_not_limited_as_one_address(serve: Serve, stack: ExitStack) -> None:
    _, server = serve(max_connections_per_address=2)
    for _ in range(4):
        connection = stack.enter_context(connect(server, "127.0.0.1"))
        connection.sendall(begin("GET", "/healthz"))
        assert status_of(connection) == 200


def test_a_request_has_to_begin_in_time(serve: Serve, stack: ExitStack) -> None:
    _, server = serve(head_timeout_s=2.0)
    silent, begun, between = (stack.enter_context(connect(server)) for _ in range(3))
    begun.sendall(b"GET /healthz HT")
    between.sendall(begin("GET", "/healthz"))
    assert status_of(between) == 200
    between.sendall(b"G")
    assert all(map(is_closed, (silent, begun, between)))


def test_the_rest_of_a_body_that_was_refused_is_not_read_for_ever(serve: Serve, stack: ExitStack) -> None:
    _, server = serve(head_timeout_s=0.5)
    connection = stack.enter_context(connect(server))
    connection.sendall(begin("PUT", f"/v1/uploads/{'00' * 32}?size=1&expires=1&node=x&sig=x", 10**9))
    assert status_of(connection) == 403
    until(lambda: is_cut(connection))


def is_cut(connection: socket.socket) -> bool:
    """Whether the other side takes no more of what is sent."""
    try:
        connection.sendall(bytes(1000))
    except ConnectionError:
        return True
    return False
