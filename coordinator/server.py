"""The serving process: a socket, uvicorn around the application, an orderly end on SIGTERM."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from coordinator.config import CoordinatorConfig
from coordinator.connections import LOOK_S, Connections, counted
from protocol.errors import E_CONFIG, LocalFault

logger = logging.getLogger(__name__)

#: Where a serving process says its address; admin commands read it.
ADDRESS_FILE: Final = "serve.json"
#: Held by the process that serves a directory.
LOCK_FILE: Final = "serve.lock"
#: Longest wait for requests in progress when the process ends, in seconds.
DRAIN_S: Final = 10
#: How long a connection is kept between two requests, in seconds.
KEEP_ALIVE_S: Final = 15


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        LocalFault: ``E_CONFIG`` when the address cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise LocalFault(
            E_CONFIG, f"cannot listen on {host}:{port}", expected="an address of this machine, a port that is free",
            got=str(error), hint=f"choose another one with --{'port' if taken else 'host'}",
        ) from None
    # Inherited by every connection. Without it the body of an answer waits for the acknowledgement of its head, which
    # the other side delays by 40 ms; asyncio would set it only on sockets made with an explicit protocol number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(app: FastAPI, config: CoordinatorConfig, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in progress and return."""
    host, port = listener.getsockname()[:2]
    url = f"http://{'[' + host + ']' if ':' in host else host}:{port}"
    server = uvicorn.Server(settings(app, config))

    def end(_number: int, _frame: object) -> None:
        """Before uvicorn listens to signals itself. It raises its own once more when it is done: no harm by then."""
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    _write_address(config.directory, url)
    try:
        on_ready(url)
        logger.info("serving", extra={"url": url, "directory": str(config.directory)})
        server.run(sockets=[listener])
    finally:
        (config.directory / ADDRESS_FILE).unlink(missing_ok=True)
    logger.info("stopped")


def settings(app: FastAPI, config: CoordinatorConfig, look_s: float = LOOK_S) -> uvicorn.Config:
    """How uvicorn serves: limits on connections, heads and readers, proxies as ``FORWARDED_ALLOW_IPS`` names them.

    Args:
        look_s: how often a reader that has fallen behind is looked at, in seconds.
    """
    connections = Connections(
        config.max_connections, config.max_connections_per_address, config.head_timeout_s, config.download_bytes_per_s,
        look_s,
    )
    made = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=DRAIN_S,
        # Connections are limited before; what this limits is the work that abandoned ones have left.
        limit_concurrency=2 * config.max_connections, h11_max_incomplete_event_size=64 * 1024, server_header=False,
        lifespan="on", ws="none",
    )
    made.http = counted(connections, ProxyHeadersMiddleware(cast(Any, app), made.forwarded_allow_ips).trusted_hosts)
    return made


def _write_address(directory: Path, url: str) -> None:
    target = directory / ADDRESS_FILE
    scratch = target.with_suffix(".new")
    scratch.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n", encoding="ascii")
    scratch.replace(target)
