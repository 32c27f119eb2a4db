"""Who gets a place when there are few."""

from __future__ import annotations

import re
from contextlib import ExitStack

import anyio
import anyio.lowlevel
import pytest

from coordinator.places import Places
from protocol.errors import Transient


class Sender:
    """Uploads that never end by themselves."""

    def __init__(self, places: Places, group: anyio.abc.TaskGroup):
        self._places, self._group, self.ended = places, group, dict[str, str]()

    async def __call__(self, name: str) -> None:
        """Begin an upload; a name is an address, a node and a number: ``a1.0``."""
        address, node, _ = re.split(r"(?<=^.)|[.]", name)
        self._group.start_soon(self._send, name, node, address)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()

    async def _send(self, name: str, node: str, address: str) -> None:
        try:
            with self._places.hold(address + node, address, name):
                await anyio.sleep_forever()
        except Transient as error:
            self.ended[name] = error.message


async def ended(total: int, per_node: int, names: str) -> dict[str, str]:
    """Which uploads got no place or lost it, and why."""
    async with anyio.create_task_group() as group:
        send = Sender(Places(total, per_node), group)
        for name in names.split():
            await send(name)
        group.cancel_scope.cancel()
    return send.ended


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        ("a1.0 a1.1 b1.0 b2.0", ""),
        ("a1.0 a1.1 a1.2", "a1.2"),  # too many of one node
        ("a1.0 a1.1 a2.0 a2.1 b1.0", "a1.1"),  # the address that has most makes room, its newest first
        ("a1.0 a1.1 a2.0 a2.1 b1.0 b2.0", "a1.1 a2.1"),
        ("a1.0 a1.1 a2.0 a2.1 b1.0 b2.0 b3.0", "a1.1 a2.1 b3.0"),  # a fair share and no more
        ("a1.0 a1.1 a2.0 a2.1 a3.0", "a1.1"),  # one address: between its nodes
        ("a1.0 a2.0 a3.0 a4.0 a5.0", "a5.0"),
        ("a1.0 b1.0 c1.0 d1.0 e1.0", "e1.0"),
        ("a1.0 a1.0 a1.0 b1.0 b2.0 b3.0", "a1.0"),  # the same object again: its own place
    ],
)
def test_places_are_dealt_fairly(names: str, lost: str) -> None:
    assert sorted(anyio.run(ended, 4, 2, names)) == sorted(lost.split())


def test_a_place_is_free_again_however_an_upload_ends() -> None:
    async def check() -> None:
        places = Places(1, 1)
        for error in (ValueError, Transient):
            with ExitStack() as stack:
                stack.enter_context(pytest.raises(error))
                stack.enter_context(places.hold("n", "a", "x"))
                raise error("E_STORE", "broke") if error is Transient else error
        with places.hold("n", "a", "x"), pytest.raises(Transient) as caught, places.hold("m", "b", "y"):
            pass
        assert caught.value.retry_after_s > 0

    anyio.run(check)
