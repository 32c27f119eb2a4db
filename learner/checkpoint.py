"""Resume points: everything a step depends on, written whole, found by ``LATEST``.

::

    checkpoints/00000012/part-0-of-1.pt  masters, optimiser, counters, generator (see ``learner.parts``)
    checkpoints/00000012/meta.json       version, root of the published weights, ledger cursor, hash of each part
    checkpoints/LATEST                   name of the newest that was read back and found whole

The ledger cursor is the digest of the batch plan that made the version. A resume point is only a short cut: the
journal can make its state again from an older one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from learner.disk import E_WORK_DIR, disk_faults, whole_directory, write_file
from learner.parts import part_names
from protocol.errors import LocalFault

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cursor:
    """What a state belongs to."""

    version: int
    state_root: str  #: of the published weights
    plan_sha256: str | None  #: of the batch plan that made the version; None for version 0


@dataclass(frozen=True)
class ResumePoint:
    """A state on disk, found whole."""

    cursor: Cursor
    folder: Path  #: holds the parts


class ResumePoints:
    """The resume points under one work directory."""

    def __init__(self, work: Path):
        self.folder = work / "checkpoints"
        with disk_faults(f"open {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, cursor: Cursor, write: Callable[[Path], None], keep: int) -> None:
        """Have ``write`` put the parts into a folder, read them back, and drop all but the newest ``keep`` points.

        Raises:
            LocalFault: ``E_WORK_DIR``; ``LATEST`` still names the point before.
        """
        path = self.folder / f"{cursor.version:08d}"
        with whole_directory(path) as folder:
            write(folder)
            meta = {
                "version": cursor.version, "state_root": cursor.state_root, "plan_sha256": cursor.plan_sha256,
                "parts": {name: _hash(folder / name) for name in part_names(folder)},
            }
            write_file(folder / "meta.json", json.dumps(meta).encode())
        if self._read(path) is None:
            raise LocalFault(
                E_WORK_DIR, f"{path} does not read back as it was written",
                hint="check the disk; the earlier resume point is kept",
            )
        write_file(self.folder / "LATEST", path.name.encode())
        for name in self.names()[:-keep]:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def names(self) -> list[str]:
        """Names of the resume points, oldest first."""
        return sorted(path.name for path in self.folder.glob("[0-9]*") if path.is_dir())

    def newest(self, at_most: int) -> ResumePoint | None:
        """The newest undamaged resume point of a version up to ``at_most``; None when there is none.

        The one that ``LATEST`` names comes first: a newer one was not yet known to be whole.
        """
        latest = self._latest()
        for name in sorted(self.names(), key=lambda name: (name == latest, name), reverse=True):
            if int(name) > at_most:
                continue
            point = self._read(self.folder / name)
            if point is not None:
                return point
            logger.warning("resume point is damaged; trying another one", extra={"resume_point": name})
        return None

    def _latest(self) -> str | None:
        try:
            return (self.folder / "LATEST").read_text(encoding="ascii")
        except (OSError, ValueError):
            return None

    def _read(self, path: Path) -> ResumePoint | None:
        """The point in ``path`` when every part has the hash it was written with."""
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            if meta["parts"] != {name: _hash(path / name) for name in part_names(path)}:
                return None
            cursor = Cursor(int(meta["version"]), str(meta["state_root"]), meta["plan_sha256"])
        except (OSError, ValueError, KeyError, TypeError, LocalFault):
            return None
        return ResumePoint(cursor, path)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
