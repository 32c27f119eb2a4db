"""The secrets of one coordinator, read from files of mode 0600."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

from protocol.api import E_ADMIN_TOKEN
from protocol.disk import create_private
from protocol.errors import E_KEY_FILE, LocalFault, PeerFault
from protocol.identity import Identity


@dataclass(frozen=True)
class Keyring:
    """What signs leases and receipts, opens the admin API, and signs upload addresses."""

    identity: Identity
    admin_token: str

    @classmethod
    def load(cls, directory: Path) -> Keyring:
        """The secrets of a run's directory.

        Raises:
            LocalFault: ``E_KEY_FILE``.
        """
        try:
            token = (directory / "admin.token").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LocalFault(
                E_KEY_FILE, f"cannot read {directory / 'admin.token'}", got=str(error),
                hint="assay coordinator init DIR makes the directory of a run",
            ) from None
        return cls(Identity.load(directory / "keys" / "coordinator.key"), token)

    @property
    def upload_secret(self) -> bytes:
        """Key of the HMAC on upload addresses; follows from the coordinator's key, so a restart keeps them valid."""
        return hashlib.sha256(b"assay.upload-secret.v1\0" + self.identity.sign(b"assay.upload-secret.v1")).digest()

    def check_admin(self, authorization: str | None) -> None:
        """Refuse a request that does not carry ``Authorization: Bearer <admin token>``.

        Raises:
            PeerFault: ``E_ADMIN_TOKEN``.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self.admin_token.encode()):
            raise PeerFault(
                E_ADMIN_TOKEN, "the admin API needs the admin token", expected="Authorization: Bearer TOKEN",
                hint="the token is in the file admin.token of the run's directory",
            )


def write_secret(path: Path, text: str) -> None:
    """Write a file that only we can read; an existing one is never overwritten.

    Raises:
        LocalFault: ``E_KEY_FILE``.
    """
    try:
        create_private(path, f"{text}\n".encode("ascii"))
    except OSError as error:
        raise LocalFault(E_KEY_FILE, f"cannot create {path}", got=str(error)) from None


def new_token() -> str:
    """A fresh token of 192 bits, safe in a URL."""
    return secrets.token_urlsafe(24)
