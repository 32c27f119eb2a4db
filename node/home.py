"""A node's home: one folder that holds its key, the run it is pinned to, its weights and its unsent work."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.config import Config
from protocol.envelope import Envelope
from protocol.errors import LocalFault, code
from protocol.identity import Identity
from protocol.messages import Hex16, Hex32, Name, RunManifest

E_HOME = code("E_HOME", "a node's home folder is damaged, in use, of another run or cannot be written")
E_NO_HOME = code("E_NO_HOME", "a folder is not the home of a node: nobody joined a run there", usage=True)


class Pin(Config):
    """What joining fixed for good: whom to trust and where to find them."""

    coordinator: str  #: base URL
    root: Hex32  #: root public key
    run_id: Hex16
    name: Name


class Home:
    """Paths and atomic files of one node."""

    def __init__(self, path: Path):
        self.path = path
        self.key = path / "key"
        self.model = path / "model"
        self.weights = path / "weights"
        self.chunks = path / "chunks"
        self.spool = path / "spool"
        self.log = path / "node.log"
        self.receipts = path / "receipts.jsonl"
        self._pin, self._manifest = path / "node.json", path / "manifest.json"
        self._state, self._status, self._paused = path / "state.json", path / "status.json", path / "paused"
        self._peers = path / "peers.json"

    @property
    def joined(self) -> bool:
        """Whether the home belongs to a run."""
        return self._pin.exists() and self._manifest.exists()

    def identity(self) -> Identity:
        """The node's key.

        Raises:
            LocalFault: ``E_KEY_FILE``, ``E_NO_HOME``, ``E_HOME``.
        """
        self._require_join()
        return Identity.load(self.key)

    def pin(self) -> Pin:
        """The run and the root key the node is pinned to.

        Raises:
            LocalFault: ``E_NO_HOME``, ``E_HOME``.
        """
        self._require_join()
        try:
            return Pin.model_validate_json(self._pin.read_bytes())
        except (OSError, ValueError) as error:
            raise LocalFault(
                E_HOME, f"{self._pin} cannot be read", got=str(error)[:200], hint="assay node join LINK"
            ) from None

    def manifest(self) -> RunManifest:
        """The run manifest, its signature checked against the pinned root key.

        Raises:
            LocalFault: ``E_HOME``.
            PeerFault: the file was tampered with, or belongs to another run.
        """
        pin = self.pin()
        return RunManifest.open(Envelope.from_bytes(self._manifest.read_bytes()), pin.root, run_id=pin.run_id)

    def remember(self, pin: Pin, manifest: Envelope) -> None:
        """Pin the home to a run; the same run again is harmless.

        Raises:
            LocalFault: ``E_HOME`` when it is pinned to another run or root key.
        """
        if self.joined:
            held = self.pin()
            if (held.run_id, held.root) != (pin.run_id, pin.root):
                raise LocalFault(
                    E_HOME, f"{self.path} belongs to another run", expected=held.run_id, got=pin.run_id,
                    hint="use another --home",
                )
        self.write(self._manifest, manifest.to_bytes())
        self.write(self._pin, pin.model_dump_json().encode())

    # -- state and status --------------------------------------------------------------------------------

    def write_state(self, version: int, state_root: str, now_ms: int) -> None:
        """Say which verified weights the node holds."""
        self._write_json(self._state, {"version": version, "state_root": state_root, "updated_at_ms": now_ms})

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace status.json."""
        self._write_json(self._status, status)

    def read_status(self) -> dict[str, Any] | None:
        """The last status.json, or None when there is none."""
        return _read_json(self._status)

    def write_peers(self, view: dict[str, Any]) -> None:
        """Replace peers.json."""
        self._write_json(self._peers, view)

    def read_peers(self) -> dict[str, Any] | None:
        """The last peers.json, or None when there is none."""
        return _read_json(self._peers)

    @property
    def paused(self) -> bool:
        """Whether the owner asked for a pause."""
        return self._paused.exists()

    def pause(self, *, paused: bool) -> None:
        """Ask the daemon to take no new work, or to go on."""
        if paused:
            self.write(self._paused, b"")
        else:
            self._paused.unlink(missing_ok=True)

    def free_mb(self) -> int:
        """Free disk space, in MiB."""
        return shutil.disk_usage(self.path).free // 2**20

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home for one daemon.

        Raises:
            LocalFault: ``E_NO_HOME`` when it is not joined, ``E_HOME`` when another process holds it.
        """
        self._require_join()
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise LocalFault(
                    E_HOME, f"{self.path} is in use", expected="one node per home",
                    hint="stop the other process, or use another --home",
                ) from None
            yield

    # -- files -------------------------------------------------------------------------------------------

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file atomically and durably.

        Raises:
            LocalFault: ``E_HOME``.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise LocalFault(E_HOME, f"cannot write {path}", got=str(error)) from None

    def _write_json(self, path: Path, value: dict[str, Any]) -> None:
        self.write(path, json.dumps(value, indent=1, default=str).encode() + b"\n")

    def _require_join(self) -> None:
        if not self.joined:
            raise LocalFault(
                E_NO_HOME, f"{self.path} is not the home of a node", expected="a folder made by assay node join",
                got="no such folder" if not self.path.exists() else "a folder without node.json",
                hint=f"assay node join LINK --home {self.path}",
            )
        if not self.key.exists():
            raise LocalFault(
                E_HOME, f"the key {self.key} is gone",
                hint="restore it from your backup; a lost key cannot be recovered: join again with a new --home",
            )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def status_age_s(status: dict[str, Any], now_ms: int) -> float:
    """Seconds since a status was written."""
    return max(0.0, (now_ms - int(status.get("updated_at_ms", 0))) / 1000)

