"""An audit of a run's log: is the head signed, has the log only grown, are its entries those under the head?

Steps G.1 to G.5 of ``docs/spec/log.md``, "Auditing a log".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from protocol.errors import AssayError, LocalFault, PeerFault, code
from protocol.log_entry import LogEntry, check_root, read_on
from protocol.log_head import LogHead
from protocol.messages import RunManifest
from protocol.transparency import E_LOG_FORK, Peaks, check_consistency, check_entry
from verifier.findings import Outcome, Report
from verifier.log_proofs import E_LOG_SILENT
from verifier.log_source import E_LOG_ANSWER, LiveLog, LogSource

E_LOG_STALE = code("E_LOG_STALE", "a live log stands still; it may be an old one, or the clock is wrong")
E_LOG_BEHIND = code("E_LOG_BEHIND", "a copy of a log is older than a head that is known; download it again")

#: Reads entries on the way past; what it makes of them counts once they are known to be those under the head.
Follow = Callable[[Iterator[LogEntry]], None]

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
    whole: bool  #: every entry was read and is under the head
    #: Signed heads that cannot be of the history under the one above. One of the same size proves it to anybody,
    #: together with that one; one of a smaller size does with the entries.
    conflicts: list[str] = field(default_factory=list)

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
        self._broken: AssayError | None = None
        self.roots: dict[int, bytes] = {0: self._peaks.root}  #: size -> root, for the sizes asked about

    @property
    def size(self) -> int:
        """Entries read so far."""
        return self._peaks.size

    def __iter__(self) -> Iterator[LogEntry]:
        try:
            for entry in self._source.entries(self._head.size):
                read_on(self._peaks, [entry])
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


def open_head(note: str, run: RunManifest) -> LogHead:
    """A head signed by the run's coordinator; raises as ``LogHead.open``."""
    return LogHead.open(note, run.run_id, bytes.fromhex(run.roles.coordinator))


def audit_log(
    source: LogSource, run: RunManifest, known: Sequence[KnownHead], *, whole: bool, follow: Follow | None = None
) -> LogAudit:
    """Check a log's head against the heads that are known, by proofs or, with ``whole``, by reading every entry.

    Args:
        follow: with ``whole``, sees every entry in the one pass that is checked against the head; it must not raise
            what it finds wrong with them.

    Raises:
        PeerFault: one of the heads is malformed or not signed by the coordinator, or the entries of a file are not
            those under its head: it is no evidence of anything.
        Transient: the coordinator cannot be reached.
    """
    head = open_head(source.head, run)
    known_heads = [(item, _open_known(item, run)) for item in known]
    report = Report()
    report.note("G.1 head", "signed by the coordinator", f"{entries(head.size)} under {head.root.hex()[:_SHOWN]}")
    reader = LogReader(source, head, [other.size for _, other in known_heads])
    if whole:
        forked = any(other.size == head.size and other.root != head.root for _, other in known_heads)
        whole = _entries_hold(source, reader, head, report, follow, keep_on=forked)
    audit = LogAudit(run, source.head, head, report, reader.size, whole)
    for item, other in known_heads:
        if not whole and other.size != head.size and not isinstance(source, LiveLog):
            continue  # the file's entries are of no use
        found = report.attempt(
            "G.3 only grown", f"since {item.name}: {entries(other.size)} under {other.root.hex()[:_SHOWN]}",
            lambda other=other: _grown(source, reader, other, head, whole=whole), node=True,  # type: ignore[misc]
            got=lambda added: f"{entries(added)} added",
        )
        if found is None and report.findings[-1].code == E_LOG_FORK:
            audit.conflicts.append(item.note)
    return audit


def check_receipt(source: LiveLog, audit: LogAudit, receipt_id: str) -> None:
    """Check that what the log says on a receipt is under a head, and that head in the same log as the audit's."""
    def steps() -> int:
        proof = source.proof_about(receipt_id)
        try:
            head = open_head(proof.head, audit.run)
        except PeerFault as error:  # whoever answered, it was not the coordinator
            raise LocalFault(
                E_LOG_ANSWER, f"what was answered on receipt {receipt_id} is under no head of this log",
                expected=error.expected, got=f"{error.code}: {error.message}",
            ) from None
        proof.open(audit.run.run_id, bytes.fromhex(audit.run.roles.coordinator))
        try:
            _grown_by_proof(source, *sorted((audit.head, head), key=lambda each: each.size))
        except PeerFault as error:
            if error.code == E_LOG_FORK:
                audit.conflicts.append(proof.head)
            raise
        if not any(item.entry.kind == "submitted" and item.entry.body.get("receipt_id") == receipt_id
                   for item in proof.entries):
            raise LocalFault(
                E_LOG_SILENT, "no entry was shown that says that this was submitted", expected="a 'submitted' entry",
                got=", ".join(item.entry.kind for item in proof.entries) or "no entries",
                hint="who holds the signed receipt can show it to others: a log without its entry breaks it",
            )
        return len(proof.entries)

    audit.report.attempt(
        "G.4 receipt", f"{receipt_id} in the log", steps, node=True, got=lambda count: f"{entries(count)} on it"
    )


def check_fresh(source: LiveLog, audit: LogAudit, now_ms: int) -> None:
    """Check that a live log goes on: a coordinator begins an epoch of the draw every so often, whatever happens.

    A log that stands still may be an old one, shown to us alone; or our clock is wrong, as it may be when the newest
    entry is of the future. So it is inconclusive.
    """
    most_ms = 2 * audit.run.audit.epoch_ms + _SLACK_MS

    def steps() -> int:
        if audit.head.size == 0:
            raise LocalFault(E_LOG_STALE, "the log is empty", expected="entries")
        newest = source.newest(audit.head.size)
        check_entry(newest.entry.leaf, audit.head.size - 1, audit.head.size, newest.proof, audit.head.root)
        age_ms = now_ms - newest.entry.at_ms
        if age_ms < -_SLACK_MS:  # it would count as fresh for as long as somebody likes
            raise LocalFault(
                E_LOG_STALE, "the newest entry is of the future", expected=f"at most {_SLACK_MS // 1000} s ahead",
                got=f"{-age_ms // 1000} s ahead", hint="compare your clock with the world's, and heads with others",
            )
        if age_ms > most_ms:
            raise LocalFault(
                E_LOG_STALE, "the newest entry is old", expected=f"at most {most_ms // 1000} s",
                got=f"{age_ms // 1000} s", hint="compare heads with other people, and your clock with the world's",
            )
        return max(0, age_ms)

    audit.report.attempt(
        "G.5 goes on", f"newest entry at most {most_ms // 1000} s old", steps, node=True,
        got=lambda age_ms: f"{age_ms // 1000} s old",
    )


def _open_known(known: KnownHead, run: RunManifest) -> LogHead:
    try:
        return open_head(known.note, run)
    except PeerFault as error:
        error.hint = f"{known.name} holds no head of this run that its coordinator signed; the log was not looked at"
        raise


def _entries_hold(
    source: LogSource, reader: LogReader, head: LogHead, report: Report, follow: Follow | None, *, keep_on: bool
) -> bool:
    """Step G.2: whether all entries were read and are those under the head.

    A file went through anybody's hands, so whoever signed its head did not spoil its entries: that is raised, unless
    there is more to say (``keep_on``).
    """
    live = isinstance(source, LiveLog)
    try:
        _read_all(reader, follow)
    except PeerFault as error:
        if not live and not keep_on:
            raise
        report.fault("G.2 entries", error, blames_node=live)
        return False
    except AssayError as error:
        report.fault("G.2 entries", error, blames_node=False)
        return False
    report.note("G.2 entries", f"{head.size}, in their places, under the head", entries(reader.size))
    return True


def _read_all(reader: LogReader, follow: Follow | None) -> None:
    rest = iter(reader)
    if follow is not None:
        follow(rest)
    for _ in rest:
        pass
    reader.check()


def _grown(source: LogSource, reader: LogReader, old: LogHead, new: LogHead, *, whole: bool) -> int:
    """How many entries were added between two heads; ``whole`` says that the entries read are those under the new one.

    Heads of different sizes are no contradiction by themselves.
    """
    if new.size < old.size and not isinstance(source, LiveLog):
        raise LocalFault(
            E_LOG_BEHIND, "your copy is older than the head you know", expected=f"at least {entries(old.size)}",
            got=entries(new.size), hint="download the log again: assay audit log URL --root HEX --save FILE",
        )
    if whole and old.size < new.size:
        # Every entry was seen, so another root is another history, not a bad proof.
        check_consistency(old.size, old.root, old.size, reader.roots[old.size], [])
    elif isinstance(source, LiveLog):
        _grown_by_proof(source, old, new)
    else:
        check_consistency(old.size, old.root, new.size, new.root, [])
    return new.size - old.size


def _grown_by_proof(source: LiveLog, old: LogHead, new: LogHead) -> None:
    proof = source.consistency(old.size, new.size) if 0 < old.size < new.size else ()
    check_consistency(old.size, old.root, new.size, new.root, proof)
