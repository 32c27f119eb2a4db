"""How an audit command ends: exit codes, and one form for every error, on the terminal and as JSON."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from io import TextIOWrapper
from typing import Final, NoReturn, cast

import typer

from protocol.causes import ADVICE, AT
from protocol.errors import E_INTERNAL, USAGE_CODES, AssayError, LocalFault, PeerFault
from protocol.paths import E_FILE
from protocol.text import printable

#: Exit codes; 2 is also what a wrong call gives.
EXIT: Final = {"pass": 0, "fail": 1, "usage": 2, "malformed": 3, "inconclusive": 4}
#: Name of the JSON form, and its version: it grows when a key is taken away or changes its meaning, not for new keys.
SCHEMA: Final = "assay.audit"
SCHEMA_VERSION: Final = 1
#: Whether errors show their tracebacks: ``--debug`` of the front door.
DEBUG: Final[ContextVar[bool]] = ContextVar("debug", default=False)

_EVIDENCE: Final = "get the evidence again from /v1/evidence/RECEIPT_ID of the coordinator: this was damaged or changed"
_LOG: Final = "download the log again: assay audit log http://HOST:PORT --root HEX --save FILE"
#: What to do about a file that is malformed or signed by somebody else, by kind of audit.
_AGAIN: Final = {"submission": _EVIDENCE, "log": _LOG, "run": _LOG}


def leave(kind: str, as_json: bool, audit: Callable[[], str]) -> NoReturn:
    """Run an audit and leave with the exit code of its outcome; an error is shown in the form that was asked for.

    A report that nobody got is inconclusive, whatever was found, and so is an audit that broke down, over whatever
    it was given: no exit code says *pass* or *fail* on its own. Ctrl-C is not an end of an audit and goes on up.
    """
    with suppress(AttributeError, ValueError):  # not a stream of text with an encoding
        cast("TextIOWrapper", sys.stdout).reconfigure(errors="backslashreplace")
    try:
        outcome = _outcome(kind, as_json, audit)
        sys.stdout.flush()
    except SystemExit:  # of rich, whose reader has gone
        outcome = _undelivered(BrokenPipeError())
    except Exception as error:  # noqa: BLE001 - not even the error could be told
        outcome = _undelivered(error)
    raise typer.Exit(EXIT[outcome])


def refuse(kind: str, fault: AssayError, as_json: bool) -> NoReturn:
    """Leave without an audit."""

    def refusal() -> str:
        raise fault

    leave(kind, as_json, refusal)


def as_ours(error: BaseException) -> AssayError:
    """An error in our own words: one that nobody foresaw is a fault of this tool, and blames nobody."""
    if DEBUG.get():
        with suppress(OSError, ValueError):
            traceback.print_exception(error)
    if isinstance(error, AssayError):
        return error
    if isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename}"
        return LocalFault(E_FILE, "a file cannot be read or written", got=f"{error.strerror}{where}")
    return LocalFault(
        E_INTERNAL, "the audit broke down", expected="an audit that comes to its end",
        got=f"{type(error).__name__}: {error}"[:400],
        hint="a fault of this tool or machine, and no word against anybody; assay --debug audit ... shows where",
    )


def _outcome(kind: str, as_json: bool, audit: Callable[[], str]) -> str:
    try:
        return audit()
    except Exception as error:
        nameless = isinstance(error, OSError) and error.filename is None
        if nameless and (isinstance(error, BrokenPipeError) or not as_json):
            raise  # not about a file: the terminal went away, for example
        return show_error(kind, as_ours(error), as_json)


def _undelivered(error: Exception) -> str:
    """The report could not be written to where it should go: a full disk, or a reader that has gone."""
    with suppress(OSError, AttributeError):
        if not isinstance(error, BrokenPipeError):
            why = printable(error.strerror if isinstance(error, OSError) else type(error).__name__)
            sys.stderr.write(f"inconclusive: {E_FILE}: the report cannot be written; got {why}\n")
    with suppress(OSError, ValueError, AttributeError):  # what is left in the buffer would fail once more at the end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return "inconclusive"


def show_error(kind: str, error: AssayError, as_json: bool) -> str:
    """Print an error with what to do about it; its outcome."""
    malformed = isinstance(error, PeerFault)
    outcome = "malformed" if malformed else "usage" if error.code in USAGE_CODES else "inconclusive"
    _, placed = AT.get((error.code, error.step), ((), None))
    error.hint = error.hint or placed or ADVICE.get(error.code) or (_AGAIN.get(kind) if malformed else None)
    if as_json:
        from verifier.audit_report import error_json

        sys.stdout.write(error_json(kind, outcome, error) + "\n")
    else:
        sys.stderr.write(f"{outcome}: {printable(error)}\n")
    return outcome
