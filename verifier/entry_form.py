"""What the entries of a log must hold for its draws to be followed, by kind.

Only the fields that an audit reads. Kinds and fields that are not named here are nobody's business, as
``docs/spec/log.md`` says of readers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from protocol.log_entry import LogEntry

_HEX32: Final = re.compile(r"[0-9a-f]{64}")

_Form = tuple[str, Callable[[Any], bool]]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_hex32(value: Any) -> bool:
    return isinstance(value, str) and _HEX32.fullmatch(value) is not None


def _is_number(value: Any) -> bool:
    return type(value) is int


def _is_outcome(value: Any) -> bool:
    return isinstance(value, str) and value in ("pass", "fail", "inconclusive")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_TEXT: Final[_Form] = ("text", _is_text)
_TEXT_OR_NONE: Final[_Form] = ("text or null", lambda value: value is None or _is_text(value))
_DIGEST: Final[_Form] = ("64 lower-case hex digits", _is_hex32)
_NUMBER: Final[_Form] = ("a whole number", _is_number)
_FLAG: Final[_Form] = ("true or false", lambda value: isinstance(value, bool))
_OUTCOME: Final[_Form] = ("pass, fail or inconclusive", _is_outcome)
_TEXTS: Final[_Form] = ("a list of texts", _is_texts)
_OBJECT: Final[_Form] = ("an object", lambda value: isinstance(value, dict))

_FIELDS: Final[Mapping[str, Mapping[str, _Form]]] = {
    "founded": {"run_id": _TEXT},
    "node-registered": {"node_id": _DIGEST, "profile": _TEXT},
    "profile-changed": {"node_id": _DIGEST, "profile": _TEXT},
    "submitted": {
        "receipt_id": _TEXT, "sha256": _DIGEST, "commitment_sha256": _DIGEST, "node_id": _DIGEST, "epoch": _NUMBER,
        "rate_ppm": _NUMBER,
    },
    "verdict": {
        "receipt_id": _TEXT, "sha256": _DIGEST, "verifier_id": _TEXT, "outcome": _OUTCOME, "code": _TEXT_OR_NONE,
        "tiers": _TEXTS, "counted": _FLAG,
    },
    "set-aside": {"receipt_id": _TEXT},
    "review": {"receipt_id": _TEXT},
    "suspicion": {"receipt_id": _TEXT, "node_id": _DIGEST, "before_milli": _NUMBER, "after_milli": _NUMBER},
    "banned": {"node_id": _DIGEST, "receipt_id": _TEXT_OR_NONE},
    "unbanned": {"node_id": _DIGEST},
    "batch": {"version": _NUMBER, "sha256": _DIGEST},
    "audits-forced": {"node_id": _DIGEST, "bundles": _NUMBER},
    "group-cancelled": {"cause": _TEXT, "dropped_by": _OBJECT},
    "epoch-began": {"epoch": _NUMBER, "key_sha256": _DIGEST},
    "epoch-revealed": {"epoch": _NUMBER, "key": _DIGEST},
    "log-rebuilt": {"entries": _NUMBER},
}


def malformed(entry: LogEntry, *, complete: bool = True) -> tuple[str, str, str] | None:
    """The first field that does not fit the kind: its name, what is expected, what is there. None when all fit.

    Args:
        complete: whether a field that is missing does not fit; entries of the first release hold fewer.
    """
    for name, (expected, fits) in _FIELDS.get(entry.kind, {}).items():
        if name not in entry.body:
            if not complete:
                continue
            return name, expected, "nothing"
        if not fits(entry.body[name]):
            return name, expected, repr(entry.body[name])[:80]
    return None
