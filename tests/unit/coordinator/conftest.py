from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import event_log
from coordinator.models import Batch
from protocol.envelope import Envelope
from protocol.log_entry import LogEntry, check_root, read_on
from protocol.transparency import Peaks
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import RUN_ID, World
from verifier.batch_audit import BatchAudit
from verifier.draw_audit import audit_draws
from verifier.findings import Report

MakeWorld = Callable[..., World]


def check_log(world: World) -> None:
    """Whatever a test made of a run: its log is under its head, and every draw, ban and batch can be explained."""
    log: list[LogEntry] = []
    with world.coordinator.database.read() as session:
        while page := event_log.entries(session, len(log), event_log.MAX_ENTRIES):
            log += page
        head = event_log.head(session, RUN_ID)
    peaks, report = Peaks(), Report()
    read_on(peaks, log)
    check_root(peaks, head.size, head.root)
    batches = BatchAudit(world.coordinator.run.manifest)
    audit_draws(world.coordinator.run.manifest, batches.seen(iter(log)), report)
    with world.coordinator.database.read() as session:
        batches.check(lambda version: Envelope.from_bytes(session.get_one(Batch, version).plan), report)
    assert report.clean, [finding for finding in report.findings if not finding.ok]


@pytest.fixture
def make_world(tmp_path: Path, clock: FakeClock) -> Iterator[MakeWorld]:
    """Founds a run and opens its coordinator; keywords change the manifest, ``config`` the process."""
    worlds: list[World] = []

    def make(**changes: Any) -> World:
        worlds.append(World(tmp_path / f"run{len(worlds)}", clock, **changes))
        return worlds[-1]

    yield make
    for world in worlds:
        check_log(world)
        world.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A run with one published version."""
    made = make_world()
    made.publish()
    return made
