"""The coordinator of a ``World`` behind its real server on loopback, and sockets that behave as they like."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from coordinator.server import listen, settings
from tests.fakes.coordinator import World

Address = tuple[str, int]


@contextmanager
def served(world: World, look_s: float = 30.0) -> Iterator[Address]:
    """Where the coordinator listens. 127.0.0.1 counts as a proxy; 127.0.0.2 and so on are strangers."""
    config = settings(world.app, world.config, look_s)
    config.lifespan = "off"  # the world runs it
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            host, port = listener.getsockname()[:2]
            yield host, port
        finally:
            server.should_exit = server.force_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()


def connect(server: Address, host: str = "127.0.0.2", buffer_bytes: int | None = None) -> socket.socket:
    """A connection from ``host``, with so small a receive buffer if that is given; waits 20 s for anything."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if buffer_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    made.settimeout(20)
    made.bind((host, 0))
    made.connect(server)
    return made


def begin(method: str, path: str, size: int | None = None, **headers: str) -> bytes:
    """The head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: coordinator", *(f"{k}: {v}" for k, v in headers.items())]
    if size is not None:
        lines.append(f"content-length: {size}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def status_of(connection: socket.socket) -> int | None:
    """The status of the next answer; None when the connection ends without one."""
    try:
        head = connection.recv(4096)
    except ConnectionError:
        return None
    return int(head.split(b" ", 2)[1]) if head else None


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, sooner than we would give up."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
