"""Ed25519 identities. A party *is* its public key; its id is the SHA-256 of that key.

Key files hold the 32-byte seed as hex, are created with mode 0600 and refused when others can read them.
Spec: ``docs/spec/messages.md``, "Identities".
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from protocol.disk import create_private
from protocol.errors import E_KEY_FILE, E_SIGNATURE, E_USAGE, LocalFault, PeerFault


def key_id(public_key: bytes) -> str:
    """Id of a party: lower-case hex SHA-256 of its 32-byte Ed25519 public key."""
    return hashlib.sha256(public_key).hexdigest()


def verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Check an Ed25519 signature (RFC 8032).

    Raises:
        PeerFault: ``E_SIGNATURE``.
    """
    try:
        VerifyKey(public_key).verify(message, signature)
    except (BadSignatureError, ValueError, TypeError) as error:
        raise PeerFault(
            E_SIGNATURE, "signature does not verify", expected=f"a signature by {key_id(public_key)[:16]}",
            got=str(error),
        ) from None


class Identity:
    """A signing key of ours."""

    def __init__(self, seed: bytes):
        self._key = SigningKey(seed)
        self.public_key: bytes = bytes(self._key.verify_key)
        self.id: str = key_id(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.id[:16]})"

    @property
    def seed(self) -> bytes:
        """The 32-byte secret, for a library that signs by itself."""
        return bytes(self._key)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``message``."""
        return self._key.sign(message).signature

    @classmethod
    def generate(cls) -> Identity:
        """A fresh key from the operating system's randomness."""
        return cls(bytes(SigningKey.generate()))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file.

        Raises:
            LocalFault: ``E_KEY_FILE`` when it is missing, malformed, or readable by other users.
        """
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            text = path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise LocalFault(
                E_KEY_FILE, f"cannot read key file {path}", got=str(error),
                hint="name another file, or restore it from your backup: a lost key cannot be recovered",
            ) from None
        except UnicodeDecodeError:
            raise LocalFault(
                E_KEY_FILE, f"key file {path} is malformed", expected="64 hex digits", got="bytes that are not ASCII",
                hint="name another file, or restore it from your backup",
            ) from None
        if mode & 0o077:
            raise LocalFault(
                E_KEY_FILE, f"key file {path} is open to other users", expected="mode 0600", got=f"mode {mode:04o}",
                hint=f"chmod 600 {path}",
            )
        try:
            seed = bytes.fromhex(text)
        except ValueError:
            seed = b""
        if len(seed) != 32:
            raise LocalFault(
                E_KEY_FILE, f"key file {path} is malformed", expected="64 hex digits", got=f"{len(text)} characters",
                hint="name another file, or restore it from your backup",
            )
        return cls(seed)

    def save(self, path: Path) -> None:
        """Write the key file with mode 0600; an existing file is never overwritten.

        Raises:
            LocalFault: ``E_KEY_FILE`` when the file exists or cannot be written.
        """
        try:
            create_private(path, bytes(self._key).hex().encode("ascii") + b"\n")
        except OSError as error:
            raise LocalFault(
                E_KEY_FILE, f"cannot create key file {path}", got=str(error),
                hint="choose a folder that may be written to",
            ) from None

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key at ``path``, made first when there is none."""
        if not path.exists():
            cls.generate().save(path)
        return cls.load(path)


def public_key_of(value: object) -> bytes | None:
    """The 32 bytes of a public key in the one form files hold it in, 64 lower-case hex digits; else None."""
    try:
        key = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return None
    return key if len(key) == 32 and key.hex() == value else None


def root_key(text: str) -> bytes:
    """The root public key of a run, from ``--root``; upper-case digits are taken as well.

    Raises:
        LocalFault: ``E_USAGE``.
    """
    key = public_key_of(text.lower())
    if key is None:
        raise LocalFault(
            E_USAGE, "--root is not a public key", expected="64 hex digits", got=text[:80] or "nothing",
            hint="the root public key stands in the run's join link (root=...)",
        )
    return key
