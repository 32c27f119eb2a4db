"""Ports for servers that must be told theirs before they listen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path


def unclaimed_ports(count: int) -> list[int]:
    """Different ports of loopback that nobody listens on, and that nobody else is given until ours are taken.

    Whoever asks the kernel for any port, or connects to somewhere, gets one of its range: these lie below it.
    """
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: set[int] = set()
    with ExitStack() as stack:
        while len(ports) < count:
            held = stack.enter_context(socket.socket())
            tried = random.SystemRandom().randrange(10_000, given_from) if given_from > 20_000 else 0
            try:
                held.bind(("127.0.0.1", tried))
            except OSError:
                continue
            ports.add(held.getsockname()[1])
    return sorted(ports)
