"""Signed notes (C2SP ``signed-note``): short text with Ed25519 signatures, for people and programs alike.

::

    text, of any lines
                                    <- an empty line
    — KEY-NAME BASE64(KEY-HASH SIGNATURE)

The signature covers the text with its last line break. A key hash is the first 4 bytes of
SHA-256(name | 0x0a | 0x01 | public key): a hint which key to try, no more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Final

from protocol.errors import E_SIGNATURE, E_TOO_LARGE, PeerFault, code
from protocol.identity import Identity
from protocol.identity import verify as verify_signature

E_NOTE = code("E_NOTE", "a text is not a well-formed signed note")

#: Longest note, in bytes: sixteen signatures of the largest kind that the format knows.
MAX_NOTE_BYTES: Final = 128 * 1024
#: Most signatures of a note; those of unknown keys are ignored, and may be witnesses'.
MAX_SIGNATURES: Final = 16
_ED25519: Final = b"\x01"
_HASH_BYTES: Final = 4
_LINE: Final = re.compile(r"— ([^\s+]+) ([A-Za-z0-9+/]+={0,2})")


def sign(text: str, name: str, identity: Identity) -> str:
    """``text``, which ends in a line break, as a note signed by the key ``name``; always the same one."""
    signature = key_hash(name, identity.public_key) + identity.sign(text.encode())
    return f"{text}\n— {name} {base64.b64encode(signature).decode()}\n"


def verify(note: str, name: str, public_key: bytes) -> str:
    """The text of a note, once it is known to be signed by the key.

    Raises:
        PeerFault: ``E_NOTE`` or ``E_TOO_LARGE`` for what is no note; ``E_SIGNATURE`` unless exactly one signature is
            under the key's name and hash, and verifies.
    """
    text, signatures = _split(note)
    wanted = (name, key_hash(name, public_key))
    ours = [signature for *key, signature in signatures if tuple(key) == wanted]
    if len(ours) != 1:
        raise PeerFault(
            E_SIGNATURE, "not signed once by the required key", expected=f"{name}+{wanted[1].hex()}",
            got=", ".join(f"{name[:60]}+{found.hex()}" for name, found, _ in signatures),
        )
    verify_signature(public_key, text.encode(), ours[0])
    return text


def text_of(note: str) -> str:
    """The text of a note whose signatures are *not* checked.

    Raises:
        PeerFault: ``E_NOTE`` or ``E_TOO_LARGE``.
    """
    return _split(note)[0]


def key_hash(name: str, public_key: bytes) -> bytes:
    """First 4 bytes of the hash that binds name, algorithm and key."""
    return hashlib.sha256(name.encode() + b"\n" + _ED25519 + public_key).digest()[:_HASH_BYTES]


def canonical_base64(text: str) -> bytes:
    """Bytes of standard base64, of which there is one form.

    Raises:
        PeerFault: ``E_NOTE``.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise malformed("standard base64", text) from None
    if base64.b64encode(data).decode() != text:
        raise malformed("canonical base64", text)
    return data


def malformed(expected: str, got: str) -> PeerFault:
    """The fault of a text that is no note."""
    return PeerFault(E_NOTE, "malformed note", expected=expected, got=repr(got[:120]))


def _split(note: str) -> tuple[str, list[tuple[str, bytes, bytes]]]:
    """The signed text, and of each signature the key's name, its hash and the signature."""
    if len(note) > MAX_NOTE_BYTES:
        raise PeerFault(E_TOO_LARGE, "note too large", expected=f"<= {MAX_NOTE_BYTES} bytes", got=len(note))
    if any((sign < " " and sign != "\n") or "\ud800" <= sign < "\ue000" for sign in note):
        raise malformed("text without control characters", note)
    text, gap, block = note.rpartition("\n\n")
    if not gap or not block.endswith("\n"):
        raise malformed("text, an empty line, signature lines", note)
    lines = block.split("\n")[:-1]
    if not 1 <= len(lines) <= MAX_SIGNATURES:
        raise malformed(f"1 to {MAX_SIGNATURES} signatures", f"{len(lines)}")
    return text + "\n", [_signature(line) for line in lines]


def _signature(line: str) -> tuple[str, bytes, bytes]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise malformed("— NAME BASE64", line)
    data = canonical_base64(match[2])
    if len(data) <= _HASH_BYTES:
        raise malformed("a key hash and a signature", line)
    return match[1], data[:_HASH_BYTES], data[_HASH_BYTES:]
