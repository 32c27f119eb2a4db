"""Everything a run has published of its weights, as anybody with the root key can check it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from protocol.envelope import Envelope
from protocol.errors import E_OBJECT_HASH, E_STORE, E_USAGE, AssayError, LocalFault, PeerFault
from protocol.messages import CheckpointHead, CheckpointManifest, ChunkRef, RunManifest
from protocol.paths import replacing
from protocol.root_trust import open_run_manifest
from protocol.weights.damage import Damage, damages, leaves_of
from protocol.weights.follower import CheckpointFollower
from protocol.weights.layout import Layout, State, read_safetensors, write_safetensors
from protocol.weights.link import Link, check_hash, open_chain
from protocol.weights.pool import SourcePool
from protocol.weights.skips import SKIP_EVERY, CheckpointSkip, FindSkips, announced_skips, index_name, read_announcement
from protocol.weights.state_root import decode_leaves, leaf_list, root_of, usable_hash

#: Manifests asked for at once.
_WINDOW: Final = 500


class Teller(Protocol):
    """Who tells of a run; :class:`protocol.client.CoordinatorClient` is one."""

    def run_manifest(self) -> Envelope:
        """The signed run manifest."""
        ...

    def head(self) -> Envelope:
        """The newest head."""
        ...

    def checkpoints(self, first: int, last: int) -> list[Envelope]:
        """Manifests of versions first to last."""
        ...

    def fetch(self, sha256: str) -> bytes:
        """A small object by hash."""
        ...

    def skips(self, name: str) -> bytes | None:
        """Announced skips by name."""
        ...


@dataclass(frozen=True)
class Comparison:
    """A state beside a version."""

    manifest: CheckpointManifest  #: of the version
    root: str  #: of the state
    damaged: list[Damage] | None  #: where they differ; None when they do and the version has no leaf list

    @property
    def same(self) -> bool:
        """Whether they are the same, bit by bit."""
        return self.root == self.manifest.state_root


@dataclass(frozen=True)
class Catalogue:
    """A run's chain from version 0 to its head, every signature and link checked."""

    teller: Teller
    run: RunManifest
    layout: Layout
    head: CheckpointHead
    links: Sequence[Link]

    @classmethod
    def read(cls, teller: Teller, root_key: str) -> Catalogue:
        """Ask for everything and check it. A head past its expiry is accepted: the run may be over.

        Raises:
            PeerFault: something is not signed, not of this run, or does not chain.
            LocalFault, Transient: it cannot be had.
        """
        run = open_run_manifest(teller.run_manifest(), root_key)
        layout_bytes = teller.fetch(run.model.layout_sha256)
        if hashlib.sha256(layout_bytes).hexdigest() != run.model.layout_sha256:
            raise PeerFault(E_OBJECT_HASH, "the layout is not the run's", expected=run.model.layout_sha256)
        layout = Layout.from_bytes(layout_bytes)
        head = CheckpointHead.open(teller.head(), run.roles.learner, run_id=run.run_id)
        envelopes: list[Envelope] = []
        while len(envelopes) <= head.version:
            window = teller.checkpoints(len(envelopes), min(len(envelopes) + _WINDOW - 1, head.version))
            if not window:
                break
            envelopes += window
        links = open_chain(envelopes, run.roles.learner, run.run_id, layout)
        for link in links:
            check_hash(link, run.model.state_hash)
        if [link.version for link in links] != list(range(head.version + 1)):
            raise PeerFault(
                E_OBJECT_HASH, "not all versions were told of", expected=f"0 to {head.version}", got=len(links)
            )
        if links[-1].digest != head.manifest_sha256:
            raise PeerFault(
                E_OBJECT_HASH, "the head names another newest version", expected=head.manifest_sha256,
                got=links[-1].digest,
            )
        return cls(teller, run, layout, head, links)

    @cached_property
    def manifests(self) -> list[CheckpointManifest]:
        """Of all versions, ascending."""
        return [link.manifest for link in self.links]

    def skips_to(self, version: int) -> list[CheckpointSkip]:
        """Skips announced for a version that a follower would consider."""
        by_version = {manifest.version: manifest for manifest in self.manifests}
        return announced_skips(self.teller.skips, self.manifests[version], by_version)

    def all_skips(self, find: FindSkips | None = None) -> Iterator[CheckpointSkip]:
        """Every well-formed skip that is announced, usable or not."""
        find = find or self.teller.skips
        for manifest in self.manifests[SKIP_EVERY::SKIP_EVERY]:
            yield from read_announcement(find(index_name(manifest)), self.run.run_id)

    def manifest_at(self, version: int) -> CheckpointManifest:
        """Of one version; negative ones count from the newest.

        Raises:
            LocalFault: ``E_USAGE``.
        """
        if not -len(self.links) <= version < len(self.links):
            raise LocalFault(
                E_USAGE, f"there is no version {version}", expected=f"0 to {self.head.version}", got=version,
                hint="assay weights ls shows them",
            )
        return self.manifests[version]

    def follower(self, pool: SourcePool) -> CheckpointFollower:
        """A follower of this run that holds nothing yet."""

        def manifests(first: int, last: int) -> Sequence[Envelope]:
            return [link.envelope for link in self.links[first : last + 1]]

        return CheckpointFollower(
            pool.fetch, self.run.roles.learner, self.run.run_id, self.layout, manifests=manifests,
            skips=self.teller.skips, state_hash=self.run.model.state_hash, keep_versions=0,
        )

    def damaged(self, pool: SourcePool, manifest: CheckpointManifest) -> list[tuple[ChunkRef, AssayError]]:
        """The objects of a version that cannot be had in one piece, and why; a leaf list must lead to the root."""
        found = []
        for ref in manifest.objects:
            try:
                data = pool.fetch(ref.sha256, ref.size_bytes)
                if ref == manifest.leaves:
                    decode_leaves(self.layout, data, manifest.state_root)
            except AssayError as error:
                found.append((ref, error))
        return found

    def compare(self, pool: SourcePool, state: State, version: int | None = None) -> Comparison:
        """Which version a state is, or where it differs from ``version`` (None: the newest), by that one's leaf list.

        Raises:
            LocalFault: ``E_STATE`` when it is not of the run's layout; ``E_USAGE``; ``E_HASH_MISSING``.
            AssayError: the leaf list cannot be had or is wrong.
        """
        hash_id = usable_hash(self.run.model.state_hash)
        leaves = leaf_list(self.layout, state, hash_id=hash_id)
        root = root_of(self.layout, leaves, hash_id)
        if version is None:
            same = [manifest for manifest in self.manifests if manifest.state_root == root]
            manifest = same[-1] if same else self.manifests[-1]
        else:
            manifest = self.manifest_at(version)
        if manifest.state_root == root:
            return Comparison(manifest, root, [])
        expected = leaves_of(self.layout, manifest, pool.fetch)
        return Comparison(manifest, root, None if expected is None else damages(self.layout, expected, leaves))

    def export(self, follower: CheckpointFollower, folder: Path) -> list[Path]:
        """Write what ``follower`` holds as a Hugging Face folder: the run's model files and ``model.safetensors``.

        Raises:
            LocalFault: ``E_USAGE`` when the folder holds other weights; ``E_STORE``, ``E_FILE``, ``E_STATE`` when it
                cannot be written; ``E_OBJECT_HASH``.
            AssayError: a model file cannot be had.
        """
        written = []
        self._require_ours(folder, follower)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, sha256 in self.run.model.files.items():
                data = self.teller.fetch(sha256)
                if hashlib.sha256(data).hexdigest() != sha256:
                    raise LocalFault(E_OBJECT_HASH, f"{name} is not the run's", expected=sha256)
                with replacing(folder / name) as file:
                    file.write(data)
                written.append(folder / name)
            draft, final = folder / "model.safetensors.new", folder / "model.safetensors"
            about = {"assay_run": self.run.run_id, "assay_version": str(follower.version)}
            write_safetensors(draft, self.layout, follower.state, metadata=about)
            draft.replace(final)
        except OSError as error:
            raise LocalFault(E_STORE, f"cannot write to {folder}", got=str(error)) from None
        return [*written, final]

    def _require_ours(self, folder: Path, follower: CheckpointFollower) -> None:
        """Whatever weights are in ``folder`` are those that are about to be written."""
        found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not found:
            return
        try:
            layout, state = read_safetensors(*found)
        except (PeerFault, LocalFault):
            layout, state = None, {}
        if layout is None or layout.entries != self.layout.entries or any(
            not np.array_equal(state[name], words) for name, words in follower.state.items()
        ):
            raise LocalFault(
                E_USAGE, f"{folder} holds other weights", expected="a folder without any, or with this version's",
                got=found[0].name, hint="choose another folder",
            )

    def foreign_files(self, folder: Path) -> list[str]:
        """Names of the run's model files (configuration, tokenizer) that ``folder`` lacks or has otherwise."""
        return [
            name for name, sha256 in self.run.model.files.items()
            if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != sha256
        ]
