"""An audit of a run's log: is the head signed, has the log only grown, are its entries those under the head?

Steps G.1 to G.5 of ``docs/spec/log.md``, "Auditing a log". Only what the coordinator signed can speak against it: two
heads that contradict each other, by themselves or with the entries under the larger. Answers are unsigned: they blame
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from protocol.errors import AssayError, LocalFault, PeerFault, code
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead
from protocol.messages import RunManifest
from protocol.transparency import E_LOG_FORK, check_entry
from verifier.findings import Outcome, Report
from verifier.log_growth import Growth
from verifier.log_proofs import E_LOG_SILENT
from verifier.log_reader import LogReader, entries
from verifier.log_source import E_LOG_ANSWER, LiveLog, LogSource

E_LOG_STALE = code("E_LOG_STALE", "a live log stands still; it may be an old one, or the clock is wrong")

#: Reads entries on the way past; what it makes of them counts once they are known to be those under the head.
Follow = Callable[[Iterator[LogEntry]], None]

#: How much later than its time an epoch may begin, and how far clocks may be apart, in ms.
_SLACK_MS: Final = 300_000
_SHOWN: Final = 16


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
    growth: Growth = field(repr=False)  #: what compares its head with others
    #: Signed heads that cannot be of the history under the one above. One of the same size proves it to anybody,
    #: together with that one; one of another size does with the entries under the larger of the two.
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
    sizes = [*(other.size for _, other in known_heads), head.size]
    reader, growth = LogReader(source, head, sizes), Growth(source, sizes)
    if whole:
        forked = any(other.size == head.size and other.root != head.root for _, other in known_heads)
        whole = _entries_hold(source, reader, head, report, follow, keep_on=forked)
        growth.remember(head, reader if whole else None)
    conflicts = []
    for item, other in known_heads:
        if not whole and other.size != head.size and not isinstance(source, LiveLog):
            continue  # the file's entries are of no use
        report.attempt(
            "G.3 only grown", f"since {item.name}: {entries(other.size)} under {other.root.hex()[:_SHOWN]}",
            partial(growth.added, other, head), node=True,
        )
        if report.findings[-1].code == E_LOG_FORK:
            conflicts.append(item.note)
    return LogAudit(run, source.head, head, report, reader.size + growth.read, whole, growth, conflicts)


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
        with _unsigned("what was answered on this receipt is not shown to be in the log"):
            proof.open(audit.run.run_id, bytes.fromhex(audit.run.roles.coordinator))
        try:
            audit.growth.check(*sorted((audit.head, head), key=lambda each: each.size))
        except PeerFault:  # no log has both heads
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
        with _unsigned("what was answered is not shown to be the newest entry"):
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
        "G.5 goes on", f"newest entry at most {most_ms // 1000} s old", steps, node=False,
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

    A file went through anybody's hands and an answer came over the wire, so entries that are not those under the head
    say nothing about whoever signed it. Of a file that is raised, unless there is more to say (``keep_on``).
    """
    try:
        _read_all(reader, follow)
    except AssayError as error:
        if isinstance(error, PeerFault) and not isinstance(source, LiveLog) and not keep_on:
            raise
        report.fault("G.2 entries", error, blames_node=False)
        return False
    if reader.misplaced is not None:  # its hash is under the head: the coordinator signed it like that
        report.fault("G.2 entries", reader.misplaced, blames_node=True)
    else:
        report.note("G.2 entries", f"{head.size}, in their places, under the head", entries(reader.size))
    return True


def _read_all(reader: LogReader, follow: Follow | None) -> None:
    rest = iter(reader)
    if follow is not None:
        follow(rest)
    for _ in rest:
        pass
    reader.check()


@contextmanager
def _unsigned(what: str) -> Iterator[None]:
    """Steps over an answer that nobody signed: if they do not hold, that is nobody's doing that we know of."""
    try:
        yield
    except PeerFault as error:
        raise LocalFault(
            error.code, what, expected=error.expected, got=f"{error.message}: {error.got}",
            hint="ask again, by another way (https, another network)",
        ) from None
