"""Addresses of HTTP servers, as a caller gives them."""

from __future__ import annotations

import httpx

from protocol.errors import E_CONFIG, LocalFault


def http_address(text: str) -> str:
    """``text`` without slashes at its end.

    Raises:
        LocalFault: ``E_CONFIG`` when no HTTP server can have this address.
    """
    why = None
    try:
        url = httpx.URL(text)
        url.raw_host.decode().encode("idna")  # as it will be looked up: no label is empty or over 63 bytes
        if url.scheme in ("http", "https") and url.host and url.port != 0:
            return text.rstrip("/")
    except (httpx.InvalidURL, UnicodeError) as error:
        why = str(error)[:99]
    raise LocalFault(
        E_CONFIG, "not the address of a server", expected="http://HOST:PORT or https://HOST:PORT",
        got=repr(text[:200]), hint=why,
    )
