"""``assay audit log`` and ``assay audit run``: where the log comes from, what is remembered, what is printed."""

from __future__ import annotations

import os
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
from protocol.messages import RunManifest
from protocol.signed_note import MAX_NOTE_BYTES
from verifier.audit_report import log_json
from verifier.audit_table import findings_table
from verifier.draw_audit import DrawAudit, audit_draws
from verifier.log_audit import KnownHead, LogAudit, LogReader, audit_log, check_fresh, check_receipt
from verifier.log_source import FileLog, LiveLog, LogSource

#: Longest time one question to the coordinator takes, retries included, in seconds.
_DEADLINE_S: Final = 30.0
_STYLE: Final = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}


def audit(
    where: str, root: bytes | None, remember: Path | None, against: list[Path], receipts: list[str], save: Path | None,
    *, whole: bool, as_json: bool,
) -> str:
    """``assay audit log``; the outcome."""
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
        _print(result, f"{result.head.size} entries under {result.head.root.hex()}")
    return result.outcome


def audit_run(where: str, root: bytes | None, remember: Path | None, *, as_json: bool) -> str:
    """``assay audit run``; the outcome."""
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


@contextmanager
def _open(where: str) -> Iterator[LogSource]:
    if where.startswith(("http://", "https://")):
        with CoordinatorClient(where, None, deadline_s=_DEADLINE_S) as client:
            yield LiveLog(client)
        return
    path = Path(where)
    if not path.is_file():
        raise LocalFault(E_USAGE, "no such log", expected="http://HOST:PORT or a log file", got=where)
    yield FileLog(path)


def _run_of(source: LogSource, root: bytes | None) -> tuple[RunManifest, bytes]:
    """The run manifest, and the root key it is signed by."""
    if isinstance(source, FileLog):
        if root is not None and root != source.root_public_key:
            raise PeerFault(
                E_WRONG_KEY, "the log is of a run of another root key", expected=root.hex(),
                got=source.root_public_key.hex(),
            )
        root = source.root_public_key
    if root is None:
        raise LocalFault(
            E_USAGE, "whose log should it be?", expected="--root HEX", got="no root key",
            hint="the root public key stands in the run's join link (root=...)",
        )
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
    log_file.write(path, root, source.run_manifest, result.note, reader)
    reader.check()


def _finish(result: LogAudit, remember: Path | None) -> None:
    """Remember the head, but never one that contradicts the one remembered."""
    if remember is None or result.outcome != "pass":
        return
    temporary = remember.with_name(f"{remember.name}.part")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(result.note)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(remember)


def _print(result: LogAudit, summary: str) -> None:
    console = Console(highlight=False)
    console.print(f"run  {result.run.name} ({result.run.run_id})", soft_wrap=True, markup=False)
    console.print(findings_table(result.report.findings))
    console.print(summary, soft_wrap=True, markup=False)
    console.print(f"[{_STYLE[result.outcome]}]{result.outcome.upper()}[/] {result.code or ''}", soft_wrap=True)
    for cause in likely_causes(result.code):
        console.print(f"  - {cause}", soft_wrap=True, markup=False)
    if result.conflicts:
        words = "These heads contradict each other. Both are signed: keep them, they prove it to anybody."
        console.print(words, soft_wrap=True)
        for note in (*result.conflicts, result.note):
            console.print(note, soft_wrap=True, markup=False)
