"""Snapshots: a follower's state on disk, so that a restart does not fetch it again.

A directory holds ``state-<manifest digest>.safetensors`` and ``checkpoint.json``, which names the one that counts. The
second is replaced by a rename after the first is durable, so a crash leaves either the old pair or the new one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol import canonical
from protocol.disk import sync_directory
from protocol.envelope import Envelope
from protocol.errors import LocalFault, PeerFault, code
from protocol.weights.layout import Layout, State, check_state, read_safetensors, write_safetensors

E_SNAPSHOT = code("E_SNAPSHOT", "a saved checkpoint cannot be written or read")

_POINTER: Final = "checkpoint.json"
_FORMAT: Final = "assay.snapshot.v1"
_MAX_POINTER_BYTES: Final = 16 * canonical.MAX_MESSAGE_BYTES


@dataclass(frozen=True)
class Snapshot:
    """What was read; nothing in it is verified yet, except that the state fits the layout."""

    state: State
    manifest: Envelope
    head: Envelope | None


def write(path: Path, layout: Layout, state: State, manifest: Envelope, head: Envelope | None) -> None:
    """Replace the snapshot in directory ``path``.

    Raises:
        LocalFault: ``E_SNAPSHOT`` or ``E_STATE``.
    """
    name = f"state-{manifest.digest}.safetensors"
    pointer = canonical.encode({
        "format": _FORMAT, "state_file": name, "manifest": manifest.to_dict(),
        "head": None if head is None else head.to_dict(),
    })
    try:
        path.mkdir(parents=True, exist_ok=True)
        draft = path / "state.tmp"
        write_safetensors(draft, layout, state)
        _publish(draft, path / name)
        draft = path / "checkpoint.tmp"
        draft.write_bytes(pointer)
        _publish(draft, path / _POINTER)
        for old in path.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()
    except OSError as error:
        raise LocalFault(E_SNAPSHOT, f"cannot save the checkpoint in {path}", got=str(error)) from None


def read(path: Path, layout: Layout) -> Snapshot | None:
    """The snapshot in directory ``path``; None when there is none.

    Raises:
        LocalFault: ``E_SNAPSHOT`` or ``E_STATE``.
    """
    try:
        data = (path / _POINTER).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(path, error) from None
    try:
        value: Any = canonical.decode(data, max_bytes=_MAX_POINTER_BYTES)
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise _damaged(path, "not a snapshot of version 1")
        manifest = Envelope.from_dict(value.get("manifest"))
        head = None if value.get("head") is None else Envelope.from_dict(value["head"])
        found, state = read_safetensors(path / f"state-{manifest.digest}.safetensors")
    except PeerFault as error:
        raise _damaged(path, error) from None
    if found.entries != layout.entries:
        raise _damaged(path, f"layout {found.sha256} instead of {layout.sha256}")
    check_state(layout, state)
    return Snapshot(state, manifest, head)


def _publish(draft: Path, final: Path) -> None:
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(final)
    sync_directory(final.parent)


def _damaged(path: Path, why: object) -> LocalFault:
    return LocalFault(
        E_SNAPSHOT, f"the checkpoint saved in {path} is damaged", got=str(why),
        hint="remove the directory; the checkpoint is then fetched again",
    )
