from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import PeerFault
from protocol.identity import Identity
from tests.fakes.coordinator import RUN_ID, World


def test_joining_twice_is_harmless_and_needs_the_token_once(world: World) -> None:
    node = world.node()
    first = node.client.register(node.hello())
    again = node.client.register(node.hello(join_token=None))
    assert first == again
    assert (first.node_id, first.state) == (node.key.id, "active")
    assert world.http.get("/v1/status").json()["nodes_total"] == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"join_token": None}, "E_JOIN_TOKEN"),
        ({"join_token": "guessed-token"}, "E_JOIN_TOKEN"),
        ({"profile": "unknown"}, "E_PROFILE"),
        ({"protocol_version": 0}, "E_PROTOCOL_VERSION"),
        ({"run_id": "cd" * 16}, "E_WRONG_RUN"),
        ({"issued_at_ms": 5}, "E_CLOCK_SKEW"),
        ({"public_key": Identity(b"o" * 32).public_key.hex()}, "E_WRONG_KEY"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(world: World, change: dict[str, Any], code: str) -> None:
    node = world.node()
    node.client.run_id = None
    with pytest.raises(PeerFault) as caught:
        node.client.register(node.hello(**change))
    assert caught.value.code == code
    assert world.http.get("/v1/status").json()["nodes_total"] == 0


def test_a_clock_off_by_minutes_is_fine(world: World) -> None:
    node = world.node()
    node.client.register(node.hello(issued_at_ms=world.clock.now_ms() - 20 * 60_000))


def test_an_unregistered_node_gets_no_work(world: World) -> None:
    with pytest.raises(PeerFault) as caught:
        world.node().ask()
    assert caught.value.code == "E_NODE_UNKNOWN"


def test_another_key_cannot_speak_for_a_node(world: World) -> None:
    node = world.node().join()
    envelope = node.request().sign(Identity(b"o" * 32))
    assert world.http.post("/v1/leases", content=envelope.to_bytes()).json()["code"] == "E_WRONG_KEY"


def test_join_tokens_are_counted_expire_and_can_be_revoked(world: World) -> None:
    token = world.admin("invites", uses=1, ttl_s=60).json()["token"]
    one, two = world.node("one"), world.node("two")
    one.client.register(one.hello(join_token=token))
    with pytest.raises(PeerFault) as caught:
        two.client.register(two.hello(join_token=token))
    assert caught.value.code == "E_JOIN_TOKEN"

    token = world.admin("invites", ttl_s=60).json()["token"]
    world.clock.advance(61)
    with pytest.raises(PeerFault):
        two.client.register(two.hello(join_token=token))

    reply = world.admin("invites", ttl_s=60).json()
    entry = world.http.get("/v1/log?limit=1000").json()["entries"][-1]
    assert entry["kind"] == "invited"
    world.admin("invites/revoke", token_sha256=entry["body"]["token_sha256"])
    with pytest.raises(PeerFault):
        two.client.register(two.hello(join_token=reply["token"]))


def test_the_operator_bans_and_lifts_with_a_reason(world: World) -> None:
    node = world.node().join()
    node.work(2)
    assert world.admin("ban", node_id=node.key.id, reason="").json()["code"] == "E_SCHEMA"
    assert world.admin("ban", node_id=node.key.id, reason="asked for by its owner").status_code == 200
    with pytest.raises(PeerFault) as caught:
        node.ask()
    assert caught.value.code == "E_NODE_BANNED"
    assert "asked for by its owner" in caught.value.message
    assert node.client.register(node.hello()).state == "banned"
    assert world.verifier.claim() is None  # what it had handed in is void
    assert world.admin("unban", node_id=node.key.id, reason="talked it over").status_code == 200
    assert [lease.group for lease, _ in node.leases(2)] == [0, 0]
    kinds = [entry["kind"] for entry in world.http.get("/v1/log?limit=1000").json()["entries"]]
    assert kinds.count("banned") == kinds.count("unbanned") == 1


def test_a_ban_with_an_end_ends(world: World) -> None:
    node = world.node().join()
    world.admin("ban", node_id=node.key.id, reason="too hasty", expires_in_s=60)
    with pytest.raises(PeerFault):
        node.ask()
    world.clock.advance(61)
    assert len(node.ask().leases) == 1


def test_the_admin_api_needs_its_token(world: World) -> None:
    node = world.node().join()
    for headers in ({}, {"authorization": "Bearer guess"}, {"authorization": "an-admin-token"}):
        answer = world.http.post("/v1/admin/ban", json={"node_id": node.key.id, "reason": "why"}, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "E_ADMIN_TOKEN")
    assert world.admin("ban", node_id="00" * 32).json()["code"] == "E_NOT_FOUND"
    assert world.admin("ban", node_id="zz").json()["code"] == "E_SCHEMA"
    assert world.admin("ban", node_id=node.key.id, extra=1).json()["code"] == "E_SCHEMA"


def test_nodes_are_listed_in_pages(world: World) -> None:
    keys = sorted(world.node(name).join().key.id for name in "abc")
    page = world.http.get("/v1/nodes?limit=2").json()
    assert [n["id"] for n in page["nodes"]] == keys[:2]
    page = world.http.get(f"/v1/nodes?limit=2&after={page['next']}").json()
    assert ([n["id"] for n in page["nodes"]], page["next"]) == (keys[2:], None)
    assert world.http.get(f"/v1/nodes/{RUN_ID}").status_code == 404
