"""Keeps the processes of a network alive: a crashed one is started again, a bounded number of times, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from coordinator.up_process import Child, tail
from protocol.clock import Clock
from protocol.errors import LocalFault, code

E_UP_CHILD = code("E_UP_CHILD", "a process of the network on this machine keeps failing")

#: Starts again at most this often; a process that fails more often has a fault that restarting does not mend.
MAX_RESTARTS: Final = 8
#: Wait before the nth start again: this, doubled each time, up to the longest.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0
#: Exit status of a command that was called or configured wrongly: starting again would not help.
USAGE_STATUS: Final = 2

Report = Callable[[str, dict[str, object]], None]  #: event name, fields
Expected = Callable[[], bool]  #: asked after an end with another status than 0: was that how it should end?


class State(Enum):
    """Where a supervised process stands."""

    RUNNING = "running"
    PAUSED = "paused"  #: crashed, to be started again
    DONE = "done"  #: ended with status 0
    STOPPED = "stopped"  #: ended because we asked


@dataclass
class _Slot:
    child: Child
    expected: Expected
    state: State = State.RUNNING
    restarts: int = 0
    due: float = 0.0  #: monotonic time of the next start


class Supervisor:
    """Starts children, starts crashed ones again, and drains them all in reverse order."""

    def __init__(self, clock: Clock, report: Report):
        self._clock = clock
        self._report = report
        self._slots: dict[str, _Slot] = {}

    def start(self, child: Child, expected: Expected = lambda: False) -> None:
        """Start ``child`` and look after it from now on."""
        child.start()
        self._slots[child.name] = _Slot(child, expected)
        self._report("started", {"process": child.name, "pid": child.pid, "log": str(child.log)})

    def state(self, name: str) -> State | None:
        """State of a process; None when there is none of this name."""
        slot = self._slots.get(name)
        return None if slot is None else slot.state

    def states(self) -> dict[str, str]:
        """Process name -> state in words, for the view."""
        return {
            name: slot.state.value + (f" (restarted {slot.restarts}x)" if slot.restarts else "")
            for name, slot in self._slots.items()
        }

    @property
    def restarts(self) -> int:
        """How often any process was started again."""
        return sum(slot.restarts for slot in self._slots.values())

    def poll(self) -> None:
        """Notice ends and start again what crashed. Call it often.

        Raises:
            LocalFault: ``E_UP_CHILD`` when a process failed too often or cannot run at all.
        """
        for slot in self._slots.values():
            if slot.state is State.RUNNING and (status := slot.child.exit_status) is not None:
                self._ended(slot, status)
            if slot.state is State.PAUSED and self._clock.monotonic() >= slot.due:
                slot.child.start()
                slot.state = State.RUNNING
                self._report("restarted", {"process": slot.child.name, "pid": slot.child.pid, "times": slot.restarts})

    def stop(self, name: str, timeout_s: float) -> None:
        """Drain one process; after ``timeout_s`` it is killed."""
        slot = self._slots[name]
        slot.state = State.STOPPED
        slot.child.terminate()
        if not slot.child.wait(timeout_s):
            why = f"not needed any more, and not gone {timeout_s:.0f} s after SIGTERM"
            self._report("killed", {"process": name, "why": why})
            slot.child.kill()

    def drain(self, groups: list[list[str]], timeout_s: float) -> None:
        """Stop groups of processes one after another, the members of a group together; unknown names are skipped."""
        for names in groups:
            slots = [self._slots[name] for name in names if name in self._slots]
            for slot in slots:
                slot.state = State.STOPPED
                slot.child.terminate()
            deadline = self._clock.monotonic() + timeout_s
            for slot in slots:
                if not slot.child.wait(max(deadline - self._clock.monotonic(), 0.0)):
                    self._report("killed", {"process": slot.child.name, "why": "did not drain in time"})
                    slot.child.kill()

    def kill_all(self) -> None:
        """End everything at once."""
        for slot in self._slots.values():
            slot.state = State.STOPPED
            slot.child.kill()

    def _ended(self, slot: _Slot, status: int) -> None:
        if status == 0 or slot.expected():
            slot.state = State.DONE
            self._report("ended", {"process": slot.child.name, "status": status})
            return
        if status == USAGE_STATUS or slot.restarts >= MAX_RESTARTS:
            raise LocalFault(
                E_UP_CHILD, f"{slot.child.name} cannot be kept running", expected="exit status 0",
                got=f"exit status {status} after {slot.restarts} restarts",
                hint=f"the end of {slot.child.log}:\n{tail(slot.child.log)}",
            )
        pause = min(FIRST_PAUSE_S * 2**slot.restarts, LONGEST_PAUSE_S)
        slot.restarts += 1
        slot.due = self._clock.monotonic() + pause
        slot.state = State.PAUSED
        self._report("crashed", {"process": slot.child.name, "status": status, "starts_again_in_s": pause})
