"""The serving socket and the signals that end it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.server import listen
from protocol.errors import LocalFault


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        with client, connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_taken_port_is_a_configuration_fault() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(LocalFault, match="E_CONFIG"):
        listen("127.0.0.1", listener.getsockname()[1])


_TOLD_EARLY = """
import os, signal, sys
from pathlib import Path
from fastapi import FastAPI
from coordinator.config import CoordinatorConfig
from coordinator.server import listen, serve
config = CoordinatorConfig(directory=Path(sys.argv[1]))
serve(FastAPI(), config, listen("127.0.0.1", 0), lambda url: os.kill(os.getpid(), getattr(signal, sys.argv[2])))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_before_the_first_request_ends_it_too(tmp_path: Path, root: Path, name: str) -> None:
    """The address is known already, and uvicorn does not listen to signals yet."""
    command = [sys.executable, "-c", _TOLD_EARLY, str(tmp_path), name]
    done = subprocess.run(command, cwd=root, check=False, timeout=100)
    assert done.returncode == 0
    assert not (tmp_path / "serve.json").exists()
