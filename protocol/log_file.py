"""A log that was downloaded: the signed run manifest, a signed head, and every entry under it, one JSON text per line.

::

    {"format":"assay-log.v1","root_public_key":HEX,"run_manifest":ENVELOPE}
    {"head":"assay-log/..."}
    {"at_ms":...,"body":{...},"index":0,"kind":"founded"}
    ...

Nothing in the file is trusted for being there. Spec: ``docs/spec/log.md``, "Log files".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from protocol import canonical
from protocol.envelope import Envelope
from protocol.errors import E_TOO_LARGE, PeerFault, code
from protocol.identity import public_key_of
from protocol.log_entry import MAX_ENTRY_BYTES, LogEntry
from protocol.paths import replacing

E_LOG_FILE = code("E_LOG_FILE", "a log file is malformed")

FORMAT: Final = "assay-log.v1"
#: What every log file begins with.
MAGIC: Final = canonical.encode({"format": FORMAT})[:-1] + b","
#: Longest line, in bytes: the run manifest's envelope, or one entry.
MAX_LINE_BYTES: Final = 2 * MAX_ENTRY_BYTES


@dataclass(frozen=True)
class LogFile:
    """A log file whose first two lines are read; entries are read when they are asked for."""

    path: Path
    root_public_key: bytes  #: the key the run manifest claims to be signed by
    run_manifest: Envelope
    head: str  #: signed note

    @classmethod
    def open(cls, path: Path) -> LogFile:
        """Read the first two lines. No signature is checked here.

        Raises:
            PeerFault: ``E_LOG_FILE``, ``E_TOO_LARGE``, ``E_JSON`` or ``E_ENVELOPE``.
        """
        with path.open("rb") as file:
            first, second = _object(file, {"format", "root_public_key", "run_manifest"}), _object(file, {"head"})
        if first["format"] != FORMAT or not isinstance(second["head"], str):
            raise _malformed(f"format {FORMAT}", str(first["format"])[:80])
        return cls(path, _key(first["root_public_key"]), Envelope.from_dict(first["run_manifest"]), second["head"])

    def entries(self) -> Iterator[LogEntry]:
        """All entries, unchecked but for their form.

        Raises:
            PeerFault: ``E_LOG_FILE``, ``E_TOO_LARGE``, ``E_JSON`` (for an empty line too) or ``E_LOG_ENTRY``.
        """
        with self.path.open("rb") as file:
            _line(file), _line(file)
            while (line := _line(file)) is not None:
                yield LogEntry.from_bytes(line)


def write(path: Path, root_public_key: bytes, run_manifest: Envelope, head: str, entries: Iterable[LogEntry]) -> None:
    """Write a log file; an existing one is replaced once the new one is whole.

    Raises:
        LocalFault: ``E_FILE``; and whatever ``entries`` raises.
    """
    header = {"format": FORMAT, "root_public_key": root_public_key.hex(), "run_manifest": run_manifest.to_dict()}
    with replacing(path) as file:
        for value in (header, {"head": head}):
            file.write(canonical.encode(value) + b"\n")
        for entry in entries:
            file.write(entry.data + b"\n")


def _object(file: BinaryIO, keys: set[str]) -> dict[str, Any]:
    value = canonical.decode(_line(file) or b"", max_bytes=MAX_LINE_BYTES)
    if not isinstance(value, dict) or set(value) != keys:
        raise _malformed(f"keys {', '.join(sorted(keys))}", str(value)[:80])
    return value


def _line(file: BinaryIO) -> bytes | None:
    """The next line without its line break, which may be empty; None at the end."""
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise PeerFault(E_TOO_LARGE, "log file line too long", expected=f"<= {MAX_LINE_BYTES} bytes")
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise _malformed("lines that end", "a file that breaks off")
    return line[:-1]


def _key(value: Any) -> bytes:
    key = public_key_of(value)
    if key is None:
        raise _malformed("a public key of 64 lower-case hex digits", str(value)[:80])
    return key


def _malformed(expected: str, got: str) -> PeerFault:
    return PeerFault(E_LOG_FILE, "malformed log file", expected=expected, got=got)
