"""All entries of a log, read once and checked against the head that was signed over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol.errors import AssayError, PeerFault
from protocol.log_entry import E_LOG_ENTRY, LogEntry, check_root
from protocol.log_head import LogHead
from protocol.transparency import Peaks
from verifier.log_source import LogSource


def entries(number: int) -> str:
    """A number of log entries in words."""
    return "1 entry" if number == 1 else f"{number} entries"


class LogReader:
    """Reads a whole log once, checking each entry's place, and remembers the root at every size that is asked about.

    An entry out of its place does not end the reading: whether it was signed like that, the root says at the end.
    """

    def __init__(self, source: LogSource, head: LogHead, sizes: Sequence[int] = ()):
        self._source, self._head, self._sizes = source, head, frozenset(sizes)
        self._peaks = Peaks()
        self._broken: AssayError | None = None
        #: The first entry out of its place; signed like that, once :meth:`check` finds nothing.
        self.misplaced: PeerFault | None = None
        self.roots: dict[int, bytes] = {0: self._peaks.root}  #: size -> root, for the sizes asked about

    @property
    def size(self) -> int:
        """Entries read so far."""
        return self._peaks.size

    def __iter__(self) -> Iterator[LogEntry]:
        try:
            for entry in self._source.entries(self._head.size):
                if entry.index != self._peaks.size and self.misplaced is None:
                    self.misplaced = PeerFault(
                        E_LOG_ENTRY, "log entry out of place", expected=f"entry {self._peaks.size}", got=entry.index
                    )
                self._peaks.append(entry.leaf)
                if self._peaks.size > self._head.size:
                    return  # check() says so; how many more there are is nobody's concern
                if self._peaks.size in self._sizes:
                    self.roots[self._peaks.size] = self._peaks.root
                yield entry
        except AssayError as error:
            self._broken = error
            raise

    def check(self) -> None:
        """Check that what was read is what the head was signed over.

        Raises:
            PeerFault: ``E_LOG_ROOT``; or what ended the reading.
        """
        if self._broken is not None:
            raise self._broken
        check_root(self._peaks, self._head.size, self._head.root)
