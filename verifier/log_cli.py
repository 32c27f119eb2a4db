"""``assay audit log`` and ``assay audit run``: where the log comes from, what is remembered, what is printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from protocol import evidence as evidence_file
from protocol import log_file
from protocol.causes import advice, likely_causes
from protocol.client import CoordinatorClient
from protocol.clock import SystemClock
from protocol.errors import E_TOO_LARGE, E_USAGE, E_WRONG_KEY, AssayError, LocalFault, PeerFault
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead
from protocol.messages import RunManifest
from protocol.paths import Named, check_input_file, check_output_file, replacing
from protocol.signed_note import MAX_NOTE_BYTES
from protocol.text import printable
from verifier.audit_exit import as_ours
from verifier.audit_report import log_json
from verifier.audit_table import ended, findings_table, root_words
from verifier.batch_audit import BatchAudit
from verifier.draw_audit import DrawAudit, audit_draws
from verifier.findings import Report
from verifier.log_audit import KnownHead, LogAudit, audit_log, check_fresh, check_receipt
from verifier.log_reader import LogReader, entries
from verifier.log_source import E_LOG_ANSWER, FileLog, LiveLog, LogSource

#: Longest time one question to the coordinator takes, retries included, in seconds.
_DEADLINE_S: Final = 30.0
_RECEIPT_ID: Final = re.compile("[0-9a-f]{32}")
#: Longest evidence file: magic and length, header, bundle.
_MAX_EVIDENCE_BYTES: Final = 12 + evidence_file.MAX_HEADER_BYTES + evidence_file.MAX_BUNDLE_BYTES
_HEADS_PROVE: Final = "This head contradicts the last one. Both are signed: keep them, they prove it to anybody."
_ENTRIES_PROVE: Final = (
    "This head is of another history than the last one. Both are signed: keep them and the log's entries under the "
    "larger one (--save FILE), together they prove it to anybody."
)
_STYLE: Final = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}


def audit(
    where: str, root: bytes | None, remember: Path | None, against: list[Path], receipts: list[str], save: Path | None,
    *, whole: bool, as_json: bool,
) -> str:
    """``assay audit log``; the outcome."""
    _check_call(where, root, remember, against, save, receipts)
    with _open(where) as source:
        run, signer = _run_of(source, root)
        known = _known(remember, against)
        result = audit_log(source, run, known, whole=whole or isinstance(source, FileLog) or save is not None)
        for receipt in receipts:
            assert isinstance(source, LiveLog)
            check_receipt(source, result, receipt)
        if isinstance(source, LiveLog):
            check_fresh(source, result, SystemClock().now_ms())
        if save is not None and result.whole and result.outcome != "inconclusive":
            _save(save, source, result, signer)
    _finish(result, remember)
    if as_json:
        print(log_json("log", result, where, signer.hex(), pinned=root is not None))
    else:
        summary = f"{entries(result.head.size)} under {result.head.root.hex()}"
        _print(result, root_words(signer.hex(), pinned=root is not None), summary)
    return result.outcome


def audit_run(where: str, root: bytes | None, remember: Path | None, *, as_json: bool) -> str:
    """``assay audit run``; the outcome."""
    _check_call(where, root, remember, [], None, [])
    with _open(where) as source:
        run, signer = _run_of(source, root)
        draws = _Draws(run)
        result = audit_log(source, run, _known(remember, []), whole=True, follow=draws.follow)
        if result.whole:
            draws.believe(result.report)
            if isinstance(source, LiveLog):
                draws.batches.check(source.plan, result.report)
        if isinstance(source, LiveLog):
            check_fresh(source, result, SystemClock().now_ms())
    counts = draws.counts if result.whole else DrawAudit()
    _finish(result, remember)
    if as_json:
        print(log_json("run", result, where, signer.hex(), pinned=root is not None, draws=counts.to_dict()))
    else:
        _print(result, root_words(signer.hex(), pinned=root is not None), counts.words())
    return result.outcome


class _Draws:
    """The audit of the draws, made in the one pass that checks the entries, and believed only once they are checked."""

    def __init__(self, run: RunManifest):
        self._run, self._report = run, Report()
        self._fault: PeerFault | None = None
        self.counts, self.batches = DrawAudit(), BatchAudit(run)

    def follow(self, passing: Iterator[LogEntry]) -> None:
        """Read the entries."""
        try:
            self.counts = audit_draws(self._run, self.batches.seen(passing), self._report)
        except PeerFault as error:  # of an entry; or of the reading, which whoever checks the entries finds again
            self._fault = error

    def believe(self, report: Report) -> None:
        """Tell what was found in entries that are now known to be those under the head; raises as ``audit_draws``."""
        if self._fault is not None:
            self._fault.hint = "the coordinator signed a head over this entry: ask its operator"
            raise self._fault
        report.absorb(self._report)


def _check_call(
    where: str, root: bytes | None, remember: Path | None, against: list[Path], save: Path | None, receipts: list[str]
) -> None:
    """What is read is there; what is written overwrites nothing that is read, nor the other, nor what is no log."""
    if _is_address(where) and root is None:
        raise LocalFault(
            E_USAGE, "whose log should it be?", expected="--root HEX", got="no root key",
            hint="the root public key stands in the run's join link (root=...)",
        )
    for receipt in receipts:
        if not _RECEIPT_ID.fullmatch(receipt):
            raise LocalFault(
                E_USAGE, "--receipt is no receipt id", expected="32 lower-case hex digits", got=receipt[:80],
                hint="a node's receipts stand in its folder, the run's in its log: submitted, receipt_id",
            )
    if receipts and not _is_address(where):
        raise LocalFault(E_USAGE, "--receipt asks a coordinator", expected="an address", got=where)
    inputs: list[Named] = [("--against", path) for path in against]
    if not _is_address(where):
        inputs.append(("the log", Path(where)))
    for name, path in inputs:
        check_input_file(name, path)
    if save is not None:
        check_output_file("--save", save, inputs)
        _check_replaceable("--save", save, log_file.MAGIC, "a log file, or a new file")
        inputs.append(("--save", save))
    if remember is not None:
        check_output_file("--remember", remember, inputs)
        _check_remembered(remember)


def _check_replaceable(name: str, path: Path, magic: bytes, expected: str) -> None:
    """An existing file that holds something else than what is about to be written is somebody's."""
    if path.is_file() and (start := _start_of(path, len(magic))) and start != magic:
        raise LocalFault(
            E_USAGE, f"{name} would overwrite something else", expected=expected, got=str(path)[:400],
            hint="nothing was written; give another name",
        )


def _check_remembered(path: Path) -> None:
    if not path.exists():
        return
    check_input_file("--remember", path)
    if _start_of(path, len(evidence_file.MAGIC)) == evidence_file.MAGIC:
        raise LocalFault(
            E_USAGE, "--remember would overwrite evidence", expected="a head that was remembered, or a new file",
            got=str(path)[:400], hint="compare with the head in an evidence file by --against",
        )
    _head_in("--remember", path)


def _is_address(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def _start_of(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)


@contextmanager
def _open(where: str) -> Iterator[LogSource]:
    if _is_address(where):
        with CoordinatorClient(where, None, deadline_s=_DEADLINE_S) as client:
            yield LiveLog(client)
        return
    yield FileLog(Path(where))


def _run_of(source: LogSource, root: bytes | None) -> tuple[RunManifest, bytes]:
    """The run manifest, and the root key it is signed by."""
    if isinstance(source, FileLog):
        if root is not None and root != source.root_public_key:
            raise PeerFault(
                E_WRONG_KEY, "the log is of a run of another root key", expected=root.hex(),
                got=source.root_public_key.hex(),
            )
        root = source.root_public_key
    assert root is not None  # an address is asked only with a root key
    try:
        return RunManifest.open(source.run_manifest, root), root
    except PeerFault as error:
        if isinstance(source, LiveLog):
            error.hint = "compare --root and the address with the run's join link: another run is served there"
        raise


def _known(remember: Path | None, against: list[Path]) -> list[KnownHead]:
    known = [KnownHead(str(path), _head_in("--against", path)) for path in against]
    if remember is not None and remember.exists():
        known.insert(0, KnownHead(str(remember), _head_in("--remember", remember)))
    return known


def _head_in(name: str, path: Path) -> str:
    """The signed head in a file: a note as the coordinator serves it, or an evidence file. No signature is checked."""
    with path.open("rb") as file:
        data = file.read(MAX_NOTE_BYTES + 1)
        if not data.startswith(evidence_file.MAGIC):
            try:
                note = data.decode()
                LogHead.peek(note)
            except (UnicodeDecodeError, PeerFault):
                raise _no_head(name, path) from None
            return note
        data += file.read(_MAX_EVIDENCE_BYTES + 1 - len(data))
    try:
        if len(data) > _MAX_EVIDENCE_BYTES:
            raise PeerFault(E_TOO_LARGE, "evidence too large", expected=f"<= {_MAX_EVIDENCE_BYTES} bytes")
        proof = evidence_file.decode(data).log
    except PeerFault as error:
        error.hint = f"{path} is no sound evidence: get it again from /v1/evidence/RECEIPT_ID of the coordinator"
        raise
    if proof is None:
        raise _no_head(name, path)
    return proof.head


def _no_head(name: str, path: Path) -> LocalFault:
    if name == "--remember":
        expected, hint = "a head that was remembered, or a new file", "nothing was written; give another name"
    else:
        expected, hint = "a signed head, or evidence that carries one", "heads are served at /v1/log/head"
    return LocalFault(
        E_USAGE, f"{name}: the file holds no log head", expected=expected, got=str(path)[:400], hint=hint
    )


def _save(path: Path, source: LogSource, result: LogAudit, root: bytes) -> None:
    """Write the log file. Of heads that contradict each other it is the larger one's: its entries are the proof.

    Raises:
        LocalFault: the entries are no longer those that were read before; when there is a fail to tell, that comes
            first, and this is told beside it.
    """
    note, head = max(
        ((note, LogHead.peek(note)) for note in (result.note, *result.conflicts)), key=lambda each: each[1].size
    )
    reader = LogReader(source, head)

    def checked() -> Iterator[LogEntry]:
        try:
            yield from reader
            reader.check()  # before the file takes the place of an older one
        except PeerFault as error:
            raise LocalFault(
                E_LOG_ANSWER, "the log was not saved: read again, its entries are others", expected=error.expected,
                got=error.got, hint="try again, by another way",
            ) from None

    try:
        log_file.write(path, root, source.run_manifest, note, checked())
    except (AssayError, OSError) as error:
        if result.outcome == "pass":
            raise
        print(printable(as_ours(error)), file=sys.stderr)


def _finish(result: LogAudit, remember: Path | None) -> None:
    """Remember the head, but never one that contradicts the one remembered."""
    if remember is None or result.outcome != "pass":
        return
    with replacing(remember) as file:
        file.write(result.note.encode())


def _print(result: LogAudit, root: str, summary: str) -> None:
    console = Console(highlight=False)
    console.print(f"run  {printable(result.run.name)} ({result.run.run_id})", soft_wrap=True, markup=False)
    console.print(root, soft_wrap=True, markup=False)
    console.print(findings_table(result.report.findings))
    console.print(summary, soft_wrap=True, markup=False)
    console.print(f"[{_STYLE[result.outcome]}]{result.outcome.upper()}[/]{ended('', result.code)}", soft_wrap=True)
    for cause in likely_causes(result.code):
        console.print(f"  - {cause}", soft_wrap=True, markup=False)
    if result.code is not None:
        console.print(f"what to do: {advice(result.code)}", soft_wrap=True, markup=False)
    for note in result.conflicts:
        alone = LogHead.peek(note).size == result.head.size
        console.print(_HEADS_PROVE if alone else _ENTRIES_PROVE, soft_wrap=True)
        console.print(_shown(note), soft_wrap=True, markup=False)
    if result.conflicts:
        console.print(_shown(result.note), soft_wrap=True, markup=False)


def _shown(note: str) -> str:
    return "\n".join(printable(line) for line in note.splitlines())
