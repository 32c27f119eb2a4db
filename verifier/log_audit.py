"""An audit of a run's log: is the head signed, has the log only grown, are its entries those under the head?

Steps G.1 to G.5 of ``docs/spec/log.md``, "Auditing a log".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.errors import LocalFault, PeerFault, code
from protocol.log_entry import LogEntry, check_root, read_on
from protocol.log_head import LogHead
from protocol.messages import RunManifest
from protocol.transparency import E_LOG_FORK, E_LOG_ROLLBACK, Peaks, check_consistency, check_entry
from verifier.findings import Outcome, Report
from verifier.log_proofs import E_LOG_SILENT
from verifier.log_source import LiveLog, LogSource

E_LOG_STALE = code("E_LOG_STALE", "a live log stands still; it may be an old one, or the clock is wrong")

#: How much later than its time an epoch may begin, and how far clocks may be apart, in ms.
_SLACK_MS: Final = 300_000
_SHOWN: Final = 16


def entries(number: int) -> str:
    """A number of log entries in words."""
    return "1 entry" if number == 1 else f"{number} entries"


@dataclass(frozen=True)
class KnownHead:
    """A head that was seen before or elsewhere."""

    name: str  #: where it is from, for the reader
    note: str  #: signed


@dataclass(frozen=True)
class LogAudit:
    """The end of an audit of a log."""

    run: RunManifest
    note: str  #: the head, signed
    head: LogHead
    report: Report
    read: int  #: entries that were read; 0 when proofs were enough
    conflicts: tuple[str, ...]  #: signed heads that contradict the one above: together they prove the lie to anybody

    @property
    def outcome(self) -> Outcome:
        """``fail`` when the coordinator contradicts itself, ``inconclusive`` when not all could be asked."""
        if self.report.blamed is not None:
            return "fail"
        return "pass" if self.report.excused is None else "inconclusive"

    @property
    def code(self) -> str | None:
        """Code of the first failure; None when all holds."""
        return self.report.blamed or self.report.excused


class LogReader:
    """Reads a whole log once, checking each entry's place, and remembers the root at every size that is asked about."""

    def __init__(self, source: LogSource, head: LogHead, sizes: Sequence[int] = ()):
        self._source, self._head, self._sizes = source, head, frozenset(sizes)
        self._peaks = Peaks()
        self.roots: dict[int, bytes] = {0: self._peaks.root}  #: size -> root, for the sizes asked about

    @property
    def size(self) -> int:
        """Entries read so far."""
        return self._peaks.size

    def __iter__(self) -> Iterator[LogEntry]:
        for entry in self._source.entries(self._head.size):
            read_on(self._peaks, [entry])
            if self._peaks.size in self._sizes:
                self.roots[self._peaks.size] = self._peaks.root
            yield entry

    def check(self) -> None:
        """Check that what was read is what the head was signed over.

        Raises:
            PeerFault: ``E_LOG_ROOT``.
        """
        check_root(self._peaks, self._head.size, self._head.root)


def open_head(note: str, run: RunManifest) -> LogHead:
    """A head signed by the run's coordinator; raises as ``LogHead.open``."""
    return LogHead.open(note, run.run_id, bytes.fromhex(run.roles.coordinator))


def audit_log(source: LogSource, run: RunManifest, known: Sequence[KnownHead], *, whole: bool) -> LogAudit:
    """Check a log's head against the heads that are known, by proofs or, with ``whole``, by reading every entry.

    Raises:
        PeerFault: one of the heads is malformed or not signed by the coordinator: it is no evidence of anything.
        Transient: the coordinator cannot be reached.
    """
    head = open_head(source.head, run)
    known_heads = [(item, open_head(item.note, run)) for item in known]
    report = Report()
    report.note("G.1 head", "signed by the coordinator", f"{entries(head.size)} under {head.root.hex()[:_SHOWN]}")
    reader = LogReader(source, head, [other.size for _, other in known_heads])
    if whole:
        report.attempt(
            "G.2 entries", f"{head.size}, in their places, under the head", lambda: _read_all(reader), node=True,
            got=lambda _: entries(reader.size),
        )
    conflicts = []
    for item, other in known_heads:
        found = report.attempt(
            "G.3 only grown", f"since {item.name}: {entries(other.size)} under {other.root.hex()[:_SHOWN]}",
            lambda other=other: _grown(source, reader, other, head, whole=whole), node=True,  # type: ignore[misc]
            got=lambda added: f"{entries(added)} added",
        )
        if found is None and report.findings[-1].code in (E_LOG_FORK, E_LOG_ROLLBACK):
            conflicts.append(item.note)
    return LogAudit(run, source.head, head, report, reader.size, tuple(conflicts))


def check_receipt(source: LiveLog, audit: LogAudit, receipt_id: str) -> None:
    """Check that what the log says on a receipt is under a head, and that head in the same log as the audit's."""
    def steps() -> int:
        proof = source.proof_about(receipt_id)
        head = proof.open(audit.run.run_id, bytes.fromhex(audit.run.roles.coordinator))
        _grown_by_proof(source, *sorted((audit.head, head), key=lambda each: each.size))
        if not any(item.entry.kind == "submitted" and item.entry.body.get("receipt_id") == receipt_id
                   for item in proof.entries):
            raise PeerFault(E_LOG_SILENT, "the log does not say that this was submitted", got=receipt_id)
        return len(proof.entries)

    audit.report.attempt(
        "G.4 receipt", f"{receipt_id} in the log", steps, node=True, got=lambda count: f"{entries(count)} on it"
    )


def check_fresh(source: LiveLog, audit: LogAudit, now_ms: int) -> None:
    """Check that a live log goes on: a coordinator begins an epoch of the draw every so often, whatever happens.

    A log that stands still may be an old one, shown to us alone; or our clock is wrong. So it is inconclusive.
    """
    most_ms = 2 * audit.run.audit.epoch_ms + _SLACK_MS

    def steps() -> int:
        if audit.head.size == 0:
            raise LocalFault(E_LOG_STALE, "the log is empty", expected="entries")
        newest = source.newest(audit.head.size)
        check_entry(newest.entry.leaf, audit.head.size - 1, audit.head.size, newest.proof, audit.head.root)
        age_ms = now_ms - newest.entry.at_ms
        if age_ms > most_ms:
            raise LocalFault(
                E_LOG_STALE, "the newest entry is old", expected=f"at most {most_ms // 1000} s",
                got=f"{age_ms // 1000} s", hint="compare heads with other people, and your clock with the world's",
            )
        return age_ms

    audit.report.attempt(
        "G.5 goes on", f"newest entry at most {most_ms // 1000} s old", steps, node=True,
        got=lambda age_ms: f"{age_ms // 1000} s old",
    )


def _read_all(reader: LogReader) -> None:
    for _ in reader:
        pass
    reader.check()


def _grown(source: LogSource, reader: LogReader, old: LogHead, new: LogHead, *, whole: bool) -> int:
    """How many entries were added between two heads."""
    if whole:
        if old.size in reader.roots and old.size <= new.size:
            # Every entry was seen, so another root is another history, not a bad proof.
            check_consistency(old.size, old.root, old.size, reader.roots[old.size], [])
        else:
            check_consistency(old.size, old.root, new.size, new.root, [])
    else:
        assert isinstance(source, LiveLog)
        _grown_by_proof(source, old, new)
    return new.size - old.size


def _grown_by_proof(source: LiveLog, old: LogHead, new: LogHead) -> None:
    proof = source.consistency(old.size, new.size) if 0 < old.size < new.size else ()
    check_consistency(old.size, old.root, new.size, new.root, proof)
