"""What all signed messages share: field types, parsing, canonical payloads, signing and opening.

The messages themselves are in ``protocol.messages`` and ``protocol.calibration``. Spec: ``docs/spec/messages.md``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol import canonical
from protocol.envelope import Envelope
from protocol.errors import E_EXPIRED, E_SCHEMA, E_WRONG_RUN, PeerFault
from protocol.identity import Identity
from protocol.validation import expectation

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  #: 32 bytes: a SHA-256, a public key, a key id, a beacon
Hex16 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  #: 16 bytes: a run, lease or receipt id
#: Of names of runs, nodes, environments: whole strings.
NAME_PATTERN: Final = "[a-z0-9][a-z0-9._+-]{0,63}"
Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
Count = Annotated[int, Field(ge=0, lt=2**48)]
Millis = Annotated[int, Field(ge=0, lt=2**53)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Signed = Annotated[int, Field(gt=-(2**53), lt=2**53)]


_T = TypeVar("_T", bound=BaseModel)


def parse(cls: type[_T], value: Any) -> _T:
    """``value`` as a ``cls``.

    Raises:
        PeerFault: ``E_SCHEMA``, naming the first field that does not fit.
    """
    try:
        return cls.model_validate_json(canonical.encode(value), strict=True)
    except (ValidationError, ValueError) as error:
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            where, why = ".".join(str(part) for part in first["loc"]) or "(whole)", expectation(first)
            raise PeerFault(
                E_SCHEMA, f"{cls.__name__}.{where} does not fit", expected=why, got=str(first["input"])[:120]
            ) from None
        raise PeerFault(E_SCHEMA, f"not a {cls.__name__}", got=str(error)) from None


class Part(BaseModel):
    """Base of the parts of messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Message(BaseModel):
    """Base of all signed messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    TYPE: ClassVar[str]
    run_id: Hex16

    def to_payload(self) -> bytes:
        """Canonical JSON bytes."""
        return canonical.encode(self.model_dump(mode="json"))

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Parse canonical JSON bytes.

        Raises:
            PeerFault: ``E_JSON``, ``E_TOO_LARGE`` or ``E_SCHEMA``.
        """
        return parse(cls, canonical.decode(payload))

    def sign(self, identity: Identity) -> Envelope:
        """This message in an envelope signed by ``identity``."""
        return Envelope.sign(identity, self.TYPE, self.to_payload())

    @classmethod
    def open(cls, envelope: Envelope, public_key: bytes | str, *, run_id: str | None = None,
             now_ms: int | None = None) -> Self:
        """The message, once it is known to be signed by ``public_key`` (bytes or hex) and to belong to the run.

        Raises:
            PeerFault: ``E_PAYLOAD_TYPE``, ``E_SIGNATURE``, ``E_JSON``, ``E_SCHEMA``, ``E_WRONG_RUN``, and
                ``E_EXPIRED`` when ``now_ms`` is given and past the message's ``expires_at_ms``.
        """
        key = bytes.fromhex(public_key) if isinstance(public_key, str) else public_key
        message = cls.from_payload(envelope.verify(key, cls.TYPE))
        if run_id is not None and message.run_id != run_id:
            raise PeerFault(E_WRONG_RUN, f"{cls.__name__} of another run", expected=run_id, got=message.run_id)
        expires: int | None = getattr(message, "expires_at_ms", None)
        if now_ms is not None and expires is not None and now_ms > expires:
            raise PeerFault(E_EXPIRED, f"{cls.__name__} is past its expiry", expected=f"now <= {expires}", got=now_ms)
        return message
