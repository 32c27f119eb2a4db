"""Chunks on our own disk: whole ones that were verified, and the beginnings of others.

Layout of the folder: a directory store (``ab/abcdef...``) and ``partial/<hash>``. Nothing needs to be durable: what a
power cut tears fails its hash and is fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from protocol.errors import E_NOT_FOUND, E_OBJECT_HASH, E_STORE, LocalFault, PeerFault
from protocol.messages import ChunkRef
from protocol.store import DirectoryStore, check_key
from protocol.weights.chunk import MAX_CHUNK_BYTES
from protocol.weights.streams import E_CHUNK_LIMIT

#: Bytes of whole chunks kept unless told otherwise; the oldest go first.
DEFAULT_CACHE_BYTES: Final = 4 * 2**30

#: Bytes of an object by hash and size; may return anything, what it returns is checked.
Fetch = Callable[[str, int], bytes]
_R = TypeVar("_R")


class ChunkCache:
    """A bounded cache of verified chunks. One writer per chunk at a time."""

    def __init__(self, path: Path, *, max_bytes: int = DEFAULT_CACHE_BYTES):
        """Open or make the folder.

        Raises:
            LocalFault: ``E_STORE``.
        """
        self.path, self.max_bytes = path, max_bytes
        self.store = DirectoryStore(path)  #: the whole chunks; may be served to others
        self._partial = self._act("open", self._drafts_folder)
        self._bytes = sum(file.stat().st_size for file in self._files())

    def _drafts_folder(self) -> Path:
        """``partial``, or a folder of this process's own while another process writes there."""
        folder = self.path / "partial"
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            folder = self.path / f"partial-{os.getpid()}"
            folder.mkdir(exist_ok=True)
            weakref.finalize(self, shutil.rmtree, folder, True)
        return folder

    def get(self, sha256: str) -> bytes | None:
        """A whole chunk, hash checked; None when it is not here or was damaged."""
        try:
            return self.store.get(sha256)
        except LocalFault as error:
            if error.code not in (E_NOT_FOUND, E_OBJECT_HASH):
                raise
            if error.code == E_OBJECT_HASH:
                self.store.delete(sha256)
            return None

    def begun(self, sha256: str, size: int) -> bytes:
        """What is there of a chunk of ``size`` bytes; more than that is none of it."""
        file = self._draft(sha256)
        try:
            data = file.read_bytes() if file.stat().st_size <= size else b""
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise _failed("read", error) from None
        if not data:
            self.discard(sha256)
        return data

    def append(self, sha256: str, data: bytes) -> None:
        """Add the next bytes to the beginning of a chunk."""

        def write() -> None:
            with self._draft(sha256).open("ab") as file:
                file.write(data)

        self._act("write", write)

    def discard(self, sha256: str) -> None:
        """Forget the beginning of a chunk."""
        self._act("write", lambda: self._draft(sha256).unlink(missing_ok=True))

    def keep(self, sha256: str) -> None:
        """The beginning is the whole chunk, and its hash is right: give it its name, and make room."""
        draft = self._draft(sha256)
        final = self.path / sha256[:2] / sha256

        def rename() -> int:
            size = draft.stat().st_size
            draft.chmod(0o444)
            final.parent.mkdir(exist_ok=True)
            draft.replace(final)
            return size

        self._bytes += self._act("write", rename)
        if self._bytes > self.max_bytes:
            self._act("trim", lambda: self._trim(sha256))

    def _trim(self, newest: str) -> None:
        """Delete the oldest chunks until a tenth is free, never the one that just came."""
        files = sorted(self._files(), key=lambda file: file.stat().st_mtime_ns)
        self._bytes = sum(file.stat().st_size for file in files)
        for file in files:
            if self._bytes <= self.max_bytes * 9 // 10:
                return
            if file.name != newest:
                self._bytes -= file.stat().st_size
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [file for file in self.path.glob("[0-9a-f][0-9a-f]/*") if len(file.name) == 64]

    def _draft(self, sha256: str) -> Path:
        return self._partial / check_key(sha256)

    def _act(self, what: str, act: Callable[[], _R]) -> _R:
        try:
            return act()
        except OSError as error:
            raise _failed(what, error) from None


def verified_chunks(fetch: Fetch, refs: Iterable[ChunkRef]) -> Iterator[bytes]:
    """Chunks in order, each of the stated size and hash before anybody decodes it.

    Raises:
        PeerFault: ``E_CHUNK_LIMIT``, ``E_OBJECT_HASH``.
        AssayError: the errors of ``fetch``.
    """
    for ref in refs:
        if ref.size_bytes > MAX_CHUNK_BYTES:
            raise PeerFault(E_CHUNK_LIMIT, "chunk too large", expected=f"<= {MAX_CHUNK_BYTES}", got=ref.size_bytes)
        data = fetch(ref.sha256, ref.size_bytes)
        if not matches(ref.sha256, ref.size_bytes, data):
            raise PeerFault(
                E_OBJECT_HASH, "the source served other bytes than the manifest names",
                expected=f"{ref.size_bytes} bytes with hash {ref.sha256}", got=f"{len(data)} bytes",
                hint="fetch from another source",
            )
        yield data


def matches(sha256: str, size: int, data: bytes) -> bool:
    """Whether ``data`` is the chunk of this hash and size."""
    return len(data) == size and hashlib.sha256(data).hexdigest() == sha256


def _failed(what: str, error: OSError) -> LocalFault:
    return LocalFault(E_STORE, f"cannot {what} the cache of chunks", got=str(error), hint="is the disk full?")
