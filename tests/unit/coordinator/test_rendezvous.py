from __future__ import annotations

from typing import Any

import pytest

from coordinator.rendezvous import PEER_TTL_MS
from protocol.api import PeersReply
from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.swarm.announce import PeerAnnounce
from tests.fakes.coordinator import RUN_ID, FakeNode, World

HERE = "/ip4/192.0.2.7/tcp/4101"


def message(node: FakeNode, *addresses: str, max_peers: int = 16, **changes: Any) -> PeerAnnounce:
    fields = {
        "run_id": RUN_ID, "node_id": node.key.id, "addresses": list(addresses), "max_peers": max_peers,
        "issued_at_ms": node.clock.now_ms(),
    }
    return PeerAnnounce.model_validate(fields | changes)


def announce(node: FakeNode, *addresses: str, max_peers: int = 16) -> PeersReply:
    return node.client.announce(message(node, *addresses, max_peers=max_peers))


def names(reply: PeersReply) -> list[str]:
    return sorted(peer.node_id for peer in reply.peers)


def test_nodes_hear_of_each_other_but_not_of_themselves(world: World) -> None:
    one, two = world.node("one").join(), world.node("two").join()
    assert announce(one, HERE).peers == []
    (found,) = announce(two, "/dns4/two.example.org/tcp/4101").peers
    assert (found.node_id, found.public_key, found.addresses) == (one.key.id, one.key.public_key.hex(), [HERE])
    assert names(announce(one, HERE)) == [two.key.id]


def test_a_sample_is_as_large_as_asked_for(world: World) -> None:
    nodes = [world.node(f"node-{i}").join() for i in range(5)]
    for node in nodes:
        announce(node, HERE)
    assert len(announce(nodes[0], HERE, max_peers=3).peers) == 3
    assert names(announce(nodes[0], HERE)) == sorted(node.key.id for node in nodes[1:])


def test_silence_and_an_empty_list_mean_forgotten(world: World) -> None:
    one, two, three = (world.node(name).join() for name in ("one", "two", "three"))
    announce(one, HERE)
    announce(two, HERE)
    announce(two)
    assert names(announce(three)) == [one.key.id]
    world.clock.advance(PEER_TTL_MS / 1000)
    assert announce(three).peers == []


def test_a_banned_node_is_not_named_and_not_answered(world: World) -> None:
    one, two = world.node("one").join(), world.node("two").join()
    announce(one, HERE)
    world.admin("ban", node_id=one.key.id, expires_in_s=60)
    assert announce(two).peers == []
    with pytest.raises(PeerFault) as caught:
        announce(one, HERE)
    assert caught.value.code == "E_NODE_BANNED"


def test_an_unspecified_address_becomes_the_one_seen(world: World) -> None:
    one, two = world.node("one").join(), world.node("two").join()
    for seen_from, address, expected in (
        ("198.51.100.4", "/ip4/0.0.0.0/tcp/9", ["/ip4/198.51.100.4/tcp/9"]),
        ("2001:db8::5", "/ip4/0.0.0.0/tcp/9", ["/ip6/2001:db8::5/tcp/9"]),
        ("a unix socket", "/ip4/0.0.0.0/tcp/9", None),
        ("198.51.100.4", "/ip4/300.1.1.1/tcp/9", None),
        ("198.51.100.4", "/ip4/192.0.2.7/tcp/70000", None),
    ):
        reply = world.coordinator.announce(message(one, address).sign(one.key), seen_from)
        assert reply.seen_from == (seen_from if seen_from[0] in "12" else "")
        assert [peer.addresses for peer in announce(two).peers] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"issued_at_ms": 5}, "E_CLOCK_SKEW"),
        ({"node_id": Identity(b"o" * 32).id}, "E_NODE_UNKNOWN"),
    ],
)
def test_only_a_registered_node_speaks_for_itself(world: World, change: dict[str, Any], code: str) -> None:
    node = world.node().join()
    with pytest.raises(PeerFault) as caught:
        node.client.announce(message(node, HERE, **change))
    assert caught.value.code == code


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/192.0.2.7/udp/4101", "/unix/tmp/socket", "/ip4/192.0.2.7/tcp/4101/p2p/12D3Koo", "192.0.2.7:4101",
        "/dns4/evil.example/tcp/1/../..", "",
    ],
)
def test_other_kinds_of_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="addresses"):
        PeerAnnounce(run_id=RUN_ID, node_id="ab" * 32, addresses=[address], max_peers=1, issued_at_ms=0)
