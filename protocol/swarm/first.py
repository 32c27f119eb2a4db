"""Peers before the store: a pool of sources whose chunks come from the swarm where it has them.

Implements the same two methods as :class:`protocol.weights.pool.SourcePool`, so that whoever fetches chunks need not
know of the swarm. Both verify what they hand on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from protocol.errors import E_NOT_FOUND, AssayError, LocalFault
from protocol.messages import ChunkRef
from protocol.swarm.swarm import Swarm
from protocol.weights.pool import SourcePool

#: Chunks whose hashes fall on one stripe wait for one another.
_STRIPES: Final = 64


class SwarmFirst:
    """Chunks from peers, else from the pool, kept in the pool's cache. Thread-safe."""

    def __init__(self, pool: SourcePool, swarm: Swarm):
        self._pool, self._swarm, self.cache = pool, swarm, pool.cache
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    def fetch(self, sha256: str, size: int) -> bytes:
        """The chunk, verified.

        Raises:
            AssayError: as :meth:`protocol.weights.pool.SourcePool.fetch`, when no peer has it either.
        """
        with self._stripes[int(sha256[:4], 16) % _STRIPES]:
            data = self.cache.get(sha256)
            if data is None:
                data = self._fetch(sha256, size)
                self._swarm.shelf.settle([sha256])
            return data

    def fetch_all(self, refs: Sequence[ChunkRef], *, threads: int = 4) -> None:
        """Have all these chunks in the cache, several on their way at once; the first error ends it.

        Raises:
            AssayError: as :meth:`fetch`.
        """
        sizes = {ref.sha256: ref.size_bytes for ref in refs if not self.cache.store.has(ref.sha256)}
        if not sizes:
            return
        keys = self._swarm.plan(list(sizes))
        with ThreadPoolExecutor(max(1, min(threads, len(keys))), thread_name_prefix="chunks") as workers:
            jobs = [workers.submit(self.fetch, key, sizes[key]) for key in keys]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                workers.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                self._swarm.shelf.settle(keys, came=False)

    def _fetch(self, sha256: str, size: int) -> bytes:
        try:
            return self._keep(sha256, self._swarm.fetch(sha256, size))
        except LocalFault as error:
            if error.code != E_NOT_FOUND:
                raise
        self._swarm.shelf.expect([sha256])
        try:
            return self._pool.fetch(sha256, size)
        except AssayError as refused:
            self._swarm.shelf.settle([sha256], came=False)
            try:
                return self._keep(sha256, self._swarm.fetch(sha256, size, whole_swarm=True))
            except LocalFault:
                raise refused from None

    def _keep(self, sha256: str, data: bytes) -> bytes:
        self.cache.discard(sha256)
        self.cache.append(sha256, data)
        self.cache.keep(sha256)
        return data
