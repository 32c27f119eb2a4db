"""The node's copy of the published weights: followed in the background, read by the engine between passes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, AssayError, LocalFault, PeerFault
from protocol.messages import CheckpointManifest, ChunkRef, RunManifest
from protocol.model_files import fetch_model_files
from protocol.weights.cache import ChunkCache
from protocol.weights.chain import CheckpointFollower, open_manifest
from protocol.weights.layout import Layout, State
from protocol.weights.link import E_CHECKPOINT_MIX
from protocol.weights.live import E_NO_VERSION
from protocol.weights.way import Way

_LOG = logging.getLogger(__name__)

#: Chunks asked for at once; after each such batch the log says how far a long download is.
AHEAD_CHUNKS: Final = 8


class Published(Protocol):
    """Who tells of checkpoints; :class:`protocol.client.CoordinatorClient` is one."""

    def head(self) -> Envelope:
        """The newest checkpoint head."""
        ...

    def checkpoint(self, version: int) -> Envelope:
        """The manifest of one version."""
        ...

    def checkpoints(self, first: int, last: int) -> list[Envelope]:
        """Manifests of versions first to last."""
        ...

    def skips(self, name: str) -> bytes | None:
        """Announced skips by name."""
        ...


class Chunks(Protocol):
    """Verified chunks; :class:`protocol.weights.pool.SourcePool` is one, alone or behind the swarm."""

    @property
    def cache(self) -> ChunkCache:
        """Where they are kept."""
        ...

    def fetch(self, sha256: str, size: int) -> bytes:
        """One chunk."""
        ...

    def fetch_all(self, refs: Sequence[ChunkRef]) -> None:
        """Have all of these in the cache."""
        ...


class Objects(Protocol):
    """Small objects by hash; :class:`protocol.client.CoordinatorClient` is one."""

    def fetch(self, sha256: str) -> bytes:
        """The object with this hash."""
        ...


class Weights:
    """Implements :class:`node.engine.WeightSource`. The lock is held while a diff is applied or a state is read.

    Chunks come from ``chunks``, whose sources may come and go.
    """

    def __init__(
        self, published: Published, chunks: Chunks, run: RunManifest, layout: Layout, folder: Path, *,
        threads: int = 1, on_version: Callable[[CheckpointManifest], None] | None = None,
    ):
        self._published, self._chunks, self._run, self._folder = published, chunks, run, folder
        self._on_version = on_version
        self._lock, self._polling = threading.RLock(), threading.Lock()
        self._manifests: dict[int, CheckpointManifest] = {}
        self._newest, self._announced = -1, -1
        self._follower = CheckpointFollower(
            chunks.fetch, run.roles.learner, run.run_id, layout, manifests=published.checkpoints,
            skips=published.skips, state_hash=run.model.state_hash, keep_versions=run.batch.max_lag_versions + 2,
            threads=threads,
        )

    # -- for the engine ----------------------------------------------------------------------------------

    def newest(self) -> int:
        """Newest version whose state is verified; -1 before the first."""
        return self._newest

    def has(self, version: int) -> bool:
        """Whether :meth:`state` would give this version."""
        return 0 <= version <= self._newest

    @contextmanager
    def state(self, version: int) -> Iterator[State]:
        """The bit patterns of a version, unchanged inside the block.

        Raises:
            LocalFault: ``E_NO_VERSION``.
        """
        with self._lock:
            yield self._follower.state_at(version)

    # -- for the background ------------------------------------------------------------------------------

    @property
    def announced(self) -> int:
        """Newest version a valid head named; -1 before the first."""
        return self._announced

    def frozen(self, now_ms: int) -> bool:
        """Whether the newest head we know has expired: nobody shows us a fresh one."""
        head = self._follower.head
        return head is not None and now_ms > head.expires_at_ms

    def poll(self, now_ms: int) -> bool:
        """Ask for the head and move to it; True when the state moved.

        Raises:
            PeerFault: what was published breaks a rule; the state stays where it is.
            Transient: the coordinator cannot be reached.
        """
        with self._polling:
            return self._poll(now_ms)

    def _poll(self, now_ms: int) -> bool:
        head = self._published.head()
        with self._lock:
            self._announced = self._follower.verify_head(head, now_ms).version
        way = self._follower.way_to(head, now_ms)  # only a poll moves the follower, so the engine need not wait
        if way is None:
            return False
        self._fetch_ahead(way)
        with self._lock:
            moved = self._follower.follow(way)
            self._note()
        return moved

    def prepare(self, version: int) -> None:
        """Have an older version ready, so that the engine need not wait for the network.

        Raises:
            LocalFault: ``E_NO_VERSION``.
            PeerFault: what was published breaks a rule.
            Transient: the coordinator cannot be reached.
        """
        if version != self._newest:
            with self._lock:
                self._follower.state_at(version)

    def manifest_of(self, version: int) -> CheckpointManifest:
        """The signed manifest of a version.

        Raises:
            PeerFault: it is not what the learner signed, or another version.
            Transient: the coordinator cannot be reached.
        """
        held = self._follower.manifest_of(version) or self._manifests.get(version)
        if held is None:
            envelope = self._published.checkpoint(version)
            held = open_manifest(envelope, self._run.roles.learner, self._run.run_id, self._follower.layout).manifest
            if held.version != version:
                raise PeerFault(
                    E_CHECKPOINT_MIX, "another version's manifest was served", expected=version, got=held.version
                )
            self._manifests[version] = held
        return held

    def digest_of(self, version: int) -> str:
        """Digest of the manifest whose weights :meth:`state` gives under ``version``.

        Raises:
            LocalFault: ``E_NO_VERSION`` when it gave none.
        """
        digest = self._follower.digest_of(version)
        if digest is None:
            raise LocalFault(E_NO_VERSION, f"the weights of version {version} were never here", expected=version)
        return digest

    def save(self) -> None:
        """Write the state to disk for a quick restart.

        Raises:
            LocalFault: it cannot be written.
        """
        if self._newest >= 0:
            with self._lock:
                self._follower.save(self._folder)

    def restore(self) -> bool:
        """Take up what :meth:`save` wrote; False when there is nothing usable."""
        try:
            with self._lock:
                found = self._follower.load(self._folder)
                if found:
                    self._note()
        except (LocalFault, PeerFault) as error:
            _LOG.warning("saved weights are not usable, fetching them again", extra={"code": error.code})
            return False
        return found

    def _note(self) -> None:
        manifest = self._follower.manifest
        self._newest = manifest.version
        self._announced = max(self._announced, manifest.version)
        if self._on_version is not None:
            self._on_version(manifest)

    def _fetch_ahead(self, way: Way) -> None:
        """Have the chunks on the way on disk while the engine goes on; what is wrong with them shows when applied."""
        if way.nbytes > self._chunks.cache.max_bytes // 2:
            return
        refs = way.refs
        try:
            for at in range(0, len(refs), AHEAD_CHUNKS):
                self._chunks.fetch_all(refs[at : at + AHEAD_CHUNKS])
                if len(refs) > AHEAD_CHUNKS:
                    done = sum(ref.size_bytes for ref in refs[: at + AHEAD_CHUNKS])
                    told = {"version": way.target.version, "bytes": done, "total": way.nbytes}
                    _LOG.info("fetching weights", extra=told)
        except AssayError as error:
            if error.code != E_NOT_FOUND and not any(step.relay for step in way.steps):
                raise
            _LOG.info("the cheapest way cannot be fetched whole", extra={"code": error.code})


def fetch_model(objects: Objects, run: RunManifest, folder: Path) -> Layout:
    """Have the model's files (configuration, tokenizer) and its layout in ``folder``; the layout.

    Raises:
        PeerFault: an object is not what the manifest names.
        Transient: the coordinator cannot be reached.
        LocalFault: ``E_STORE`` when the folder cannot be written to.
    """
    fetch_model_files({**run.model.files, "layout.json": run.model.layout_sha256}, folder, objects.fetch)
    return Layout.from_bytes((folder / "layout.json").read_bytes())
