"""A seat at the network: one node that joins, is enrolled as a drill if it is one, and runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.up_process import Child
from coordinator.up_status import DrillSeen, Status
from coordinator.up_supervisor import State, Supervisor

#: How long a node may finish and upload what it began before it gives the rest back.
DRAIN_S: Final = 15
#: How long a caught cheat may take to leave; it has nothing to drain that anybody would take.
LEAVE_S: Final = 1.0

Enrol = Callable[[str, str], None]  #: node id, attack; raises AssayError
Look = Callable[[], Status]  #: a fresh look at the run; raises AssayError


@dataclass(frozen=True)
class NodePlan:
    """How a node is called and where it lives."""

    name: str
    link: str
    home: Path
    log: Path
    batch: int  #: rollouts decoded at once
    attack: str | None = None  #: drill it plays

    def join(self) -> Child:
        """The process that makes the key and registers."""
        return Child(
            f"{self.name}-join", ["node", "join", self.link, "--home", str(self.home), "--name", self.name], self.log
        )

    def run(self) -> Child:
        """The process that generates."""
        arguments = [
            "node", "run", "--home", str(self.home), "--batch", str(self.batch), "--threads", "1", "--log", "-",
            "--drain-timeout-s", str(DRAIN_S),
        ]
        if self.attack is not None:
            arguments += ["--drill", self.attack]
        return Child(self.name, arguments, self.log)


class Seat:
    """Takes one node from its join to its run; never waits."""

    def __init__(self, plan: NodePlan, supervisor: Supervisor, enrol: Enrol, expected: Callable[[], bool]):
        self.plan = plan
        self._supervisor = supervisor
        self._enrol = enrol
        self._expected = expected
        supervisor.start(plan.join())

    @property
    def running(self) -> bool:
        """Whether it came to its run."""
        return self._supervisor.state(self.plan.name) is not None

    def tick(self, status: Status) -> None:
        """Go on as far as possible."""
        if self.running or self._supervisor.state(f"{self.plan.name}-join") is not State.DONE:
            return
        node_id = next((node.id for node in status.nodes if node.name == self.plan.name), None)
        if node_id is None:
            return  # the look is older than the registration
        if self.plan.attack is not None:
            self._enrol(node_id, self.plan.attack)
        self._supervisor.start(self.plan.run(), self._expected)


class DrillRow:
    """The cheating slot: drills one after another, each until it is caught."""

    def __init__(
        self, attacks: Sequence[str], plan: Callable[[str], NodePlan], supervisor: Supervisor, enrol: Enrol, look: Look
    ):
        self._waiting = deque(attacks)
        self._plan = plan
        self._supervisor = supervisor
        self._enrol = enrol
        self._look = look
        self._seat: Seat | None = None
        self._attack = ""

    @property
    def over(self) -> bool:
        """Whether every drill had its turn and was caught."""
        return self._seat is None and not self._waiting

    @property
    def processes(self) -> list[str]:
        """Names of the processes of the drill that runs now."""
        return [] if self._seat is None else [self._seat.plan.name, f"{self._seat.plan.name}-join"]

    def tick(self, status: Status) -> None:
        """Leave the seat to the next drill once the present one is caught."""
        if self._seat is not None and _caught(status.drills, self._attack):
            self.leave()
        while self._seat is None and self._waiting:
            self._attack = self._waiting.popleft()
            if not _caught(status.drills, self._attack):
                plan = self._plan(self._attack)
                self._seat = Seat(plan, self._supervisor, self._enrol, self._caught_now)
        if self._seat is not None:
            self._seat.tick(status)

    def leave(self) -> None:
        """End the drill that runs now."""
        if self._seat is not None:
            for name in self.processes:
                if self._supervisor.state(name) in {State.RUNNING, State.PAUSED}:
                    self._supervisor.stop(name, LEAVE_S)
            self._seat = None

    def _caught_now(self) -> bool:
        return _caught(self._look().drills, self._attack)


def _caught(drills: Sequence[DrillSeen], attack: str) -> bool:
    return any(drill.attack == attack and drill.caught for drill in drills)
