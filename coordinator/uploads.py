"""Where nodes put their objects: a presigned address of the store, or a signed address on this process.

The signature is HMAC-SHA256 over the node, the object's hash, its exact size and the expiry; the bytes are hashed as
they come. What has not come whole yet is on disk, not in memory.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

import anyio

from coordinator.config import CoordinatorConfig
from coordinator.drafts import Draft
from coordinator.places import Places
from protocol.api import E_UPLOAD_URL, UploadReply
from protocol.errors import E_OBJECT_HASH, E_TOO_LARGE, PeerFault
from protocol.messages import UploadRequest
from protocol.store import Store

#: Whole objects in memory at the same time, on their way into the store.
_KEPT_AT_ONCE: Final = 2


class Uploads:
    """Hands out addresses and takes objects in."""

    def __init__(self, store: Store, secret: bytes, config: CoordinatorConfig):
        self._store, self._secret, self._config = store, secret, config
        self.places = Places(config.max_uploads, config.max_uploads_per_node)
        self._keeping = anyio.CapacityLimiter(_KEPT_AT_ONCE)

    def check_size(self, request: UploadRequest) -> None:
        """Refuse an object larger than this coordinator takes.

        Raises:
            PeerFault: ``E_TOO_LARGE``.
        """
        if request.object_bytes > self._config.max_object_bytes:
            raise PeerFault(
                E_TOO_LARGE, "object too large", expected=f"<= {self._config.max_object_bytes} bytes",
                got=request.object_bytes,
            )

    def grant(self, request: UploadRequest, now_ms: int) -> UploadReply:
        """Where a node that may upload puts the object of its authenticated request.

        Raises:
            LocalFault, Transient: of the store.
        """
        sha256, size, node = request.object_sha256, request.object_bytes, request.node_id
        presigned = self._store.presign_put(sha256, size, self._config.upload_ms // 1000)
        if presigned is not None:
            return UploadReply(url=presigned.url, method=presigned.method, headers=presigned.headers, exists=False)
        expires_ms = now_ms + self._config.upload_ms
        signature = self._sign(node, sha256, size, expires_ms)
        url = f"/v1/uploads/{sha256}?size={size}&expires={expires_ms}&node={node}&sig={signature}"
        return UploadReply(url=url, headers={"content-type": "application/octet-stream"}, exists=False)

    def check(self, node: str, sha256: str, size: int, expires_ms: int, signature: str, now_ms: int) -> None:
        """Refuse an address that we did not sign or that has expired, before a byte is read.

        Raises:
            PeerFault: ``E_UPLOAD_URL``.
        """
        if not hmac.compare_digest(self._sign(node, sha256, size, expires_ms).encode(), signature.encode()):
            raise PeerFault(E_UPLOAD_URL, "the upload address is not one of ours", got=signature[:16])
        if now_ms > expires_ms:
            raise PeerFault(E_UPLOAD_URL, "the upload address has expired", expected=f"<= {expires_ms}", got=now_ms)

    def draft(self) -> Draft:
        """Room for an object that is received."""
        return Draft(self._config.directory)

    async def keep(self, sha256: str, size: int, draft: Draft) -> None:
        """Store what was received; durable when it returns.

        Raises:
            PeerFault: ``E_OBJECT_HASH`` when it is not the announced object.
            LocalFault, Transient: of the store.
        """
        if draft.sha256 != sha256 or draft.size != size:
            raise PeerFault(
                E_OBJECT_HASH, "these bytes are not the announced object", expected=f"{sha256}, {size} bytes",
                got=f"{draft.sha256}, {draft.size} bytes",
            )
        await anyio.to_thread.run_sync(lambda: self._store.put(draft.read()), limiter=self._keeping)

    def _sign(self, node: str, sha256: str, size: int, expires_ms: int) -> str:
        text = f"assay.upload.v2\0{node}\0{sha256}\0{size}\0{expires_ms}".encode()
        return hmac.digest(self._secret, text, hashlib.sha256).hex()
