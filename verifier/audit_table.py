"""An audit for human eyes: a table of checks, the first failing token, likely causes, how to do it again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protocol.messages import Finding
from protocol.text import printable
from verifier.audit import Audit, IgnoredVerdict

_STYLE = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}


def root_words(root: str, *, pinned: bool) -> str:
    """Whose run it is, and whether whoever asked said so."""
    return f"root key {root} ({'as given' if pinned else 'NOT pinned: compare it, or pass --root'})"


def print_audit(result: Audit, file: Path, checkpoints: list[Path], data: list[Path], *, pinned: bool) -> None:
    """Write the audit to the terminal."""
    console = Console(highlight=False)
    lease, judgement = result.lease, result.judgement
    say = partial(console.print, soft_wrap=True)
    say(f"run      {plain(result.run.name)} ({result.run.run_id})")
    say(root_words(result.root, pinned=pinned))
    say(f"node     {result.node_id}")
    say(
        f"lease    {lease.lease_id}: {plain(lease.environment)}, group {lease.group}, samples {lease.samples}, "
        f"version {lease.start_version}"
    )
    console.print(findings_table(result.judgement.findings))
    for verdict in result.verdicts:
        say(f"verdict in the file: {plain(ended(verdict.outcome, verdict.code))} by {verdict.verifier_id[:16]}")
    for one in result.ignored:
        signers = " ".join(_short(one))
        say(f"verdict in the file IGNORED ({one.code}): {plain(one.why)}; it claims to be by {plain(signers)}")
    if result.ignored:
        say("The outcome below rests on this audit's own checks, not on what was ignored.")
    if not result.in_log:
        say("The file does not show that receipt and verdicts are in the run's log.")
    if not result.recomputed:
        say("The model was not asked (T2) and the reward not recomputed: give --checkpoint for that.")
    style = _STYLE[judgement.outcome]
    reached = f"after {', '.join(judgement.tiers)}" if judgement.tiers else "before any tier was complete"
    say(f"[{style}]{judgement.outcome.upper()}[/]{ended('', judgement.code)} {reached}")
    _print_failure(say, result)
    say(f"again: {plain(command(result, file, checkpoints, data))}")


def plain(text: object) -> str:
    """Text from outside for a console: no markup, no control of the terminal."""
    return escape(printable(text))


def ended(outcome: str, code: str | None) -> str:
    """An outcome with its code, where it has one."""
    return outcome if code is None else f"{outcome} {code}"


def _short(verdict: IgnoredVerdict) -> list[str]:
    return [signer[:16] for signer in verdict.signers] or ["nobody"]


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row per check."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "expected", "got"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]FAIL[/]"
        table.add_row(mark, plain(finding.check), plain(finding.expected), plain(finding.got))
    return table


def _print_failure(say: Callable[[str], None], result: Audit) -> None:
    first = result.first_failure
    if first is None:
        return
    if first.position is not None:
        say(f"first failing token: sample {first.sample}, position {first.position} ({plain(first.check)})")
    if result.causes:
        say("likely causes, likeliest first:")
        for cause in result.causes:
            say(f"  - {plain(cause)}")


def command(result: Audit, file: Path, checkpoints: list[Path], data: list[Path]) -> str:
    """What to type to do an audit again."""
    words = ["assay", "audit", str(file), "--root", result.root]
    for path in checkpoints:
        words += ["--checkpoint", str(path)]
    for path in data:
        words += ["--data", str(path)]
    return shlex.join(words)
