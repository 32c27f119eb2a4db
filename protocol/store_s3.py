"""Objects in any S3-compatible service, through boto3.

Keys are ``PREFIX/ab/abcdef...``. Writes are put-if-absent and carry their SHA-256, which the service checks. Spec:
``docs/spec/store.md``.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound

from protocol.errors import E_NOT_FOUND, E_STORE, E_UNREACHABLE, LocalFault, Transient
from protocol.store import (
    MAX_ANNOUNCEMENT_BYTES,
    MAX_OBJECT_BYTES,
    PresignedRequest,
    check_key,
    check_object,
    check_size,
    missing,
)

#: Seconds to wait for a connection, and for the service to send the next bytes.
_CONNECT_TIMEOUT_S: Final = 5
_READ_TIMEOUT_S: Final = 30
_ATTEMPTS: Final = 4
_EXISTS: Final = frozenset({"PreconditionFailed", "412"})
_ABSENT: Final = frozenset({"NoSuchKey", "404"})
_BEYOND: Final = frozenset({"InvalidRange", "416"})

_T = TypeVar("_T")


class S3Store:
    """A bucket, or a prefix in it. Thread-safe."""

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
    ):
        """Open the bucket; nothing is sent yet.

        Credentials: the two arguments, else what boto3 finds (environment, ``profile`` in ~/.aws, instance role).

        Raises:
            LocalFault: ``E_STORE`` when the profile or the endpoint makes no sense.
        """
        self._bucket, self._prefix = bucket, prefix + "/" if prefix else ""
        config = Config(
            signature_version="s3v4",
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
            s3={"addressing_style": "path" if endpoint else "auto"},
        )
        try:
            session = boto3.session.Session(
                aws_access_key_id=access_key, aws_secret_access_key=secret_key, profile_name=profile,
                region_name=region,
            )
            self._client: Any = session.client(
                "s3", endpoint_url=endpoint, region_name=region or session.region_name or "us-east-1", config=config
            )
        except (BotoCoreError, ProfileNotFound, ValueError) as error:
            raise LocalFault(E_STORE, f"cannot open bucket {bucket}", got=str(error)) from None

    def close(self) -> None:
        """Let connections go."""
        self._client.close()

    def _at(self, sha256: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}{sha256[:2]}/{check_key(sha256)}"}

    def put(self, data: bytes) -> str:
        """See :meth:`protocol.store.Store.put`."""
        digest = hashlib.sha256(data)
        sha256 = digest.hexdigest()
        _ask("write", sha256, lambda: self._client.put_object(
            **self._at(sha256), Body=data, IfNoneMatch="*", ChecksumSHA256=_base64(digest.digest())
        ), quiet=_EXISTS)
        return sha256

    def get(self, sha256: str, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """See :meth:`protocol.store.Store.get`."""
        data = _ask("read", sha256, lambda: self._read(sha256, max_bytes))
        if data is None:
            raise missing(sha256)
        check_size(sha256, len(data), max_bytes)
        return check_object(sha256, data)

    def _read(self, sha256: str, max_bytes: int) -> bytes:
        reply = self._client.get_object(**self._at(sha256))
        with reply["Body"] as body:
            check_size(sha256, int(reply["ContentLength"]), max_bytes)
            data: bytes = body.read(max_bytes + 1)
        return data

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """See :meth:`protocol.store.Store.read`."""
        if end <= start:
            return b""
        return _ask("read", sha256, lambda: self._read_part(sha256, start, end), quiet=_BEYOND) or b""

    def _read_part(self, sha256: str, start: int, end: int) -> bytes:
        reply = self._client.get_object(**self._at(sha256), Range=f"bytes={start}-{end - 1}")
        with reply["Body"] as body:
            data: bytes = body.read(end - start)
        return data

    def has(self, sha256: str) -> bool:
        """See :meth:`protocol.store.Store.has`."""
        return self._look_up(sha256) is not None

    def size(self, sha256: str) -> int:
        """See :meth:`protocol.store.Store.size`."""
        reply = self._look_up(sha256)
        if reply is None:
            raise missing(sha256)
        return int(reply["ContentLength"])

    def stamp(self, sha256: str) -> tuple[int, ...] | None:
        """None: the service checks its objects itself."""
        return None

    def _look_up(self, sha256: str) -> dict[str, Any] | None:
        return _ask("look up", sha256, lambda: self._client.head_object(**self._at(sha256)), quiet=_ABSENT)

    def delete(self, sha256: str) -> None:
        """See :meth:`protocol.store.Store.delete`."""
        _ask("delete", sha256, lambda: self._client.delete_object(**self._at(sha256)), quiet=_ABSENT)

    def announce(self, name: str, data: bytes) -> None:
        """See :meth:`protocol.store.Store.announce`."""
        _ask("write", name, lambda: self._client.put_object(**self._entry(name), Body=data))

    def announced(self, name: str) -> bytes | None:
        """See :meth:`protocol.store.Store.announced`."""
        try:
            return _ask("read", name, lambda: self._read_entry(name))
        except LocalFault as error:
            if error.code != E_NOT_FOUND:
                raise
            return None

    def _read_entry(self, name: str) -> bytes:
        with self._client.get_object(**self._entry(name))["Body"] as body:
            data: bytes = body.read(MAX_ANNOUNCEMENT_BYTES)
        return data

    def _entry(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}index/{check_key(name)}"}

    def presign_put(self, sha256: str, size: int, expires_s: int) -> PresignedRequest | None:
        """A PUT that the service accepts only with these bytes: length and checksum are signed."""
        checksum = _base64(bytes.fromhex(check_key(sha256)))
        url = self._presign("put_object", sha256, expires_s, ContentLength=size, ChecksumSHA256=checksum)
        return PresignedRequest("PUT", url, {"Content-Length": str(size), "x-amz-checksum-sha256": checksum})

    def presign_get(self, sha256: str, expires_s: int) -> PresignedRequest | None:
        """A GET of the object; Range works."""
        return PresignedRequest("GET", self._presign("get_object", sha256, expires_s), {})

    def _presign(self, operation: str, sha256: str, expires_s: int, **more: Any) -> str:
        url: str | None = _ask("presign", sha256, lambda: self._client.generate_presigned_url(
            operation, Params={**self._at(sha256), **more}, ExpiresIn=expires_s
        ))
        if url is None:
            raise missing(sha256)
        return url


def _ask(what: str, sha256: str, call: Callable[[], _T], quiet: frozenset[str] = frozenset()) -> _T | None:
    """The call's answer; None when the service answers with a code in ``quiet``; its other errors as ours."""
    try:
        return call()
    except ClientError as error:
        name = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if name in quiet or str(status) in quiet:
            return None
        if name in _ABSENT:
            raise missing(sha256) from None
        if status >= 500 or status in (409, 429):  # 409: two conditional writes at once
            raise Transient(E_UNREACHABLE, f"the object store cannot {what} now", got=str(error)) from None
        raise LocalFault(
            E_STORE, f"the object store refused to {what}", got=str(error), hint="check bucket, rights and credentials"
        ) from None
    except BotoCoreError as error:
        raise Transient(E_UNREACHABLE, f"cannot {what}: the object store does not answer", got=str(error)) from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
