"""Keeps the evidence against every caught drill, so that it can be audited after the network is gone."""

from __future__ import annotations

from pathlib import Path

from coordinator.up_plan import Folder
from coordinator.up_status import Status
from protocol.client import CoordinatorClient


def collect_evidence(client: CoordinatorClient, folder: Folder, status: Status) -> dict[str, Path]:
    """Save one self-contained audit file per caught drill; attack -> file.

    Raises:
        AssayError: as the client does.
    """
    files: dict[str, Path] = {}
    for drill in status.drills:
        if drill.caught and drill.receipt_id is not None:
            target = folder.evidence / f"{drill.attack}.evidence"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(client.evidence(drill.receipt_id))
            files[drill.attack] = target
    return files
