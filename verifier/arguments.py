"""Words of a command line that several commands take."""

from __future__ import annotations

from typing import Final

from protocol.errors import E_USAGE, LocalFault

_HEX_KEY: Final = 64


def root_key(root: str) -> bytes:
    """A run's root public key, from ``--root``.

    Raises:
        LocalFault: ``E_USAGE``.
    """
    try:
        key = bytes.fromhex(root)
    except ValueError:
        key = b""
    if len(root) != _HEX_KEY or len(key) * 2 != _HEX_KEY:
        raise LocalFault(
            E_USAGE, "--root is not a public key", expected=f"{_HEX_KEY} hex digits", got=root[:80] or "nothing",
            hint="the root public key stands in the run's join link (root=...)",
        )
    return key


def address(source: str) -> str:
    """A coordinator's address, whose scheme means the same in any case; or a file's name as it is."""
    scheme, mark, rest = source.partition("://")
    return f"{scheme.lower()}{mark}{rest}" if scheme.lower() in ("http", "https") else source
