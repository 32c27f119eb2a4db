"""Where a log is read from: a live coordinator, or a file that was downloaded. Nothing it gives is checked here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from protocol.client import CoordinatorClient
from protocol.envelope import Envelope
from protocol.log_client import LogClient
from protocol.log_entry import LogEntry
from protocol.log_file import LogFile
from protocol.log_proof import LogProof, ProvenEntry

#: Entries asked for at once.
_PAGE: Final = 1000


class LogSource(Protocol):
    """A log that can be read from its beginning."""

    @property
    def run_manifest(self) -> Envelope:
        """The run manifest."""

    @property
    def head(self) -> str:
        """The newest head, a signed note; always the same one."""

    def entries(self, size: int) -> Iterator[LogEntry]:
        """The entries under a head of this size."""


class LiveLog:
    """The log of a running coordinator. Its head is the one that was the newest when this was made."""

    def __init__(self, client: CoordinatorClient):
        self._log = LogClient(client)
        self.run_manifest, self.head = client.run_manifest(), self._log.head()

    def entries(self, size: int) -> Iterator[LogEntry]:
        """The first ``size`` entries, page by page; fewer when the coordinator has no more."""
        at = 0
        while at < size:
            page = self._log.entries(at, min(size - at, _PAGE))
            if not page:
                return
            yield from page
            at += len(page)

    def consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """Proof that the first ``new`` entries begin with the first ``old``."""
        return self._log.consistency(old, new)

    def newest(self, size: int) -> ProvenEntry:
        """The last entry of the first ``size``, with its proof."""
        return self._log.inclusion(size - 1, size)

    def proof_about(self, receipt_id: str) -> LogProof:
        """What the log holds on a receipt."""
        return self._log.proof_about(receipt_id)


class FileLog:
    """A downloaded log."""

    def __init__(self, path: Path):
        self._file = LogFile.open(path)
        self.run_manifest, self.head = self._file.run_manifest, self._file.head
        self.root_public_key = self._file.root_public_key  #: the key the run manifest claims to be signed by

    def entries(self, size: int) -> Iterator[LogEntry]:
        """All entries; should there be more than ``size``, whoever counts them will notice."""
        return self._file.entries()
