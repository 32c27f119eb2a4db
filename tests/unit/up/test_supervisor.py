"""Supervision with children that exist only in the test."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.up_supervisor import MAX_RESTARTS, State, Supervisor
from protocol.errors import LocalFault
from tests.fakes.clock import FakeClock


class FakeChild:
    """Ends when the test says so."""

    def __init__(self, name: str, log: Path):
        self.name, self.log = name, log
        self.starts = 0
        self.exit_status: int | None = None
        self.signals: list[str] = []
        self.drains = True

    @property
    def pid(self) -> int:
        return 1000 + self.starts

    def start(self) -> None:
        self.starts += 1
        self.exit_status = None

    def terminate(self) -> None:
        self.signals.append("TERM")
        if self.drains and self.exit_status is None:
            self.exit_status = 0

    def kill(self) -> None:
        self.signals.append("KILL")
        self.exit_status = -9

    def wait(self, timeout_s: float) -> bool:
        return self.exit_status is not None


@pytest.fixture
def events() -> list[tuple[str, dict[str, object]]]:
    return []


@pytest.fixture
def supervisor(clock: FakeClock, events: list[Any]) -> Supervisor:
    return Supervisor(clock, lambda name, fields: events.append((name, dict(fields))))


@pytest.fixture
def child(tmp_path: Path) -> Any:
    return FakeChild("bob", tmp_path / "bob.log")


def test_a_crashed_child_is_started_again_after_a_pause(
    supervisor: Supervisor, child: Any, clock: FakeClock, events: list[Any]
) -> None:
    supervisor.start(child)
    child.exit_status = -9
    supervisor.poll()
    assert (supervisor.state("bob"), child.starts) == (State.PAUSED, 1)
    clock.advance(1.0)
    supervisor.poll()
    assert (supervisor.state("bob"), child.starts, supervisor.restarts) == (State.RUNNING, 2, 1)
    assert [name for name, _ in events] == ["started", "crashed", "restarted"]


def test_pauses_grow_and_restarts_are_bounded(supervisor: Supervisor, child: Any, clock: FakeClock) -> None:
    child.log.write_text("first line\nthe disk is on fire\n")
    supervisor.start(child)
    for _ in range(MAX_RESTARTS):
        child.exit_status = 1
        supervisor.poll()
        clock.advance(10.0)
        supervisor.poll()
    child.exit_status = 1
    with pytest.raises(LocalFault, match="the disk is on fire") as caught:
        supervisor.poll()
    assert caught.value.code == "E_UP_CHILD"
    assert child.starts == MAX_RESTARTS + 1


def test_a_usage_error_is_not_tried_again(supervisor: Supervisor, child: Any) -> None:
    supervisor.start(child)
    child.exit_status = 2
    with pytest.raises(LocalFault, match="E_UP_CHILD"):
        supervisor.poll()
    assert child.starts == 1


def test_a_clean_end_is_an_end(supervisor: Supervisor, child: Any) -> None:
    supervisor.start(child)
    child.exit_status = 0
    supervisor.poll()
    assert supervisor.state("bob") is State.DONE


def test_an_expected_bad_end_is_an_end_too(supervisor: Supervisor, child: Any) -> None:
    supervisor.start(child, lambda: True)
    child.exit_status = 1
    supervisor.poll()
    assert supervisor.state("bob") is State.DONE


def test_draining_goes_group_by_group_and_kills_who_stays(
    supervisor: Supervisor, child: Any, tmp_path: Path, events: list[Any]
) -> None:
    stubborn = FakeChild("learner", tmp_path / "learner.log")
    stubborn.drains = False
    supervisor.start(child)
    supervisor.start(stubborn)  # type: ignore[arg-type]
    supervisor.drain([["bob", "nobody"], ["learner"]], 5.0)
    assert child.signals == ["TERM"]
    assert stubborn.signals == ["TERM", "KILL"]
    assert events[-1] == ("killed", {"process": "learner", "why": "did not drain in time"})
    supervisor.poll()
    assert supervisor.states() == {"bob": "stopped", "learner": "stopped"}
