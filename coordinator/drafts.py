"""What is received, before it is known to be worth anything: in memory while it is short, else on disk."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio.to_thread

from protocol.errors import E_STORE, LocalFault

#: Bytes that are held in memory; what is longer goes to a file.
IN_MEMORY_BYTES: Final = 256 * 1024


class Draft:
    """Bytes on their way in, hashed as they come. The file, if one is needed, has no name: it ends with the process."""

    def __init__(self, directory: Path):
        spooled = tempfile.SpooledTemporaryFile
        self._file = spooled(max_size=IN_MEMORY_BYTES, dir=str(directory))
        self._hash = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        """Of what came so far, hex."""
        return self._hash.hexdigest()

    async def take(self, part: bytes) -> None:
        """The next bytes; raises as :meth:`write`."""
        if self.size + len(part) <= IN_MEMORY_BYTES:
            self.write(part)
        else:
            await anyio.to_thread.run_sync(self.write, part)

    def write(self, part: bytes) -> None:
        """The next bytes.

        Raises:
            LocalFault: ``E_STORE`` when the disk refuses.
        """
        self._hash.update(part)
        self.size += len(part)
        try:
            self._file.write(part)
        except OSError as error:
            raise LocalFault(E_STORE, "cannot keep on disk what is received", got=str(error)) from None

    def read(self) -> bytes:
        """All bytes.

        Raises:
            LocalFault: ``E_STORE``.
        """
        try:
            self._file.seek(0)
            return self._file.read()
        except OSError as error:
            raise LocalFault(E_STORE, "cannot read what was received", got=str(error)) from None
