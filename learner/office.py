"""What the learner asks of the coordinator, so that its loop can be run against a fake."""

from __future__ import annotations

from typing import Protocol

from learner.publisher import Announcements
from protocol.api import AdmittedGroup
from protocol.envelope import Envelope
from protocol.messages import BatchPlan, ScreenReport


class LearnerClient(Announcements, Protocol):
    """What the loop needs of the coordinator; ``protocol.client.CoordinatorClient`` has it."""

    def admitted(self, limit: int) -> list[AdmittedGroup]:
        """Complete, verified, unconsumed groups, oldest first."""
        ...

    def checkpoint(self, version: int) -> Envelope:
        """The manifest of one version, as it was published; ``E_NOT_FOUND`` when there is none."""
        ...

    def post_batch(self, plan: BatchPlan) -> object:
        """Write down the batch about to be trained on."""
        ...

    def post_screen(self, report: ScreenReport) -> object:
        """Say what the step's forward pass saw of each node."""
        ...
