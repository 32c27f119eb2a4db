"""A store in memory."""

from __future__ import annotations

import hashlib

from protocol.store import MAX_OBJECT_BYTES, PresignedRequest, check_key, check_object, check_size, missing


class MemoryStore:
    """Implements ``protocol.store.Store``; ``objects`` may be damaged by tests."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.index: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        self.objects[sha256] = data
        return sha256

    def get(self, sha256: str, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        check_size(sha256, self.size(sha256), max_bytes)
        return check_object(sha256, self.objects[sha256])

    def read(self, sha256: str, start: int, end: int) -> bytes:
        self.size(sha256)
        return self.objects[sha256][start:end]

    def has(self, sha256: str) -> bool:
        return check_key(sha256) in self.objects

    def size(self, sha256: str) -> int:
        if not self.has(sha256):
            raise missing(sha256)
        return len(self.objects[sha256])

    def stamp(self, sha256: str) -> tuple[int, ...] | None:
        return None

    def delete(self, sha256: str) -> None:
        self.objects.pop(check_key(sha256), None)

    def announce(self, name: str, data: bytes) -> None:
        self.index[check_key(name)] = data

    def announced(self, name: str) -> bytes | None:
        return self.index.get(check_key(name))

    def presign_put(self, sha256: str, size: int, expires_s: int) -> PresignedRequest | None:
        return None

    def presign_get(self, sha256: str, expires_s: int) -> PresignedRequest | None:
        return None
