"""Keeps what can be audited after the network is gone: the evidence against every caught drill, and the run's log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coordinator.up_plan import Folder
from coordinator.up_status import Status
from protocol import log_file
from protocol.client import CoordinatorClient
from protocol.log_client import LogClient
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead


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


def save_log(client: CoordinatorClient, folder: Folder, root: str) -> None:
    """Download the run's log; ``root`` is the run's root public key, hex.

    Raises:
        AssayError: as the client does.
    """
    log = LogClient(client)
    head = log.head()
    log_file.write(
        folder.run_log, bytes.fromhex(root), client.run_manifest(), head, _entries(log, LogHead.peek(head).size)
    )


def _entries(log: LogClient, size: int) -> Iterator[LogEntry]:
    at = 0
    while at < size:
        page = log.entries(at, min(size - at, 1000))
        if not page:
            return  # whoever audits the file will find it short
        yield from page
        at += len(page)
