"""Real libp2p hosts on loopback: heads and log heads travel, forged ones do not, peers find each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libp2p", reason="the swarm needs the extra 'swarm' (libp2p, trio)")

from multiaddr import Multiaddr

from protocol.swarm import host
from tests.fakes.swarm import LEARNER, Member, Rogue, signed_head, signed_note
from tests.fakes.waiting import until

pytestmark = [
    pytest.mark.timeout(400),
    # The library leaves some of its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Close = Callable[[Any], Any]


def test_a_head_travels_from_node_to_node(tmp_path: Path, closing: Close) -> None:
    one, two, three = (closing(Member(tmp_path, name)) for name in ("one", "two", "three"))
    one.meet(two)
    two.meet(three)
    heads = itertools.count(1)

    def spread() -> bool:
        one.swarm.tell(signed_head(next(heads)))
        return three.woken.wait(0.3)

    until(spread)
    assert three.swarm.heads.version >= 1
    assert not one.woken.is_set()


def test_a_forged_head_stops_at_the_first_node_and_a_stale_one_harms_nobody(tmp_path: Path, closing: Close) -> None:
    one, two = closing(Member(tmp_path, "one")), closing(Member(tmp_path, "two"))
    rogue, gossip = closing(Rogue("rogue")), closing(Rogue("old news"))
    one.meet(two, rogue, gossip)
    one.swarm.tell(signed_head(7))
    forged = signed_head(99, signer=type(LEARNER)(b"x" * 32)).to_bytes()

    def refused() -> bool:
        gossip.do(lambda its: its.tell(signed_head(3).to_bytes()))
        rogue.do(lambda its: its.tell(forged))
        return bool(one.peer(rogue)["dropped"])

    until(refused)
    assert one.peer(rogue)["dropped"].startswith("E_SIGNATURE")
    assert one.peer(gossip)["dropped"] is None
    assert one.swarm.heads.version == 7
    assert two.swarm.heads.version in (-1, 7)
    assert not one.woken.is_set()


def test_a_head_that_gossip_lost_is_pulled(
    tmp_path: Path, closing: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_PULL_S", 0.1)
    one, two = closing(Member(tmp_path, "one")), closing(Member(tmp_path, "two"))
    one.swarm.heads.hear(signed_head(5).to_bytes(), 0)  # known to it, never told
    two.meet(one)
    until(two.woken.is_set)  # after the head was noted
    assert two.swarm.heads.version == 5


def test_what_one_node_was_shown_of_the_log_reaches_the_others(tmp_path: Path, closing: Close) -> None:
    one, two, three = (closing(Member(tmp_path, name)) for name in ("one", "two", "three"))
    one.meet(two)
    two.meet(three)
    three.swarm.tell_note(signed_note(5, 1))  # what the coordinator showed this one
    told = [signed_note(5, 1)]

    def spread() -> bool:
        told.append(signed_note(5 + len(told)))
        one.swarm.tell_note(told[-1])
        return bool(three.notes)

    until(spread)
    assert two.notes[0] in told
    assert one.notes in ([], [signed_note(5, 1)])


def test_a_forged_log_head_costs_the_one_who_passes_it_on(tmp_path: Path, closing: Close) -> None:
    one, rogue = closing(Member(tmp_path, "one")), closing(Rogue("rogue"))
    one.meet(rogue)
    forged = signed_note(99, signer=LEARNER).encode()

    def refused() -> bool:
        rogue.do(lambda its: its.tell_note(forged))
        return bool(one.peer(rogue)["dropped"])

    until(refused)
    assert one.peer(rogue)["dropped"].startswith("E_SIGNATURE")
    assert one.notes == []


def test_our_peer_ids_are_those_of_the_library(closing: Close) -> None:
    rogue = closing(Rogue("somebody"))
    assert str(rogue.host._host.get_id()) == rogue.id


def test_a_host_tells_others_no_address_that_means_here(closing: Close) -> None:
    its = closing(Rogue("somebody")).host
    everywhere = [Multiaddr("/ip4/0.0.0.0/tcp/4101"), Multiaddr("/ip4/192.0.2.7/tcp/4101")]
    assert its._outward(everywhere) == everywhere
    its.seen_from = "198.51.100.4"
    assert [str(address) for address in its._outward(everywhere)] == [
        "/ip4/198.51.100.4/tcp/4101", "/ip4/192.0.2.7/tcp/4101",
    ]


def test_peers_find_each_other_through_the_table(
    tmp_path: Path, closing: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_LOOK_UP_S", (0.5, 5.0))
    one, two, three = (closing(Member(tmp_path, name)) for name in ("one", "two", "three"))
    one.meet(two)
    three.meet(two)
    until(lambda: three.peer(one).get("connected"))
    assert {"dht", "inbound"} & set(three.peer(one)["found_by"])
