"""``assay audit``: arguments, output and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from protocol.errors import E_USAGE, AssayError, LocalFault, PeerFault

if TYPE_CHECKING:
    from verifier.audit import Audit

#: Exit codes; 2 is also what a wrong call gives.
EXIT: Final = {"pass": 0, "fail": 1, "usage": 2, "malformed": 3, "inconclusive": 4}
_HEX_KEY: Final = 64
_EPILOG: Final = """\b
Examples:
  assay audit int8.evidence --checkpoint demo/coordinator/store
  assay audit mine.evidence --checkpoint v7 --checkpoint v8 --root HEX --json

\b
Exit codes: 0 pass, 1 fail, 2 bad usage, 3 malformed or not signed by the root key, 4 inconclusive.
"""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=_EPILOG)
def audit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="An evidence file.")],
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, file_okay=False, help="A model folder of one version, or the run's object store. May repeat."
        ),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="A task's data file. May repeat.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Root public key of the run that you trust, hex.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Check one evidence file by yourself, offline.

    Runs every check that the file and the checkpoints allow: signatures, structure, replay of every draw, reward,
    recomputation with the model. Without --checkpoint the model's part is left out.
    """
    try:
        outcome = _audit(file, checkpoint or [], data or [], root, as_json)
    except AssayError as error:
        outcome = "malformed" if isinstance(error, PeerFault) else "usage" if error.code == E_USAGE else "inconclusive"
        _show_error(outcome, error, as_json)
    raise typer.Exit(EXIT[outcome])


def _audit(file: Path, checkpoints: list[Path], data: list[Path], root: str | None, as_json: bool) -> str:
    from verifier.audit import audit as run_audit
    from verifier.audit import read_evidence
    from verifier.material import Material

    key = _root_key(root)
    material = Material.of(checkpoints, data)
    evidence, run = read_evidence(file.read_bytes(), key)
    result = run_audit(evidence, run, material)
    if as_json:
        _print_json(result, file, pinned=key is not None)
    else:
        from verifier.audit_table import print_audit

        print_audit(result, file, checkpoints, data, pinned=key is not None)
    return result.judgement.outcome


def _root_key(root: str | None) -> bytes | None:
    if root is None:
        return None
    try:
        key = bytes.fromhex(root)
    except ValueError:
        key = b""
    if len(root) != _HEX_KEY or len(key) * 2 != _HEX_KEY:
        raise LocalFault(E_USAGE, "--root is not a public key", expected=f"{_HEX_KEY} hex digits", got=root[:80])
    return key


def _print_json(result: Audit, file: Path, *, pinned: bool) -> None:
    from verifier.causes import likely_causes

    judgement, first = result.judgement, result.first_failure
    print(json.dumps({
        "file": str(file), "outcome": judgement.outcome, "code": judgement.code, "tiers": list(judgement.tiers),
        "recomputed": result.recomputed, "run_id": result.run.run_id, "root": result.root, "root_pinned": pinned,
        "node_id": result.node_id, "lease_id": result.lease.lease_id, "group": result.lease.group,
        "start_version": result.lease.start_version, "samples": list(judgement.samples),
        "rewards_micro": list(judgement.rewards_micro), "tokens": judgement.tokens,
        "first_failure": None if first is None else first.model_dump(mode="json"),
        "likely_causes": list(likely_causes(judgement.code)),
        "findings": [finding.model_dump(mode="json") for finding in judgement.findings],
        "verdicts": [verdict.model_dump(mode="json") for verdict in result.verdicts],
        "verdicts_ignored": result.verdicts_ignored,
    }, indent=2))


def _show_error(outcome: str, error: AssayError, as_json: bool) -> None:
    if as_json:
        print(json.dumps({
            "outcome": outcome, "code": error.code, "message": error.message,
            "expected": None if error.expected is None else str(error.expected),
            "got": None if error.got is None else str(error.got), "hint": error.hint,
        }, indent=2))
    else:
        print(f"{outcome}: {error}", file=sys.stderr)
