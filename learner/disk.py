"""The work directory's files: there whole or not at all, and trouble with the disk is the learner's own fault."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol import disk
from protocol.errors import LocalFault, code

E_WORK_DIR = code("E_WORK_DIR", "the learner's work directory cannot be read or written")


@contextmanager
def disk_faults(what: str) -> Iterator[None]:
    """Turn trouble with the disk into a ``LocalFault`` ``E_WORK_DIR``."""
    try:
        yield
    except OSError as error:
        raise LocalFault(
            E_WORK_DIR, f"cannot {what}", got=str(error), hint="check free space and permissions, then start again"
        ) from None


def write_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, durably, at once or not at all."""
    with disk_faults(f"write {path}"):
        disk.replace_file(path, data)


def append_line(path: Path, line: str) -> None:
    """Append one line durably; what a crash left of an earlier one is ended first."""
    with disk_faults(f"append to {path}"):
        disk.append_line(path, line)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``path`` when the block ends well; its files must be durable by then."""
    with disk_faults(f"write {path}"):
        temporary = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        disk.sync_directory(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        disk.sync_directory(path.parent)
