"""DSSE envelopes (Dead Simple Signing Envelope v1): a typed payload with Ed25519 signatures.

The signature covers ``PAE(payload type, payload)``, so a signature for one kind of message never serves as
another kind. Spec: ``docs/spec/messages.md``, "Envelopes".
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from protocol import canonical
from protocol.errors import E_ENVELOPE, E_PAYLOAD_TYPE, E_SIGNATURE, PeerFault
from protocol.identity import Identity, key_id, verify

#: Most signatures an envelope may carry; more would let a peer buy CPU from us.
MAX_SIGNATURES: Final = 8
_KEY_ID: Final = re.compile(r"[0-9a-f]{64}")


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE pre-authentication encoding of a typed payload."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


@dataclass(frozen=True)
class Envelope:
    """A signed payload. ``signatures`` maps key id to signature bytes."""

    payload_type: str
    payload: bytes
    signatures: dict[str, bytes]

    @property
    def digest(self) -> str:
        """Lower-case hex SHA-256 of the payload; how other messages refer to this one."""
        return hashlib.sha256(self.payload).hexdigest()

    @classmethod
    def sign(cls, identity: Identity, payload_type: str, payload: bytes) -> Envelope:
        """Sign ``payload`` as a message of kind ``payload_type``."""
        return cls(payload_type, payload, {identity.id: identity.sign(pae(payload_type, payload))})

    def verify(self, public_key: bytes, payload_type: str) -> bytes:
        """The payload, once it is known to be of this kind and signed by this key.

        Raises:
            PeerFault: ``E_PAYLOAD_TYPE`` or ``E_SIGNATURE``.
        """
        if self.payload_type != payload_type:
            raise PeerFault(
                E_PAYLOAD_TYPE, "wrong kind of message", expected=payload_type, got=self.payload_type[:80]
            )
        signer = key_id(public_key)
        signature = self.signatures.get(signer)
        if signature is None:
            raise PeerFault(
                E_SIGNATURE, "not signed by the required key", expected=signer[:16],
                got=", ".join(k[:16] for k in self.signatures) or "no signature",
            )
        verify(public_key, pae(payload_type, self.payload), signature)
        return self.payload

    def to_dict(self) -> dict[str, Any]:
        """The DSSE JSON form."""
        return {
            "payloadType": self.payload_type,
            "payload": base64.b64encode(self.payload).decode(),
            "signatures": [
                {"keyid": k, "sig": base64.b64encode(s).decode()} for k, s in sorted(self.signatures.items())
            ],
        }

    def to_bytes(self) -> bytes:
        """Canonical bytes of the DSSE JSON form."""
        return canonical.encode(self.to_dict())

    @classmethod
    def from_dict(cls, value: Any) -> Envelope:
        """Strictly parse the DSSE JSON form.

        Raises:
            PeerFault: ``E_ENVELOPE``.
        """
        if not isinstance(value, dict) or set(value) != {"payloadType", "payload", "signatures"}:
            raise _malformed("keys payloadType, payload, signatures", value)
        kind, payload, signatures = value["payloadType"], value["payload"], value["signatures"]
        if not isinstance(kind, str) or not isinstance(payload, str) or not isinstance(signatures, list):
            raise _malformed("payloadType: string, payload: base64 string, signatures: list", value)
        if not 1 <= len(signatures) <= MAX_SIGNATURES:
            raise _malformed(f"1 to {MAX_SIGNATURES} signatures", f"{len(signatures)}")
        parsed: dict[str, bytes] = {}
        for item in signatures:
            if not isinstance(item, dict) or set(item) != {"keyid", "sig"} or not isinstance(item["keyid"], str):
                raise _malformed("signatures of the form {keyid, sig}", item)
            if not _KEY_ID.fullmatch(item["keyid"]):
                raise _malformed("key ids of 64 lower-case hex digits", item["keyid"])
            if item["keyid"] in parsed:
                raise _malformed("one signature per key", item["keyid"])
            parsed[item["keyid"]] = _base64(item["sig"])
        if list(parsed) != sorted(parsed):
            raise _malformed("signatures in the order of their key ids", ", ".join(parsed))
        return cls(kind, _base64(payload), parsed)

    @classmethod
    def from_bytes(cls, data: bytes) -> Envelope:
        """Parse canonical bytes of the DSSE JSON form.

        Raises:
            PeerFault: ``E_TOO_LARGE``, ``E_JSON`` or ``E_ENVELOPE``.
        """
        return cls.from_dict(canonical.decode(data, max_bytes=2 * canonical.MAX_MESSAGE_BYTES))


def _base64(text: Any) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise _malformed("standard base64", text) from None
    if base64.b64encode(data).decode() != text:
        raise _malformed("canonical base64", text)
    return data


def _malformed(expected: str, got: Any) -> PeerFault:
    return PeerFault(E_ENVELOPE, "malformed envelope", expected=expected, got=str(got)[:120])
