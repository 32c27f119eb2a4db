"""``assay audit log`` and ``assay audit run``: where the log comes from, what is remembered, what is printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from protocol import evidence as evidence_file
from protocol import log_file
from protocol.causes import likely_causes
from protocol.client import CoordinatorClient
from protocol.clock import SystemClock
from protocol.errors import E_USAGE, E_WRONG_KEY, LocalFault, PeerFault
from protocol.log_entry import LogEntry
from protocol.messages import RunManifest
from protocol.paths import Named, check_input_file, check_output_file, replacing
from protocol.signed_note import MAX_NOTE_BYTES
from verifier.audit_report import log_json
from verifier.audit_table import ended, findings_table
from verifier.draw_audit import DrawAudit, audit_draws
from verifier.log_audit import KnownHead, LogAudit, LogReader, audit_log, check_fresh, check_receipt, entries
from verifier.log_source import FileLog, LiveLog, LogSource

#: Longest time one question to the coordinator takes, retries included, in seconds.
_DEADLINE_S: Final = 30.0
_STYLE: Final = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}


def audit(
    where: str, root: bytes | None, remember: Path | None, against: list[Path], receipts: list[str], save: Path | None,
    *, whole: bool, as_json: bool,
) -> str:
    """``assay audit log``; the outcome."""
    _check_call(where, root, remember, against, save)
    with _open(where) as source:
        run, pinned = _run_of(source, root)
        if receipts and not isinstance(source, LiveLog):
            raise LocalFault(E_USAGE, "--receipt asks a coordinator", expected="an address", got=where)
        known = _known(remember, against)
        result = audit_log(source, run, known, whole=whole or isinstance(source, FileLog) or save is not None)
        for receipt in receipts:
            assert isinstance(source, LiveLog)
            check_receipt(source, result, receipt)
        if isinstance(source, LiveLog):
            check_fresh(source, result, SystemClock().now_ms())
        if save is not None and result.outcome == "pass":
            _save(save, source, result, pinned)
    _finish(result, remember)
    if as_json:
        print(log_json("log", result, where))
    else:
        _print(result, f"{entries(result.head.size)} under {result.head.root.hex()}")
    return result.outcome


def audit_run(where: str, root: bytes | None, remember: Path | None, *, as_json: bool) -> str:
    """``assay audit run``; the outcome."""
    _check_call(where, root, remember, [], None)
    with _open(where) as source:
        run, _ = _run_of(source, root)
        result = audit_log(source, run, _known(remember, []), whole=True)
        draws = DrawAudit()
        if result.outcome == "pass":
            draws = audit_draws(run, LogReader(source, result.head), result.report)
    _finish(result, remember)
    if as_json:
        print(log_json("run", result, where, draws=draws.to_dict()))
    else:
        _print(result, draws.words())
    return result.outcome


def _check_call(
    where: str, root: bytes | None, remember: Path | None, against: list[Path], save: Path | None
) -> None:
    """What is read is there; what is written overwrites nothing that is read, nor the other."""
    if _is_address(where) and root is None:
        raise LocalFault(
            E_USAGE, "whose log should it be?", expected="--root HEX", got="no root key",
            hint="the root public key stands in the run's join link (root=...)",
        )
    inputs: list[Named] = [("--against", path) for path in against]
    for name, path in inputs:
        check_input_file(name, path)
    if not _is_address(where):
        inputs.append(("the log", Path(where)))
        check_input_file("the log", Path(where))
    if save is not None:
        check_output_file("--save", save, inputs)
        inputs.append(("--save", save))
    if remember is None:
        return
    check_output_file("--remember", remember, inputs)
    if remember.exists() and _is_evidence(remember):
        raise LocalFault(
            E_USAGE, "--remember would overwrite evidence", expected="a head that was remembered, or a new file",
            got=str(remember), hint="compare with the head in an evidence file by --against",
        )


def _is_address(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def _is_evidence(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(evidence_file.MAGIC)) == evidence_file.MAGIC


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
    return RunManifest.open(source.run_manifest, root), root


def _known(remember: Path | None, against: list[Path]) -> list[KnownHead]:
    known = [KnownHead(str(path), _head_in(path)) for path in against]
    if remember is not None and remember.exists():
        known.insert(0, KnownHead(str(remember), _head_in(remember)))
    return known


def _head_in(path: Path) -> str:
    """The signed head in a file: a note as the coordinator serves it, or an evidence file."""
    with path.open("rb") as file:
        data = file.read(MAX_NOTE_BYTES + 1)
        if not data.startswith(evidence_file.MAGIC):
            try:
                return data.decode()
            except UnicodeDecodeError:
                raise LocalFault(E_USAGE, f"{path} holds no log head", expected="a signed note") from None
        data += file.read()
    proof = evidence_file.decode(data).log
    if proof is None:
        raise LocalFault(E_USAGE, f"{path} holds no log head", expected="evidence that was served by a coordinator")
    return proof.head


def _save(path: Path, source: LogSource, result: LogAudit, root: bytes) -> None:
    reader = LogReader(source, result.head)

    def checked() -> Iterator[LogEntry]:
        yield from reader
        reader.check()  # before the file takes the place of an older one

    log_file.write(path, root, source.run_manifest, result.note, checked())


def _finish(result: LogAudit, remember: Path | None) -> None:
    """Remember the head, but never one that contradicts the one remembered."""
    if remember is None or result.outcome != "pass":
        return
    with replacing(remember) as file:
        file.write(result.note.encode())


def _print(result: LogAudit, summary: str) -> None:
    console = Console(highlight=False)
    console.print(f"run  {result.run.name} ({result.run.run_id})", soft_wrap=True, markup=False)
    console.print(findings_table(result.report.findings))
    console.print(summary, soft_wrap=True, markup=False)
    console.print(f"[{_STYLE[result.outcome]}]{result.outcome.upper()}[/]{ended('', result.code)}", soft_wrap=True)
    for cause in likely_causes(result.code):
        console.print(f"  - {cause}", soft_wrap=True, markup=False)
    if result.conflicts:
        words = "These heads contradict each other. Both are signed: keep them, they prove it to anybody."
        console.print(words, soft_wrap=True)
        for note in (*result.conflicts, result.note):
            console.print(note, soft_wrap=True, markup=False)
