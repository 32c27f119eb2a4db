"""The serving socket."""

import socket

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
