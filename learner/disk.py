"""Files that are either there whole or not at all, whatever moment the power goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """Write ``data`` to a temporary name, make it durable, rename it to ``path``."""
    with disk_faults(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line and make it durable. A torn last line of an earlier crash is ended first."""
    with disk_faults(f"append to {path}"), path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``path`` when the block ends well; its files must be durable by then."""
    with disk_faults(f"write {path}"):
        temporary = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        sync_directory(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
