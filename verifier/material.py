"""What an offline auditor has at hand: model folders and object stores on its disk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from protocol.errors import E_NOT_FOUND, E_USAGE, LocalFault
from protocol.messages import RunManifest
from protocol.store import MAX_OBJECT_BYTES, DirectoryStore
from protocol.weights.layout import Layout, State, read_safetensors
from verifier.checkpoints import CheckpointBook
from verifier.states import Folders, StateRing, States

_SHARD: Final = re.compile(r"[0-9a-f]{2}")
#: Files beside the weights that are looked at when an object is wanted by hash; larger ones are data, not settings.
_MAX_SMALL_FILE: Final = 64 * 2**20


@dataclass(frozen=True)
class Material:
    """Folders given on the command line. Nothing in them is trusted: objects by hash, weights by state root."""

    models: Sequence[Path]  #: Hugging Face folders
    stores: Sequence[DirectoryStore]
    files: Sequence[Path] = field(default=())  #: single objects, for example a task's data

    @classmethod
    def of(cls, folders: Sequence[Path], files: Sequence[Path] = ()) -> Material:
        """Tell model folders from object stores.

        Raises:
            LocalFault: ``E_USAGE`` for a folder that is neither.
        """
        models, stores = [], []
        for folder in folders:
            if any(folder.glob("*.safetensors")):
                models.append(folder)
            elif any(path.is_dir() and _SHARD.fullmatch(path.name) for path in folder.glob("??")):
                stores.append(DirectoryStore(folder))
            else:
                raise LocalFault(
                    E_USAGE, f"{folder} holds no checkpoint", expected="*.safetensors or an object store",
                    got=", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "an empty folder",
                    hint="a run's object store is the folder 'store' of its coordinator",
                )
        return cls(models, stores, files)

    def fetch(self, sha256: str) -> bytes:
        """An object by hash, from a store or a file beside the weights.

        Raises:
            LocalFault: ``E_NOT_FOUND``.
        """
        for store in self.stores:
            if store.has(sha256):
                return store.get(sha256)
        for path in self._small_files():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
        raise LocalFault(
            E_NOT_FOUND, f"object {sha256[:16]} is in none of the folders", expected=sha256,
            hint="give the run's object store with --checkpoint, or the file itself with --data",
        )

    @cached_property
    def loaded(self) -> list[tuple[Layout, State]]:
        """The weights of every model folder.

        Raises:
            LocalFault: ``E_STATE``.
        """
        return [read_safetensors(*sorted(folder.glob("*.safetensors"))) for folder in self.models]

    def layout(self, run: RunManifest) -> Layout:
        """The run's layout, from a store or from a folder whose weights have it.

        Raises:
            LocalFault: ``E_NOT_FOUND``.
        """
        for layout, _ in self.loaded:
            if layout.sha256 == run.model.layout_sha256:
                return layout
        return Layout.from_bytes(self.fetch(run.model.layout_sha256))

    def states(self, run: RunManifest, book: CheckpointBook) -> States:
        """Weights of any version: a folder with the right root, else rebuilt from a store."""
        layout = self.layout(run)
        fitting = [state for found, state in self.loaded if found.sha256 == layout.sha256]
        return Folders(layout, book, fitting, StateRing(layout, book, self._chunk) if self.stores else None)

    def _chunk(self, sha256: str, size: int) -> bytes:
        return self.fetch(sha256)

    def _small_files(self) -> Iterator[Path]:
        yield from (path for path in self.files if path.stat().st_size <= MAX_OBJECT_BYTES)
        for folder in self.models:
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.suffix != ".safetensors" and path.stat().st_size <= _MAX_SMALL_FILE:
                    yield path
