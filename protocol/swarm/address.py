"""Peer ids and multiaddrs, as far as the swarm needs them."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

from protocol.errors import LocalFault
from protocol.swarm.wire import E_SWARM

_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
#: Identity multihash (00, 36 bytes) of the protobuf of an Ed25519 key (type 1, 32 bytes of data).
_ED25519: Final = bytes.fromhex("002408011220")
_HERE: Final = re.compile(r"^/ip4/0\.0\.0\.0/|^/ip6/::/")


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of an Ed25519 key: base58 of its identity multihash (libp2p peer-ids specification)."""
    data = _ED25519 + public_key
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def dialable(address: str) -> bool:
    """Whether an address has the form that we dial: a host that is one, and a TCP port."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[3] != "tcp" or not parts[4].isdecimal() or not 0 < int(parts[4]) < 65_536:
        return False
    if parts[1] in ("dns4", "dns6"):
        return True
    try:
        return parts[1] in ("ip4", "ip6") and not ipaddress.ip_address(parts[2]).is_unspecified
    except ValueError:
        return False


def outward(address: str, seen_from: str) -> str:
    """The address with a host that means "here" replaced by where others see us, if that is known."""
    return _HERE.sub(f"/{'ip6' if ':' in seen_from else 'ip4'}/{seen_from}/", address) if seen_from else address


def require_free(listen: str) -> None:
    """Refuse an address that is taken: libp2p would share it, and a peer would meet one host or the other.

    Raises:
        LocalFault: ``E_SWARM``.
    """
    _, kind, host, _, port = (listen.split("/") + [""] * 5)[:5]
    try:
        family = socket.AF_INET6 if kind == "ip6" else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise LocalFault(
            E_SWARM, f"cannot listen on {listen}", expected="a free address, for example /ip4/0.0.0.0/tcp/4101",
            got=str(error)[:200],
        ) from None
