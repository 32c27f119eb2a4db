"""Canonical JSON: one byte string per value, so that hashes and signatures mean the same on every machine.

UTF-8, keys sorted by code point, no white space, no floats (fixed-point integers with the unit in the name
are used instead), no duplicate keys, integers within +-2^63. Spec: ``docs/spec/messages.md``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NoReturn

from protocol.errors import E_JSON, E_TOO_LARGE, PeerFault

#: Longest canonical message any decoder reads, in bytes. Larger data goes to the object store by hash.
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
#: Deepest nesting accepted; a deeper message would let a peer exhaust the parser's stack.
MAX_DEPTH: Final = 16
_INT_LIMIT: Final = 2**63


def encode(value: Any) -> bytes:
    """Canonical bytes of ``value`` (dict, list, str, bool, None, int).

    Raises:
        ValueError: the value holds a float, a non-string key, or an integer beyond 64 bits (our own bug).
    """
    _check(value, 0)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode(data: bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """The value of canonical ``data``.

    Raises:
        PeerFault: ``E_TOO_LARGE`` over ``max_bytes``; ``E_JSON`` if the bytes are not the canonical form.
    """
    if len(data) > max_bytes:
        raise PeerFault(E_TOO_LARGE, "message too large", expected=f"<= {max_bytes} bytes", got=f"{len(data)} bytes")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
        raise PeerFault(E_JSON, "message nested too deeply", expected=f"<= {MAX_DEPTH} levels")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_float=_refuse, parse_constant=_refuse
        )
        canonical = encode(value)
    except (ValueError, RecursionError) as error:
        raise PeerFault(E_JSON, "message is not canonical JSON", expected="canonical JSON", got=str(error)) from None
    if canonical != data:
        raise PeerFault(E_JSON, "message is not in canonical form", expected="sorted keys, no white space")
    return value


def digest(value: Any) -> str:
    """Lower-case hex SHA-256 of the canonical bytes of ``value``."""
    return hashlib.sha256(encode(value)).hexdigest()


def _check(value: Any, depth: int) -> None:
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if not -_INT_LIMIT <= value < _INT_LIMIT:
            raise ValueError("integer beyond 64 bits")
        return
    if depth == MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        for item in value:
            _check(item, depth + 1)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} is not a string")
            _check(item, depth + 1)
        return
    raise ValueError(f"{type(value).__name__} has no canonical form")


def _depth(data: bytes) -> int:
    """Deepest nesting of brackets outside strings, found without recursion."""
    deepest = depth = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")
