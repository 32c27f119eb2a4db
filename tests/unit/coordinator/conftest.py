from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import World

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path, clock: FakeClock) -> Iterator[MakeWorld]:
    """Founds a run and opens its coordinator; keywords change the manifest, ``config`` the process."""
    worlds: list[World] = []

    def make(**changes: Any) -> World:
        worlds.append(World(tmp_path / f"run{len(worlds)}", clock, **changes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A run with one published version."""
    made = make_world()
    made.publish()
    return made
