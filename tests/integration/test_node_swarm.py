"""Nodes in the swarm: they meet through the coordinator, hear of versions from each other and share their chunks."""

from __future__ import annotations

import hashlib
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libp2p", reason="the swarm needs the extra 'swarm' (libp2p, trio)")

import gc

from node.config import NodeConfig
from node.membership import Membership
from node.weights import Weights
from protocol.api import PeerRecord, PeersReply
from protocol.clock import SystemClock
from protocol.identity import Identity
from protocol.log_head import LogHead, origin_of
from protocol.store import DirectoryStore
from protocol.swarm.announce import PeerAnnounce
from protocol.swarm.swarm import Swarm
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID as WORLD_RUN
from tests.fakes.coordinator import World
from tests.fakes.swarm import limits
from tests.fakes.waiting import until
from tests.unit.node.office import COORDINATOR, FakeCoordinator, pool_of, state_of

pytestmark = [
    pytest.mark.timeout(400),
    # The library leaves some of its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Meeting:
    """A meeting point in memory."""

    def __init__(self) -> None:
        self.keys: dict[str, Identity] = {}
        self.said: dict[str, PeerAnnounce] = {}

    def announce(self, message: PeerAnnounce) -> PeersReply:
        self.said[message.node_id] = message
        peers = [
            PeerRecord(
                node_id=node_id, public_key=self.keys[node_id].public_key.hex(), name=f"node-{node_id[:4]}",
                addresses=list(other.addresses), age_ms=0,
            )
            for node_id, other in self.said.items() if node_id != message.node_id
        ]
        return PeersReply(peers=peers, seen_from="127.0.0.1", announce_again_ms=60_000)


class Node:
    """All of a node that has to do with weights."""

    def __init__(self, path: Path, name: str, office: FakeCoordinator, meeting: Meeting):
        identity = Identity(hashlib.sha256(name.encode()).digest())
        meeting.keys[identity.id] = identity
        client: Any = office
        office.announce = meeting.announce  # type: ignore[attr-defined]
        config = NodeConfig(home=path / name, swarm=True, swarm_listen="/ip4/127.0.0.1/tcp/0")
        self.pool, self.woken = pool_of(office, path / name), threading.Event()
        self.membership = Membership(config, office.run, identity, client, self.pool, SystemClock())
        self.membership.on_news = self.woken.set
        self.weights = Weights(
            self.membership.published(client), self.membership.chunks, office.run, office.layout, path / name
        )
        self.membership.start()

    def poll(self) -> bool:
        return self.weights.poll(SystemClock().now_ms())

    def from_the_store(self) -> int:
        return sum(score.delivered for score in self.pool.scores())


def test_nodes_meet_through_a_real_coordinator(tmp_path: Path) -> None:
    world = World(tmp_path / "run", FakeClock(SystemClock().now_ms()))
    world.publish()
    swarms = []
    for name in ("ada", "bob"):
        node = world.node(name).join()
        swarms.append(Swarm(
            node.key, WORLD_RUN, "00" * 32, limits(), DirectoryStore(tmp_path / name), SystemClock(),
            announce=node.client.announce,
        ))
    try:
        for swarm in swarms:
            swarm.start(wait=True)
        for swarm, other in (swarms, reversed(swarms)):
            until(lambda swarm=swarm: [peer["connected"] for peer in swarm.book.view()] == [True])
            until(lambda swarm=swarm: swarm.book.view()[0]["node_id"] is not None)
            (peer,) = swarm.book.view()
            assert peer["peer_id"] == other.book.own_id
            assert "rendezvous" in peer["found_by"]
    finally:
        for swarm in swarms:
            swarm.stop()
        world.close()
        gc.collect()


def test_a_version_goes_from_the_store_to_one_node_and_from_there_to_the_next(tmp_path: Path) -> None:
    office, meeting = FakeCoordinator(), Meeting()
    office.publish(state_of(0))
    one, two = (Node(tmp_path, name, office, meeting) for name in ("one", "two"))
    try:
        until(lambda: one.membership.connected == two.membership.connected == 1)
        until(lambda: [bool(peer["name"]) for peer in two.membership.view()["peers"]] == [True])
        assert one.poll()
        assert two.poll()
        for version in (1, 2, 3):
            office.publish(state_of(version))
            two.woken.clear()

            def heard() -> bool:
                one.poll()
                return two.woken.wait(0.2)

            until(heard)
            assert two.poll()
        assert one.weights.newest() == two.weights.newest() == 3
        whole = sum(ref.size_bytes for v in range(4) for ref in (office.manifest(v).anchor or office.manifest(v).diff))
        assert one.from_the_store() + two.from_the_store() <= whole
        with one.weights.state(3) as mine, two.weights.state(3) as theirs:
            assert (mine["w"] == theirs["w"]).all()
    finally:
        one.membership.stop()
        two.membership.stop()
        gc.collect()
    assert two.membership.view()["running"] is False


def test_nodes_tell_each_other_which_log_they_were_shown(tmp_path: Path) -> None:
    office, meeting = FakeCoordinator(), Meeting()
    office.publish(state_of(0))
    one, two = (Node(tmp_path, name, office, meeting) for name in ("one", "two"))
    heads = (LogHead(origin_of(office.run.run_id), size, bytes(32)).sign(COORDINATOR) for size in itertools.count(1))
    said: list[str] = []
    heard: list[str] = []

    def arrived() -> bool:
        said.append(next(heads))
        one.membership.tell_note(said[-1])
        heard.extend(note for note, _ in two.membership.heard.take())
        return bool(heard)

    try:
        until(lambda: one.membership.connected == two.membership.connected == 1)
        until(arrived)
        assert set(heard) <= set(said)
        assert one.membership.heard.take() == []
    finally:
        one.membership.stop()
        two.membership.stop()
        gc.collect()
