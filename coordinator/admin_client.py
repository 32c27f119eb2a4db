"""The operator's side of the admin API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from coordinator.server import ADDRESS_FILE
from protocol.api import JoinLink, error_of
from protocol.errors import E_CONFIG, E_KEY_FILE, E_UNREACHABLE, LocalFault, Transient

TIMEOUT_S = 30.0


class AdminClient:
    """Talks to the coordinator that serves a directory, with the admin token that lies in it.

    Raises:
        LocalFault: ``E_CONFIG`` when it is not the directory of a run; ``E_KEY_FILE`` when a file of it is unreadable.
    """

    def __init__(self, directory: Path, transport: httpx.BaseTransport | None = None):
        if not (directory / "link.txt").is_file():
            raise LocalFault(
                E_CONFIG, f"{directory} holds no run that was served", expected="a folder with link.txt",
                got="a folder without" if directory.is_dir() else "no such folder",
                hint="name the run's directory with --dir",
            )
        self._link = JoinLink.parse(_read(directory / "link.txt"))
        self._url = _serving_url(directory) or self._link.base_url
        token = _read(directory / "admin.token").strip()
        self._http = httpx.Client(
            base_url=self._url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_S, transport=transport,
            trust_env=False,
        )

    def link(self, token: str) -> str:
        """A join link with another token."""
        link = self._link
        return JoinLink(link.host, link.port, link.root, link.run_id, token, link.tls).format()

    def act(self, verb: str, **body: Any) -> dict[str, Any]:
        """``POST /v1/admin/{verb}``.

        Raises:
            AssayError: what the coordinator answered; ``E_UNREACHABLE`` when it does not answer.
        """
        return self._call("POST", f"/v1/admin/{verb}", body)

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes."""
        found: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = self._call("GET", f"/v1/nodes?limit=1000&after={after}", None)
            found += page["nodes"]
            after = page["next"]
        return found

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Transient(
                E_UNREACHABLE, f"no answer from {self._url}", got=str(error),
                hint="is `assay coordinator serve DIR` running?",
            ) from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_error or not isinstance(answer, dict):
            raise error_of(answer, response.status_code)
        return answer


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalFault(
            E_KEY_FILE, f"cannot read {path}", got=str(error), hint="restore it from your backup"
        ) from None


def _serving_url(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / ADDRESS_FILE).read_text(encoding="ascii"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
