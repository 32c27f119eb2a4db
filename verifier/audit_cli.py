"""``assay audit``: arguments, output and exit codes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from protocol.identity import root_key
from protocol.paths import Named, check_input_file, check_input_folder, check_output_file, read_input_file
from protocol.text import printable
from verifier.audit_exit import as_ours, leave
from verifier.audit_group import AuditGroup

_EPILOG: Final = """\b
Examples:
  assay audit int8.evidence --checkpoint demo/coordinator/store
  assay audit mine.evidence --checkpoint v7 --checkpoint v8 --root HEX --html mine.html
  assay audit log http://HOST:8700 --root HEX --remember run.head
  assay audit explain E_HEAD_KL

\b
Exit codes: 0 pass, 1 fail, 2 bad usage, 3 malformed or not signed by the root key, 4 inconclusive.
"""

app = typer.Typer(
    cls=AuditGroup, help="Check by yourself what others did: a submission, the log, the audit draws.", epilog=_EPILOG,
    rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Root = Annotated[str | None, typer.Option(help="Root public key of the run that you trust, hex.")]
Source = Annotated[str, typer.Argument(help="The coordinator's address, or a log file.")]
Remember = Annotated[
    Path | None,
    typer.Option(help="Remember the head in this file; the next audit checks that the log has only grown since."),
]


@app.command("file", epilog=_EPILOG)
def file_command(
    file: Annotated[Path, typer.Argument(help="An evidence file.")],
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="A model folder of one version, or the run's object store. May repeat."),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="A task's data file. May repeat.")
    ] = None,
    root: Root = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained page with every token's residual.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check one evidence file by yourself, offline (the word `file` may be left out).

    Runs every check that the file and the checkpoints allow: signatures, log, structure, replay of every draw, reward,
    recomputation with the model. Without --checkpoint the model's part is left out.
    """
    leave("submission", as_json, lambda: _audit(file, checkpoint or [], data or [], root, html, as_json))


@app.command("log", epilog="Example: assay audit log http://HOST:8700 --root HEX --remember run.head")
def log_command(
    source: Source,
    root: Root = None,
    remember: Remember = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="A head seen elsewhere, or an evidence file. May repeat."),
    ] = None,
    receipt: Annotated[list[str] | None, typer.Option(help="A receipt id that must be in it. May repeat.")] = None,
    save: Annotated[Path | None, typer.Option(help="Download the log to this file.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Read every entry instead of asking for proofs.")] = False,
    as_json: Json = False,
) -> None:
    """Check that a run's log is signed and has only grown.

    By proofs alone with a coordinator's address; a log file is read to its end.
    """
    from verifier import log_cli

    leave("log", as_json, lambda: log_cli.audit(
        _address(source), _root_key(root), remember, against or [], receipt or [], save, whole=whole, as_json=as_json
    ))


@app.command("run", epilog="Example: assay audit run http://HOST:8700 --root HEX --remember run.head")
def run_command(source: Source, root: Root = None, remember: Remember = None, as_json: Json = False) -> None:
    """Re-derive every audit draw of a run from its log.

    Checks that each draw key was committed to and revealed, that every node was drawn at the rate of the rules, that
    no drawn bundle was skipped, and that nobody was audited or banned on a false pretext.
    """
    from verifier import log_cli

    leave("run", as_json, lambda: log_cli.audit_run(
        _address(source), _root_key(root), remember, as_json=as_json
    ))


@app.command("explain", epilog="Example: assay audit explain E_HEAD_KL")
def explain_command(
    what: Annotated[str, typer.Argument(help="An error code, or the JSON report of an audit.")], as_json: Json = False
) -> None:
    """What a code means, what usually lies behind it, and what to do."""
    from verifier.explain import explain

    def show() -> str:
        print(explain(what, as_json=as_json))
        return "pass"

    leave("explanation", as_json, show)


def _audit(
    file: Path, checkpoints: list[Path], data: list[Path], root: str | None, html: Path | None, as_json: bool
) -> str:
    inputs: list[Named] = [
        ("the evidence", file), *(("--checkpoint", path) for path in checkpoints), *(("--data", path) for path in data)
    ]
    for name, path in inputs:
        (check_input_folder if name == "--checkpoint" else check_input_file)(name, path)
    if html is not None:
        check_output_file("--html", html, inputs)
    from protocol.evidence import MAX_FILE_BYTES
    from verifier.audit import audit as run_audit
    from verifier.audit import read_evidence
    from verifier.audit_report import submission_json
    from verifier.audit_table import print_audit
    from verifier.material import Material

    key = _root_key(root)
    material = Material.of(checkpoints, data)
    evidence, run = read_evidence(read_input_file(file, MAX_FILE_BYTES), key)
    result = run_audit(evidence, run, material)
    if as_json:
        print(submission_json(result, file, pinned=key is not None))
    else:
        print_audit(result, file, checkpoints, data, pinned=key is not None)
    if html is not None:
        from verifier.audit_page import write_page

        try:
            write_page(html, result, file, checkpoints, data, material, pinned=key is not None)
        except Exception as error:  # noqa: BLE001 - the outcome stands without a picture of it
            print(f"the page was not written: {printable(as_ours(error))}", file=sys.stderr)
    return result.judgement.outcome


def _root_key(root: str | None) -> bytes | None:
    return None if root is None else root_key(root)


def _address(source: str) -> str:
    """A coordinator's address, whose scheme means the same in any case; or a file's name as it is."""
    scheme, mark, rest = source.partition("://")
    return f"{scheme.lower()}{mark}{rest}" if scheme.lower() in ("http", "https") else source
