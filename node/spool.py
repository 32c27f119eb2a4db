"""Finished work on disk until the coordinator's receipt is there, so that a kill loses nothing that was finished."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from protocol.disk import append_line, json_lines, sync_directory, write_durable
from protocol.errors import LocalFault, PeerFault, code
from protocol.messages import Commitment

E_SPOOL = code("E_SPOOL", "finished work cannot be written to or read from the node's spool")

_COMMITMENT, _BUNDLE = "commitment.json", "bundle.bin"


@dataclass(frozen=True)
class Spooled:
    """One finished lease: the commitment, byte for byte the same at every try, and the encoded bundle."""

    commitment: Commitment
    data: bytes


class Spool:
    """A folder with one folder per finished lease; what is half written has a name that is never read."""

    def __init__(self, path: Path):
        self._path = path

    def put(self, item: Spooled) -> None:
        """Keep ``item`` durably.

        Raises:
            LocalFault: ``E_SPOOL``.
        """
        final = self._path / item.commitment.lease_id
        draft = self._path / f".{item.commitment.lease_id}.{os.getpid()}"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            write_durable(draft / _BUNDLE, item.data)
            write_durable(draft / _COMMITMENT, item.commitment.to_payload())
            sync_directory(draft)
            draft.rename(final)
            sync_directory(self._path)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise LocalFault(E_SPOOL, f"cannot keep finished work in {self._path}", got=str(error)) from None

    def ids(self) -> list[str]:
        """Lease ids of all items, oldest first."""
        if not self._path.exists():
            return []
        found = [entry for entry in self._path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        return [entry.name for entry in sorted(found, key=lambda entry: (entry.stat().st_mtime_ns, entry.name))]

    def get(self, lease_id: str) -> Spooled:
        """Read an item back.

        Raises:
            LocalFault: ``E_SPOOL`` when it is missing or damaged.
        """
        folder = self._path / lease_id
        try:
            commitment = Commitment.from_payload((folder / _COMMITMENT).read_bytes())
            data = (folder / _BUNDLE).read_bytes()
        except (OSError, PeerFault) as error:
            raise LocalFault(E_SPOOL, f"cannot read finished work {folder}", got=str(error)[:200]) from None
        digest = hashlib.sha256(data).hexdigest()
        if digest != commitment.object_sha256:
            raise LocalFault(E_SPOOL, f"{folder} is damaged", expected=commitment.object_sha256, got=digest)
        return Spooled(commitment, data)

    def drop(self, lease_id: str) -> None:
        """Forget an item; unknown ones are ignored."""
        shutil.rmtree(self._path / lease_id, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed process left half written."""
        if self._path.exists():
            for entry in self._path.iterdir():
                if entry.name.startswith("."):
                    shutil.rmtree(entry, ignore_errors=True)


class Receipts:
    """The coordinator's signed receipts, one JSON line each: the node's proof of what it handed in."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()

    def add(self, lease_id: str, receipt_id: str, receipt: dict[str, object]) -> None:
        """Append a receipt, durably: the work it stands for is forgotten next.

        Raises:
            LocalFault: ``E_SPOOL``.
        """
        try:
            with self._lock:
                append_line(
                    self._path, json.dumps({"lease_id": lease_id, "receipt_id": receipt_id, "receipt": receipt})
                )
        except OSError as error:
            raise LocalFault(E_SPOOL, f"cannot keep a receipt in {self._path}", got=str(error)) from None

    def find(self, what: str) -> tuple[str, dict[str, object]] | None:
        """(receipt id, receipt) of a receipt or lease id; None when none was kept."""
        with contextlib.suppress(OSError):
            for kept in json_lines(self._path):
                if what in (kept.get("receipt_id"), kept.get("lease_id")) and isinstance(kept.get("receipt"), dict):
                    return str(kept.get("receipt_id")), kept["receipt"]
        return None
