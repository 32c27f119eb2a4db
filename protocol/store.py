"""Object stores: immutable bytes under their own SHA-256.

A store is trusted to keep bytes, not to hand out the right ones: :meth:`Store.get` checks size and hash.
Spec: ``docs/spec/store.md``.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from protocol.disk import sync_directory
from protocol.errors import E_NOT_FOUND, E_OBJECT_HASH, E_STORE, E_TOO_LARGE, LocalFault, PeerFault, code

E_STORE_URL = code("E_STORE_URL", "the address of an object store is malformed", usage=True)

#: Largest object a store hands out unless told otherwise, in bytes.
MAX_OBJECT_BYTES: Final = 256 * 2**20
#: Most bytes read of one entry of the index.
MAX_ANNOUNCEMENT_BYTES: Final = 2**20
_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PresignedRequest:
    """An HTTP request that whoever holds it may make, without credentials, until it expires."""

    method: str
    url: str
    headers: dict[str, str]  #: must be sent exactly so


class Store(Protocol):
    """Where objects are kept. Every method names objects by lower-case hex SHA-256."""

    def put(self, data: bytes) -> str:
        """Keep ``data`` and return its hash. Durable when it returns; putting the same bytes again changes nothing.

        Raises:
            LocalFault: ``E_STORE``.
            Transient: the service cannot be reached.
        """
        ...

    def get(self, sha256: str, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """The object's bytes, size and hash checked.

        Raises:
            PeerFault: ``E_TOO_LARGE`` over ``max_bytes``.
            LocalFault: ``E_NOT_FOUND``, ``E_OBJECT_HASH`` (the store damaged it), ``E_STORE``.
            Transient: the service cannot be reached.
        """
        ...

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` of the object, fewer where it ends before; unchecked, for a part has no hash.

        Raises:
            LocalFault: ``E_NOT_FOUND`` or ``E_STORE``.
            Transient: the service cannot be reached.
        """
        ...

    def has(self, sha256: str) -> bool:
        """Whether the object is there."""
        ...

    def size(self, sha256: str) -> int:
        """Its length in bytes.

        Raises:
            LocalFault: ``E_NOT_FOUND`` or ``E_STORE``.
        """
        ...

    def stamp(self, sha256: str) -> tuple[int, ...] | None:
        """Numbers that change when something is written in the object's place; None when nobody can tell.

        Raises:
            LocalFault: ``E_NOT_FOUND`` or ``E_STORE``.
        """
        ...

    def delete(self, sha256: str) -> None:
        """Forget the object; nothing happens when it is not there."""
        ...

    def announce(self, name: str, data: bytes) -> None:
        """Leave ``data`` under ``name`` (64 hex digits) in the index, in place of what was there. For hints only:
        nothing in the index is trusted.

        Raises:
            LocalFault: ``E_STORE``.
            Transient: the service cannot be reached.
        """
        ...

    def announced(self, name: str) -> bytes | None:
        """What was left under ``name``, at most ``MAX_ANNOUNCEMENT_BYTES`` of it; None when there is nothing.

        Raises:
            LocalFault: ``E_STORE``.
            Transient: the service cannot be reached.
        """
        ...

    def presign_put(self, sha256: str, size: int, expires_s: int) -> PresignedRequest | None:
        """A request that stores exactly this object; None when the store has no such thing."""
        ...

    def presign_get(self, sha256: str, expires_s: int) -> PresignedRequest | None:
        """A request that reads this object; None when the store has no such thing."""
        ...


def check_key(sha256: str) -> str:
    """Refuse anything but 64 lower-case hex digits, so that a key is never a path.

    Raises:
        LocalFault: ``E_NOT_FOUND``: nothing is ever stored under another name.
    """
    if not _HEX.fullmatch(sha256):
        raise LocalFault(E_NOT_FOUND, "not an object name", expected="64 lower-case hex digits", got=sha256[:80])
    return sha256


def check_object(sha256: str, data: bytes) -> bytes:
    """``data`` itself, once its hash is known to be ``sha256``.

    Raises:
        LocalFault: ``E_OBJECT_HASH``.
    """
    check_hash(sha256, hashlib.sha256(data).hexdigest())
    return data


def check_hash(sha256: str, got: str) -> None:
    """Refuse bytes of a store whose hash ``got`` is not ``sha256``.

    Raises:
        LocalFault: ``E_OBJECT_HASH``.
    """
    if got != sha256:
        raise LocalFault(
            E_OBJECT_HASH, "the store holds damaged bytes", expected=sha256, got=got,
            hint="put the object again from its source; if it happens twice, check the disk",
        )


def check_size(sha256: str, size: int, max_bytes: int) -> None:
    """Refuse an object larger than the reader allows.

    Raises:
        PeerFault: ``E_TOO_LARGE``.
    """
    if size > max_bytes:
        raise PeerFault(E_TOO_LARGE, f"object {sha256[:16]} too large", expected=f"<= {max_bytes} bytes", got=size)


def missing(sha256: str) -> LocalFault:
    """The error for an object that is not there."""
    return LocalFault(E_NOT_FOUND, f"object {sha256} is not in the store")


class DirectoryStore:
    """Objects as files ``ab/abcdef...`` under one directory, written to a temporary name and renamed when durable."""

    def __init__(self, path: Path):
        """Make the directory if need be. In one that is there nothing is made before the first writing.

        Raises:
            LocalFault: ``E_STORE``.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failed("open", error) from None

    def _file(self, sha256: str) -> Path:
        return self.path / sha256[:2] / check_key(sha256)

    def put(self, data: bytes) -> str:
        """See :meth:`Store.put`. An existing file with other content (a damaged disk) is replaced."""
        sha256 = hashlib.sha256(data).hexdigest()
        file = self._file(sha256)
        try:
            if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256:
                return sha256
            file.parent.mkdir(exist_ok=True)
            self._write(file, data)
        except OSError as error:
            raise _failed("write to", error) from None
        return sha256

    def _write(self, file: Path, data: bytes) -> None:
        drafts = self.path / "tmp"
        drafts.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=drafts)
        try:
            with os.fdopen(descriptor, "wb") as out:
                os.fchmod(out.fileno(), 0o444)
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        for directory in (file.parent, self.path):
            sync_directory(directory)

    def get(self, sha256: str, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """See :meth:`Store.get`."""
        check_size(sha256, self.size(sha256), max_bytes)
        try:
            data = self._file(sha256).read_bytes()
        except FileNotFoundError:
            raise missing(sha256) from None
        except OSError as error:
            raise _failed("read from", error) from None
        return check_object(sha256, data)

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """See :meth:`Store.read`."""
        try:
            with self._file(sha256).open("rb") as file:
                file.seek(start)
                return file.read(max(0, end - start))
        except FileNotFoundError:
            raise missing(sha256) from None
        except OSError as error:
            raise _failed("read from", error) from None

    def has(self, sha256: str) -> bool:
        """See :meth:`Store.has`."""
        return self._file(sha256).is_file()

    def size(self, sha256: str) -> int:
        """See :meth:`Store.size`."""
        return self._stat(sha256).st_size

    def stamp(self, sha256: str) -> tuple[int, ...] | None:
        """See :meth:`Store.stamp`: device, inode, size and the times of the last writing and of the last change."""
        found = self._stat(sha256)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _stat(self, sha256: str) -> os.stat_result:
        try:
            return self._file(sha256).stat()
        except FileNotFoundError:
            raise missing(sha256) from None
        except OSError as error:
            raise _failed("read from", error) from None

    def delete(self, sha256: str) -> None:
        """See :meth:`Store.delete`."""
        try:
            self._file(sha256).unlink(missing_ok=True)
        except OSError as error:
            raise _failed("delete from", error) from None

    def announce(self, name: str, data: bytes) -> None:
        """See :meth:`Store.announce`."""
        file = self.path / "index" / check_key(name)
        try:
            file.parent.mkdir(exist_ok=True)
            self._write(file, data)
        except OSError as error:
            raise _failed("write to", error) from None

    def announced(self, name: str) -> bytes | None:
        """See :meth:`Store.announced`."""
        try:
            with (self.path / "index" / check_key(name)).open("rb") as file:
                return file.read(MAX_ANNOUNCEMENT_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed("read from", error) from None

    def presign_put(self, sha256: str, size: int, expires_s: int) -> PresignedRequest | None:
        """None: a directory serves no requests."""
        return None

    def presign_get(self, sha256: str, expires_s: int) -> PresignedRequest | None:
        """None: a directory serves no requests."""
        return None


class CachedFetch:
    """Fetches objects by hash and keeps them in a store of ours, so that a restart fetches only what is missing."""

    def __init__(self, cache: Store, fetch: Callable[[str], bytes]):
        self._cache, self._fetch = cache, fetch

    def __call__(self, sha256: str) -> bytes:
        """The object; what the source returns is kept only if its hash is right.

        Raises:
            AssayError: the errors of the source and of the cache, apart from damage in the cache.
        """
        try:
            return self._cache.get(sha256)
        except LocalFault as error:
            if error.code not in (E_NOT_FOUND, E_OBJECT_HASH):
                raise
        data = self._fetch(sha256)
        if hashlib.sha256(data).hexdigest() == sha256:
            self._cache.put(data)
        return data


def open_store(url: str, *, make: bool = False) -> Store:
    """The store at ``dir:PATH`` or ``s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME&profile=NAME]``.

    Args:
        make: a directory that is not there is made; without it, a mistyped path is an error.

    Raises:
        LocalFault: ``E_STORE_URL`` naming the part that is wrong, or when there is no such directory; ``E_STORE`` when
            it cannot be opened.
    """
    if url.startswith("dir:"):
        path = url.removeprefix("dir:")
        if not path or path.startswith("//"):
            raise _bad_url(url, "dir:PATH, for example dir:/var/lib/assay/store")
        if not make and not Path(path).is_dir():
            raise LocalFault(
                E_STORE_URL, "no such object store", expected="a directory that is there", got=url[:200],
                hint="a run's store is DIR/store of its coordinator, unless it was founded with --store",
            )
        return DirectoryStore(Path(path))
    parts = urlsplit(url)
    if parts.scheme != "s3":
        raise _bad_url(url, "dir:PATH or s3://BUCKET/PREFIX?endpoint=URL")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - {"endpoint", "region", "profile"})
    if not parts.hostname or parts.netloc != parts.hostname or parts.fragment or unknown:
        raise _bad_url(url, "s3://BUCKET/PREFIX with only endpoint=, region=, profile= behind the question mark")
    from protocol.store_s3 import S3Store  # boto3 takes a second to import and is an optional dependency

    return S3Store(parts.hostname, prefix=unquote(parts.path).strip("/"), **options)


def _bad_url(url: str, expected: str) -> LocalFault:
    return LocalFault(E_STORE_URL, "cannot make out the store's address", expected=expected, got=url[:200])


def _failed(what: str, error: OSError) -> LocalFault:
    return LocalFault(E_STORE, f"cannot {what} the store", got=str(error))
