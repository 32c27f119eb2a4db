"""Objects that nothing names: how many, for how long, and that nothing that is named is ever deleted."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from coordinator.loose import KEPT_MS, Loose
from protocol.errors import PeerFault, Transient
from protocol.messages import UploadRequest
from protocol.store import DirectoryStore
from tests.fakes.coordinator import RUN_ID, FakeNode, World

HOUR_MS = 3_600_000


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def grant(world: World, node: FakeNode, data: bytes) -> str:
    request = UploadRequest(
        run_id=RUN_ID, node_id=node.key.id, object_sha256=sha(data), object_bytes=len(data),
        issued_at_ms=world.clock.now_ms(),
    )
    return str(world.http.post("/v1/uploads", content=request.sign(node.key).to_bytes()).json()["url"])


def test_a_node_fills_no_more_of_the_store_than_its_leases_are_worth(world: World) -> None:
    node = world.node().join()
    node.leases(2)
    for number in range(6):
        node.upload(b"rubbish %d" % number)
    assert [world.store.has(sha(b"rubbish %d" % number)) for number in range(6)] == [False] * 4 + [True] * 2
    world.clock.advance(HOUR_MS / 1000 + 1)
    world.coordinator.sweep()
    assert not any(world.store.has(sha(b"rubbish %d" % number)) for number in range(6))


def test_what_is_committed_to_stays(world: World) -> None:
    """However much is uploaded afterwards, and whoever sends it again."""
    node = world.node().join()
    (lease, digest), *_ = node.leases(2)
    url = grant(world, node, node.bundle(lease))
    node.finish(lease, digest)
    assert world.http.put(url, content=node.bundle(lease)).json() == {"duplicate": True}
    for number in range(4):
        node.upload(b"rubbish %d" % number)
    world.clock.advance(HOUR_MS / 1000 + 1)
    world.coordinator.sweep()
    assert world.store.has(sha(node.bundle(lease)))
    job = world.verifier.judge()
    assert job is not None


def test_a_commitment_that_is_refused_saves_nothing(world: World) -> None:
    node = world.node().join()
    [(lease, digest)] = node.leases(1)
    node.upload(node.bundle(lease))
    with pytest.raises(PeerFault):
        node.client.submit(node.commitment(lease, digest, tokens=1))
    node.upload(b"something else")
    assert not world.store.has(sha(node.bundle(lease)))
    assert node.finish(lease, digest).duplicate is False  # the honest way is as open as before


def test_an_address_that_was_given_up_for_others_is_asked_for_again(world: World) -> None:
    node = world.node().join()
    node.leases(1)
    old, new = grant(world, node, b"old"), grant(world, node, b"new")
    answer = world.http.put(old, content=b"old")
    assert (answer.status_code, answer.json()["code"]) == (429, "E_RATE_LIMITED")
    assert world.http.put(new, content=b"new").status_code == 200
    assert world.http.put(grant(world, node, b"old"), content=b"old").status_code == 200


def test_an_address_outlives_a_restart(world: World) -> None:
    node = world.node().join()
    node.leases(1)
    url = grant(world, node, b"data")
    world.clock.advance(1)
    world.restart()
    assert world.http.put(url, content=b"data").status_code == 200
    assert world.store.has(sha(b"data"))


def test_an_object_that_two_count_on_goes_with_the_last(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    loose, data = Loose(store, 1000), store.put(b"data")
    loose.grant("one", data, 1, 0)
    loose.share("two", data, 0)
    loose.share("two", "another", 0)  # not loose: somebody's for good
    loose.grant("one", "x", 1, 1)
    assert store.has(data)
    loose.grant("two", "y", 1, 1)
    assert not store.has(data)


def test_an_upload_that_ends_after_it_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    loose, late, later = Loose(store, 1000), sha(b"late"), sha(b"later")
    for number, name in enumerate((late, later, "x")):
        loose.grant("one", name, 1, number)
    assert not loose.sending("one", late)
    store.put(b"late")
    loose.sent("one", late, 2)
    assert not store.has(late)
    store.put(b"later")  # straight to the store, by a presigned address: nobody says so
    loose.sweep(1003)
    assert not store.has(later)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_was_named_is_ever_deleted(tmp_path: Path, seed: int) -> None:
    """Whatever nodes ask for, send and commit to, in any order and with failures in between."""
    rng, store, now = random.Random(seed), DirectoryStore(tmp_path), 0
    loose, named = Loose(store, 50_000), set[str]()
    contents = {sha(b"%d" % i): b"%d" % i for i in range(5)}
    for _ in range(600):
        now += rng.choice((1, 100, 10_000))
        node, name = rng.choice("ab"), rng.choice(list(contents))
        act = rng.choice(("grant", "send", "name", "fail", "nested", "sweep"))
        if act == "grant":
            loose.share(node, name, now)
            if not store.has(name):
                loose.grant(node, name, rng.choice((1, 2)), now)
        elif act == "send" and loose.sending(node, name):
            store.put(contents[name])
            loose.sent(node, name, now)
        elif act == "sweep":
            loose.sweep(now)
        elif act in ("name", "fail", "nested"):
            try:
                with loose.naming([name], now):
                    if act == "nested" and store.has(name):
                        with loose.naming([name], now):
                            named.add(name)
                    if act != "name" or not store.has(name):
                        raise Transient("E_STORE", "refused")
                    named.add(name)
            except Transient:
                pass
        assert all(map(store.has, named))
    loose.sweep(now + KEPT_MS + 60_000)
    assert {name for name in contents if store.has(name)} == named
