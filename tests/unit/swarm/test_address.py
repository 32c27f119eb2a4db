from __future__ import annotations

import socket

import pytest

from protocol.errors import LocalFault
from protocol.identity import Identity
from protocol.swarm.address import dialable, outward, peer_id_of, require_free


def test_a_peer_id_is_the_known_answer() -> None:
    assert peer_id_of(Identity(b"\1" * 32).public_key) == "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
    assert peer_id_of(Identity(b"\2" * 32).public_key) == "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"


@pytest.mark.parametrize(
    ("address", "good"),
    [
        ("/ip4/192.0.2.7/tcp/4101", True), ("/ip6/2001:db8::1/tcp/1", True), ("/dns4/a.example/tcp/4101", True),
        ("/ip4/0.0.0.0/tcp/4101", False), ("/ip6/::/tcp/4101", False), ("/ip4/300.0.0.1/tcp/4101", False),
        ("/ip4/192.0.2.7/tcp/0", False), ("/ip4/192.0.2.7/tcp/70000", False), ("/ip4/192.0.2.7/udp/4101", False),
        ("/ip4/192.0.2.7/tcp/4101/p2p/12D3", False), ("/unix/a/tcp/1", False), ("ip4/192.0.2.7/tcp/1", False),
        ("", False),
    ],
)
def test_only_tcp_to_a_host_is_dialled(address: str, good: bool) -> None:
    assert dialable(address) is good


def test_here_becomes_where_others_see_us() -> None:
    assert outward("/ip4/0.0.0.0/tcp/9", "198.51.100.4") == "/ip4/198.51.100.4/tcp/9"
    assert outward("/ip6/::/tcp/9", "2001:db8::5") == "/ip6/2001:db8::5/tcp/9"
    assert outward("/ip4/0.0.0.0/tcp/9", "") == "/ip4/0.0.0.0/tcp/9"
    assert outward("/ip4/192.0.2.7/tcp/9", "198.51.100.4") == "/ip4/192.0.2.7/tcp/9"


@pytest.mark.parametrize("listen", ["", "/ip4/127.0.0.1", "/ip4/127.0.0.1/tcp/port", "/ip4/192.0.2.1/tcp/0"])
def test_where_nobody_can_listen_is_refused(listen: str) -> None:
    with pytest.raises(LocalFault) as caught:
        require_free(listen)
    assert caught.value.code == "E_SWARM"


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LocalFault):
            require_free(f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}")
    require_free("/ip4/127.0.0.1/tcp/0")
