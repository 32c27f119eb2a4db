"""One entry of a run's log: what the coordinator did, and when it says it did it. Spec: ``docs/spec/log.md``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from protocol import canonical
from protocol.errors import AssayError, PeerFault, code
from protocol.merkle import leaf_hash
from protocol.transparency import MAX_SIZE, Peaks

E_LOG_ENTRY = code("E_LOG_ENTRY", "a log entry is malformed or not the one that belongs in its place")
E_LOG_ROOT = code("E_LOG_ROOT", "the entries of the log are not those under its signed head")

#: Longest entry, in bytes.
MAX_ENTRY_BYTES: Final = canonical.MAX_MESSAGE_BYTES
_KEYS: Final = frozenset({"at_ms", "body", "index", "kind"})


@dataclass(frozen=True)
class LogEntry:
    """An entry; its place is part of it."""

    index: int  #: from 0
    at_ms: int  #: by the coordinator's clock
    kind: str
    body: Mapping[str, Any]

    @property
    def data(self) -> bytes:
        """The bytes under the leaf hash: canonical JSON."""
        return canonical.encode(self.to_dict())

    @property
    def leaf(self) -> bytes:
        """Leaf hash, SHA-256(0x00 | data)."""
        return leaf_hash(self.data)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"index": self.index, "at_ms": self.at_ms, "kind": self.kind, "body": dict(self.body)}

    @classmethod
    def from_dict(cls, value: Any) -> LogEntry:
        """Strictly read the JSON form.

        Raises:
            PeerFault: ``E_LOG_ENTRY``.
        """
        if not isinstance(value, dict) or set(value) != _KEYS:
            raise _malformed("keys at_ms, body, index, kind", value)
        index, at_ms, kind, body = value["index"], value["at_ms"], value["kind"], value["body"]
        if type(index) is not int or not 0 <= index < MAX_SIZE or type(at_ms) is not int or at_ms < 0:
            raise _malformed("index and at_ms from 0 on", value)
        if not isinstance(kind, str) or not isinstance(body, dict):
            raise _malformed("kind: text, body: object", value)
        entry = cls(index, at_ms, kind, body)
        try:
            size = len(entry.data)
        except (AssayError, TypeError, ValueError) as error:
            raise _malformed("values that canonical JSON can write", str(error)) from None
        if size > MAX_ENTRY_BYTES:
            raise _malformed(f"at most {MAX_ENTRY_BYTES} bytes", size)
        return entry

    @classmethod
    def from_bytes(cls, data: bytes) -> LogEntry:
        """Read the bytes under the leaf hash.

        Raises:
            PeerFault: ``E_JSON``, ``E_TOO_LARGE`` or ``E_LOG_ENTRY``.
        """
        return cls.from_dict(canonical.decode(data, max_bytes=MAX_ENTRY_BYTES))


def read_on(peaks: Peaks, entries: Iterable[LogEntry]) -> None:
    """Add entries to the tree that ``peaks`` has read so far.

    Raises:
        PeerFault: ``E_LOG_ENTRY`` for one that is not the next.
    """
    for entry in entries:
        if entry.index != peaks.size:
            raise PeerFault(E_LOG_ENTRY, "log entry out of place", expected=f"entry {peaks.size}", got=entry.index)
        peaks.append(entry.leaf)


def check_root(peaks: Peaks, size: int, root: bytes) -> None:
    """Check that the entries read so far are all there are under a head of this size and root.

    Raises:
        PeerFault: ``E_LOG_ROOT``.
    """
    if (peaks.size, peaks.root) != (size, root):
        raise PeerFault(
            E_LOG_ROOT, "the log is not the one that was signed", expected=f"{size} entries under {root.hex()}",
            got=f"{peaks.size} under {peaks.root.hex()}",
        )


def _malformed(expected: str, got: Any) -> PeerFault:
    return PeerFault(E_LOG_ENTRY, "malformed log entry", expected=expected, got=str(got)[:120])
