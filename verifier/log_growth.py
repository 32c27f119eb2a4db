"""Is the log of one signed head the beginning of another's? By a proof, and by the entries where the proof is wrong.

A proof comes over the wire and nobody signed it, so a wrong one says nothing about anybody. Entries are bound to the
signature of the head that they hash to. So there are two ways to show that two heads of one key contradict each other:
as many entries under another root, or all entries under the larger one, which do not begin with those of the smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.errors import AssayError, LocalFault, PeerFault, code
from protocol.log_head import LogHead
from protocol.transparency import E_LOG_CONSISTENCY, E_LOG_ROLLBACK, EMPTY_ROOT, check_consistency
from verifier.log_reader import LogReader, entries
from verifier.log_source import LiveLog, LogSource

E_LOG_BEHIND = code("E_LOG_BEHIND", "a copy of a log is older than a head that is known; download it again")

#: Most entries that are read without being asked for, because a proof was wrong.
MOST_READ: Final = 1_000_000
_ASK_AGAIN: Final = "ask again, by another way (https, another network), and compare heads with others: --against"


class Growth:
    """Compares heads that the coordinator signed with each other.

    Args:
        source: where proofs and entries are asked for.
        sizes: of the heads that may be compared with a larger one, so that one reading of its entries serves them all.
    """

    def __init__(self, source: LogSource, sizes: Sequence[int] = ()):
        self._source, self._sizes = source, tuple(sizes)
        self._readers: dict[LogHead, LogReader | None] = {}  #: None: its entries could not be had
        self.read = 0  #: entries read because a proof was wrong

    def remember(self, head: LogHead, reader: LogReader | None) -> None:
        """Take over a reading of all entries under a head; None for one that failed."""
        self._readers[head] = reader

    def added(self, known: LogHead, shown: LogHead) -> str:
        """What the log of ``shown`` has grown by since ``known``, in words.

        Raises:
            PeerFault: ``E_LOG_FORK``: no log has both heads, which the two of them prove, of different sizes together
                with the entries under the larger.
            LocalFault: ``E_LOG_CONSISTENCY`` when only unsigned answers speak against it, ``E_LOG_ROLLBACK`` for an
                older head of a live log, ``E_LOG_BEHIND`` for an older copy, and codes of the source.
        """
        if known.size <= shown.size:
            read = self.check(known, shown)
            how = " (so all entries show; the proof that was answered is wrong)" if read else ""
            return f"{entries(shown.size - known.size)} added{how}"
        if not isinstance(self._source, LiveLog):
            raise LocalFault(
                E_LOG_BEHIND, "your copy is older than the head you know", expected=f"at least {entries(known.size)}",
                got=entries(shown.size), hint="download the log again: assay audit log URL --root HEX --save FILE",
            )
        try:
            self.check(shown, known)
        except PeerFault:
            raise  # older or not, no log has both
        except AssayError:
            pass  # a log that lost entries cannot say more, and somebody else may have answered
        raise LocalFault(
            E_LOG_ROLLBACK, "an older head than the one you know is shown", expected=f"at least {entries(known.size)}",
            got=entries(shown.size), hint=_ASK_AGAIN,
        )

    def check(self, old: LogHead, new: LogHead) -> bool:
        """Check that the log of the larger of two heads begins with that of the smaller.

        Returns:
            Whether a proof was wrong, so that the entries had to be read to know.

        Raises:
            PeerFault: ``E_LOG_FORK``, as for :meth:`added`.
            LocalFault: ``E_LOG_CONSISTENCY`` when a proof is wrong and the entries cannot be had; codes of the source.
        """
        if old.size in (0, new.size):
            check_consistency(old.size, old.root, old.size, new.root if old.size else EMPTY_ROOT, [])
            return False
        reader, wrong = self._readers.get(new), False
        if reader is None or old.size not in reader.roots:
            proof = self._source.consistency(old.size, new.size) if isinstance(self._source, LiveLog) else ()
            try:
                check_consistency(old.size, old.root, new.size, new.root, proof)
            except PeerFault as error:
                reader, wrong = self._read_all(old, new, error), True
            else:
                return False
        # Every entry was seen and is bound by a signature, so another root is another history and no bad answer.
        check_consistency(old.size, old.root, old.size, reader.roots[old.size], [])
        return wrong

    def _read_all(self, old: LogHead, new: LogHead, wrong: PeerFault) -> LogReader:
        """All entries under ``new``, read after a wrong proof from ``old``.

        Raises:
            LocalFault: ``E_LOG_CONSISTENCY`` when they cannot be had.
        """
        fault = LocalFault(
            E_LOG_CONSISTENCY, "a proof is wrong, which nobody signed", expected=wrong.expected, got=wrong.got,
            hint=_ASK_AGAIN,
        )
        if new.size > MOST_READ:
            fault.message += f", and {entries(new.size)} are not read unasked (--all)"
            raise fault
        if new in self._readers and self._readers[new] is None:
            fault.message += ", and the entries are not those under the head either"
            raise fault
        reader = LogReader(self._source, new, (*self._sizes, old.size))
        try:
            for _ in reader:
                self.read += 1
            reader.check()
        except AssayError as error:
            self.remember(new, None)
            fault.message += f", and the entries cannot be had ({error.code})"
            raise fault from None
        self.remember(new, reader)
        return reader
