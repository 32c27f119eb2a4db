from __future__ import annotations

import fcntl
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protocol.kernels import compile_all


@pytest.fixture(scope="session", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled before any process is waited for, and by one for all: on a slow machine it takes minutes."""
    with (tmp_path_factory.getbasetemp().parent / "kernels.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        compile_all()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Ends hosts of the swarm when the test is over."""
    opened: list[Any] = []

    def keep(thing: Any) -> Any:
        opened.append(thing)
        return thing

    yield keep
    for thing in reversed(opened):
        thing.close()
    opened.clear()
    gc.collect()  # here, where the warning is expected
