"""Resume points: everything a step depends on, written whole, found by ``LATEST``.

::

    checkpoints/00000012/state.pt   masters, optimiser, counters, generator
    checkpoints/00000012/meta.json  version, root of the published weights, hash of state.pt
    checkpoints/LATEST              name of the newest that is complete

A resume point is only a short cut: the journal can make its state again from an older one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner.disk import disk_faults, whole_directory, write_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """A trainer's state and the published version that it belongs to."""

    version: int
    state_root: str
    state: dict[str, Any]


class ResumePoints:
    """The resume points under one work directory."""

    def __init__(self, work: Path):
        self.folder = work / "checkpoints"
        with disk_faults(f"open {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, point: ResumePoint, keep: int) -> None:
        """Write ``point`` and drop all but the newest ``keep``."""
        path = self.folder / f"{point.version:08d}"
        with whole_directory(path) as folder:
            with (folder / "state.pt").open("wb") as file:
                torch.save(point.state, file)
                file.flush()
                os.fsync(file.fileno())
            meta = {"version": point.version, "state_root": point.state_root, "sha256": _hash(folder / "state.pt")}
            write_file(folder / "meta.json", json.dumps(meta).encode())
        write_file(self.folder / "LATEST", path.name.encode())
        for name in self.names()[:-keep]:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def names(self) -> list[str]:
        """Names of the resume points, oldest first."""
        return sorted(path.name for path in self.folder.glob("[0-9]*") if path.is_dir())

    def newest(self, at_most: int) -> ResumePoint | None:
        """The newest undamaged resume point of a version up to ``at_most``; None when there is none."""
        for name in reversed(self.names()):
            if int(name) > at_most:
                continue
            point = self._load(self.folder / name)
            if point is not None:
                return point
            logger.warning("resume point is damaged; trying an older one", extra={"resume_point": name})
        return None

    def _load(self, path: Path) -> ResumePoint | None:
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            if _hash(path / "state.pt") != meta["sha256"]:
                return None
            state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError):
            return None
        return ResumePoint(int(meta["version"]), str(meta["state_root"]), state)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
