"""The error tree of Assay.

::

    AssayError
    ├── PeerFault    bad data from somebody else; the only class that may ever touch reputation
    ├── LocalFault   our own disk, device, configuration, missing files; verdicts become *inconclusive*
    └── Transient    network, overload, a peer not ready; retried with backoff

Every error carries a stable ``code`` from :data:`CODES`, what was ``expected``, what was ``got`` and, where we
know it, a ``hint`` that tells a human what to do. ``docs/errors.md`` is generated from this module.
"""

from __future__ import annotations

from typing import Any, Final

from protocol.text import printable, printable_lines

#: Stable code -> one line of meaning. A code is never reused for another meaning and never removed.
CODES: Final[dict[str, str]] = {}


#: Codes of calls that were wrong from the start: the caller has to change something before trying again.
USAGE_CODES: Final[set[str]] = set()


def code(name: str, meaning: str, *, usage: bool = False) -> str:
    """Register a stable error code and return it. ``usage``: a command that ends with it was called wrongly.

    Raises:
        ValueError: the code exists already with another meaning.
    """
    if CODES.setdefault(name, meaning) != meaning:
        raise ValueError(f"error code {name} is registered twice")
    if usage:
        USAGE_CODES.add(name)
    return name


class AssayError(Exception):
    """Base of every error Assay raises on purpose."""

    status: int = 500  #: HTTP status used when the error leaves through an API.
    step: str = ""  #: of the checks at which it was found, where that says more of its causes than the code

    def __init__(self, code: str, message: str, *, expected: Any = None, got: Any = None, hint: str | None = None):
        if code not in CODES:
            raise ValueError(f"unregistered error code {code}")
        super().__init__(message)
        self.code, self.message = code, message
        self.expected, self.got, self.hint = expected, got, hint

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.message}"]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "; ".join(parts)

    def problem(self) -> dict[str, Any]:
        """The error as an ``application/problem+json`` object (RFC 9457) with our extension members."""
        return {
            "type": f"urn:assay:error:{self.code}",
            "title": CODES[self.code],
            "status": self.status,
            "detail": self.message,
            "code": self.code,
            "expected": None if self.expected is None else str(self.expected),
            "got": None if self.got is None else str(self.got),
            "hint": self.hint,
        }


def exit_status(error: AssayError) -> int:
    """The exit status that tells a caller whose move it is: 2 when the call or its configuration is wrong, else 1."""
    return 2 if error.code in USAGE_CODES else 1


def explain(error: AssayError) -> str:
    """An error for a human: what, expected, got, what to do. Nothing in it controls the terminal."""
    lines = [f"error {error.code}: {printable(error.message)}"]
    for label, value in (("expected", error.expected), ("got", error.got), ("hint", error.hint)):
        if value is not None:
            lines.append(f"  {label + ':':<9} {printable_lines(value, ' ' * 12)}")
    return "\n".join(lines)


class PeerFault(AssayError):
    """Data from a peer breaks a rule. Counts against the peer."""

    status = 422


class LocalFault(AssayError):
    """Our own disk, device, configuration or missing file. Never counts against anybody."""

    status = 500


class Transient(AssayError):
    """Network trouble, overload, not ready yet. Retried with backoff; never counts against anybody."""

    status = 503
    retry_after_s: float = 0.0  #: shortest wait before the next try, when the other side said so


# -- canonical messages and envelopes -----------------------------------------------------------------
E_JSON = code("E_JSON", "a message is not strict canonical JSON")
E_SCHEMA = code("E_SCHEMA", "a message does not fit its schema")
E_TOO_LARGE = code("E_TOO_LARGE", "an input is over its size limit")
E_ENVELOPE = code("E_ENVELOPE", "a DSSE envelope is malformed")
E_PAYLOAD_TYPE = code("E_PAYLOAD_TYPE", "an envelope holds another kind of message than the one asked for")
E_SIGNATURE = code("E_SIGNATURE", "no valid signature by the key that must have signed")
E_WRONG_KEY = code("E_WRONG_KEY", "a message is signed by a key that does not hold the role it needs", usage=True)
E_WRONG_RUN = code("E_WRONG_RUN", "a message belongs to another run")
E_EXPIRED = code("E_EXPIRED", "a signed message is past its expiry")
E_KEY_FILE = code("E_KEY_FILE", "a key file is missing, unreadable, malformed or open to other users", usage=True)
E_CONFIG = code("E_CONFIG", "a configuration value is missing, unknown or out of range", usage=True)
E_USAGE = code("E_USAGE", "a command was called with bad arguments", usage=True)
# -- carriers ------------------------------------------------------------------------------------------
E_NOT_FOUND = code("E_NOT_FOUND", "the named thing does not exist")
E_OBJECT_HASH = code("E_OBJECT_HASH", "bytes from a store do not match the hash they were asked for by")
E_STORE = code("E_STORE", "an object store failed")
E_UNREACHABLE = code("E_UNREACHABLE", "a peer cannot be reached or did not answer in time")
E_RATE_LIMITED = code("E_RATE_LIMITED", "too many requests; wait as told in Retry-After")
E_CONFLICT = code("E_CONFLICT", "the request contradicts what is already recorded")
E_INTERNAL = code("E_INTERNAL", "an unexpected fault on our side; the traceback is in the log, or shown by --debug")
