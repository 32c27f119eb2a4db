"""The weights of any version, made on demand: one live state that steps forward by diffs, back and forth by logs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from protocol.errors import LocalFault, code
from protocol.messages import CheckpointManifest, ChunkRef
from protocol.weights import damage
from protocol.weights.cache import Fetch, verified_chunks
from protocol.weights.diff import apply_patch, decode_anchor, decode_diff
from protocol.weights.layout import Layout, State
from protocol.weights.live import E_STATE_ROOT
from protocol.weights.state_root import hash_named, leaf_list, root_of, state_root
from protocol.weights.undo import Undo
from verifier.checkpoints import CheckpointBook

E_VERSION_MISSING = code("E_VERSION_MISSING", "the weights of a version cannot be had here")


#: Steps that are kept, back and forth together; other versions are rebuilt from diffs and anchors.
KEPT_UNDOS: Final = 32
#: Bytes of diff chunks kept in memory, so that stepping back and forth fetches nothing twice.
KEPT_CHUNK_BYTES: Final = 256 * 2**20


class States(Protocol):
    """Where the weights of a version come from. A returned state is valid until the next call."""

    def state(self, version: int) -> State:
        """The weights of ``version``.

        Raises:
            LocalFault: ``E_VERSION_MISSING`` or ``E_STATE_ROOT``; Transient: fetching failed.
        """


@dataclass
class Moves:
    """How states were come by, each counted; stepping decodes, fetches and hashes nothing."""

    loaded: int = 0  #: whole states decoded from an anchor
    applied: int = 0  #: versions made by applying a diff
    stepped: int = 0  #: versions gone back or forth by a log


class StateRing:
    """States rebuilt from a store's objects; each root is checked the first time a version is reached."""

    def __init__(
        self, layout: Layout, book: CheckpointBook, fetch: Fetch, *, kept_undos: int = KEPT_UNDOS
    ):
        self._layout, self._book, self._fetch, self._kept_undos = layout, book, fetch, kept_undos
        self._state: State | None = None
        self._version = -1
        self._undos: list[Undo] = []  #: the last of them leads from ``_version`` to the version before
        self._redos: list[Undo] = []  #: the last of them leads from ``_version`` to the version after
        self._rooted: set[int] = set()
        self._chunks: OrderedDict[str, bytes] = OrderedDict()
        self.moves = Moves()

    def state(self, version: int) -> State:
        """The weights of ``version`` (see :class:`States`)."""
        if self._state is not None and self._version > version and self._version - version <= len(self._undos):
            while self._version > version:
                self._exchange(self._undos, self._redos, -1)
        if self._state is None or self._version > version or not self._steps_lead_to(version):
            self._load_anchor(version)
        while self._version < version:
            if self._redos:
                self._exchange(self._redos, self._undos, 1)
            else:
                self._step()
        assert self._state is not None
        return self._state

    def _exchange(self, source: list[Undo], target: list[Undo], by: int) -> None:
        """Go one version back or forth by the log of a step that was taken before."""
        assert self._state is not None
        source[-1].swap(self._state)
        target.append(source.pop())
        self._version += by
        self.moves.stepped += 1

    def _steps_lead_to(self, version: int) -> bool:
        manifests = [self._book.get(step) for step in range(self._version + 1, version + 1)]
        return all(manifest is not None and bool(manifest.diff) for manifest in manifests)

    def _load_anchor(self, version: int) -> None:
        anchor = self._book.nearest_anchor(version)
        manifest = None if anchor is None else self._book.get(anchor)
        if anchor is None or manifest is None:
            raise LocalFault(
                E_VERSION_MISSING, f"no way to rebuild version {version}", expected="an anchor and diffs up to it",
                got="an incomplete chain of manifests", hint="give a folder or store that holds this version",
            )
        self._state, self._version = None, -1
        self._undos.clear()
        self._redos.clear()
        self._state = decode_anchor(self._get(manifest.anchor), self._layout, manifest.anchor)
        self._version = anchor
        self.moves.loaded += 1
        self._check_root(manifest)

    def _step(self) -> None:
        """Go one version forward, or stay as before when that fails."""
        assert self._state is not None
        manifest = self._book.get(self._version + 1)
        assert manifest is not None
        patch = decode_diff(self._layout, self._get(manifest.diff), manifest.diff)
        undo = apply_patch(self._layout, self._state, patch)
        try:
            self._check_root(manifest)
        except BaseException:
            undo.revert(self._state)
            raise
        self._version = manifest.version
        self.moves.applied += 1
        self._undos.append(undo)
        del self._undos[: -self._kept_undos or None]

    def _check_root(self, manifest: CheckpointManifest) -> None:
        if manifest.version in self._rooted:
            return
        assert self._state is not None
        hash_id = hash_named(manifest.state_hash)
        leaves = leaf_list(self._layout, self._state, hash_id=hash_id)
        root = root_of(self._layout, leaves, hash_id)
        if root != manifest.state_root:
            where = damage.locate(self._layout, manifest, leaves, self._chunk)
            what = f"version {manifest.version} has another root" + (f", differing in {where}" if where else "")
            raise LocalFault(E_STATE_ROOT, what, expected=manifest.state_root, got=root)
        self._rooted.add(manifest.version)

    def _get(self, refs: Sequence[ChunkRef]) -> list[bytes]:
        return list(verified_chunks(self._chunk, refs))

    def _chunk(self, sha256: str, size: int) -> bytes:
        if sha256 in self._chunks:
            self._chunks.move_to_end(sha256)
            return self._chunks[sha256]
        data = self._fetch(sha256, size)
        self._chunks[sha256] = data
        total = sum(map(len, self._chunks.values()))
        while total > KEPT_CHUNK_BYTES and len(self._chunks) > 1:
            total -= len(self._chunks.popitem(last=False)[1])
        return data


class Folders:
    """States of model folders read from disk, found by their root; the offline auditor's source."""

    def __init__(self, layout: Layout, book: CheckpointBook, loaded: Sequence[State], fallback: States | None = None):
        self._book, self._fallback = book, fallback
        self._by_root = {state_root(layout, state, hash_id=book.hash_id): state for state in loaded}

    def state(self, version: int) -> State:
        """The weights of ``version`` (see :class:`States`)."""
        manifest = self._book.get(version)
        found = None if manifest is None else self._by_root.get(manifest.state_root)
        if found is not None:
            return found
        if self._fallback is not None:
            return self._fallback.state(version)
        raise LocalFault(
            E_VERSION_MISSING, f"no folder holds version {version}",
            expected="a manifest of this version" if manifest is None else f"state root {manifest.state_root}",
            got=", ".join(root[:16] for root in self._by_root) or "no folder",
            hint="give --checkpoint once for every version the rollouts used, or the run's object store",
        )
