"""One process per folder: an advisory lock that ends with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from protocol.errors import E_CONFIG, LocalFault


class FolderLock:
    """Held while the block lasts.

    Args:
        file: the lock file, made if need be; its folder is the one that is held.
        holder: who may be there once, like "assay up".

    Raises:
        LocalFault: ``E_CONFIG`` on entering, when another process holds it or the folder cannot be written to.
    """

    def __init__(self, file: Path, holder: str):
        self._file, self._holder = file, holder
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LocalFault(
                E_CONFIG, f"cannot work in {self._file.parent}", expected="a folder that may be written to",
                got=str(error), hint="choose another folder",
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            self._descriptor = None
            raise LocalFault(
                E_CONFIG, f"another {self._holder} works in {self._file.parent}", expected="one at a time",
                hint="stop it first, or choose another folder",
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
