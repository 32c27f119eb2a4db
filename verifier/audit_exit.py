"""How an audit command ends: exit codes, and one form for every error, on the terminal and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import typer

from protocol.causes import ADVICE
from protocol.errors import USAGE_CODES, AssayError, LocalFault, PeerFault
from protocol.paths import E_FILE

#: Exit codes; 2 is also what a wrong call gives.
EXIT: Final = {"pass": 0, "fail": 1, "usage": 2, "malformed": 3, "inconclusive": 4}

_EVIDENCE: Final = "get the evidence again from /v1/evidence/RECEIPT_ID of the coordinator: this was damaged or changed"
_LOG: Final = "download the log again: assay audit log http://HOST:PORT --root HEX --save FILE"
#: What to do about a file that is malformed or signed by somebody else, by kind of audit.
_AGAIN: Final = {"submission": _EVIDENCE, "log": _LOG, "run": _LOG}


def leave(kind: str, as_json: bool, audit: Callable[[], str]) -> None:
    """Run an audit and leave with the exit code of its outcome; an error is shown in the form that was asked for."""
    try:
        outcome = audit()
    except AssayError as error:
        outcome = show_error(kind, error, as_json)
    except OSError as error:
        if error.filename is None:
            raise  # not about a file: the terminal went away, for example
        fault = LocalFault(E_FILE, "a file cannot be read or written", got=f"{error.strerror}: {error.filename}")
        outcome = show_error(kind, fault, as_json)
    raise typer.Exit(EXIT[outcome])


def show_error(kind: str, error: AssayError, as_json: bool) -> str:
    """Print an error with what to do about it; its outcome."""
    malformed = isinstance(error, PeerFault)
    outcome = "malformed" if malformed else "usage" if error.code in USAGE_CODES else "inconclusive"
    error.hint = error.hint or ADVICE.get(error.code) or (_AGAIN.get(kind) if malformed else None)
    if as_json:
        from verifier.audit_report import error_json

        sys.stdout.write(error_json(kind, outcome, error) + "\n")
    else:
        sys.stderr.write(f"{outcome}: {error}\n")
    return outcome
