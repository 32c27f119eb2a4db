"""Files that are there whole or not at all, and lines that are whole, whatever moment a process or the power goes.

Everything here raises ``OSError`` when the disk fails; callers turn it into a fault of their own.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_durable(path: Path, data: bytes) -> None:
    """Write a file whose content is on the disk when this returns; its name is so after :func:`sync_directory`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` under a name of this thread, make it durable, rename it to ``path``. The folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        write_durable(draft, data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def create_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; one that exists is never overwritten (``FileExistsError``)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line and make it durable. What a killed process left of its last line is ended first."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that :func:`append_line` writes, maybe at this moment.

    A line that is not whole, or no object, is passed over; a file that is not there has no lines.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
