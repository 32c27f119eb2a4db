"""Where nodes put their objects: a presigned address of the store, or a signed address on this process.

The signature is HMAC-SHA256 over the object's hash, its exact size and the expiry; the bytes are hashed as they come.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.config import CoordinatorConfig
from protocol.api import E_UPLOAD_URL, UploadReply
from protocol.errors import E_OBJECT_HASH, E_RATE_LIMITED, E_TOO_LARGE, PeerFault, Transient
from protocol.messages import UploadRequest
from protocol.store import Store


class Uploads:
    """Hands out addresses and takes objects in."""

    def __init__(self, store: Store, secret: bytes, config: CoordinatorConfig):
        self._store, self._secret, self._config = store, secret, config
        self._places = threading.BoundedSemaphore(config.max_uploads)

    def grant(self, request: UploadRequest, now_ms: int) -> UploadReply:
        """Where to put the object of an authenticated request.

        Raises:
            PeerFault: ``E_TOO_LARGE``.
            LocalFault, Transient: of the store.
        """
        if request.object_bytes > self._config.max_object_bytes:
            raise PeerFault(
                E_TOO_LARGE, "object too large", expected=f"<= {self._config.max_object_bytes} bytes",
                got=request.object_bytes,
            )
        sha256, size = request.object_sha256, request.object_bytes
        if self._store.has(sha256):
            return UploadReply(url="", exists=True)
        presigned = self._store.presign_put(sha256, size, self._config.upload_ms // 1000)
        if presigned is not None:
            return UploadReply(url=presigned.url, method=presigned.method, headers=presigned.headers, exists=False)
        expires_ms = now_ms + self._config.upload_ms
        url = f"/v1/uploads/{sha256}?size={size}&expires={expires_ms}&sig={self._sign(sha256, size, expires_ms)}"
        return UploadReply(url=url, headers={"content-type": "application/octet-stream"}, exists=False)

    def check(self, sha256: str, size: int, expires_ms: int, signature: str, now_ms: int) -> None:
        """Refuse an address that we did not sign or that has expired, before a byte is read.

        Raises:
            PeerFault: ``E_UPLOAD_URL``.
        """
        if not hmac.compare_digest(self._sign(sha256, size, expires_ms).encode(), signature.encode()):
            raise PeerFault(E_UPLOAD_URL, "the upload address is not one of ours", got=signature[:16])
        if now_ms > expires_ms:
            raise PeerFault(E_UPLOAD_URL, "the upload address has expired", expected=f"<= {expires_ms}", got=now_ms)

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the few uploads that are received at the same time, which bounds the memory they take.

        Raises:
            Transient: ``E_RATE_LIMITED``.
        """
        if not self._places.acquire(blocking=False):
            busy = Transient(E_RATE_LIMITED, "too many uploads at once", expected=f"<= {self._config.max_uploads}")
            busy.retry_after_s = 1.0
            raise busy
        try:
            yield
        finally:
            self._places.release()

    def keep(self, sha256: str, size: int, data: bytes) -> None:
        """Store the received bytes; durable when it returns.

        Raises:
            PeerFault: ``E_OBJECT_HASH`` when they are not the announced object.
            LocalFault, Transient: of the store.
        """
        got = hashlib.sha256(data).hexdigest()
        if got != sha256 or len(data) != size:
            raise PeerFault(
                E_OBJECT_HASH, "these bytes are not the announced object", expected=f"{sha256}, {size} bytes",
                got=f"{got}, {len(data)} bytes",
            )
        self._store.put(data)

    def _sign(self, sha256: str, size: int, expires_ms: int) -> str:
        text = f"assay.upload.v1\0{sha256}\0{size}\0{expires_ms}".encode()
        return hmac.digest(self._secret, text, hashlib.sha256).hex()
