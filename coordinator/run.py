"""The run this coordinator serves: its signed manifest, and who may say what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from protocol.envelope import Envelope
from protocol.errors import E_PAYLOAD_TYPE, E_WRONG_KEY, E_WRONG_RUN, PeerFault
from protocol.messages import Message, RunManifest, opened_by

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True)
class Run:
    """A run manifest and the envelope it came in."""

    manifest: RunManifest
    envelope: Envelope
    root_key: str  #: hex

    @classmethod
    def open(cls, envelope: Envelope, root_key: str) -> Run:
        """The run, once its manifest is known to be signed by the root key.

        Raises:
            PeerFault: as :meth:`protocol.messages.Message.open`.
        """
        return cls(RunManifest.open(envelope, root_key), envelope, root_key)

    @property
    def id(self) -> str:
        """Run id."""
        return self.manifest.run_id

    @cached_property
    def profile_names(self) -> frozenset[str]:
        """Engine profiles a node may claim."""
        return frozenset(profile.name for profile in self.manifest.profiles)

    @cached_property
    def _verifiers(self) -> dict[str, str]:
        return {opened_by(key): key for key in self.manifest.roles.verifiers}

    def from_learner(self, envelope: Envelope, cls: type[_M]) -> _M:
        """A message that only the learner may send.

        Raises:
            PeerFault: ``E_WRONG_KEY``, and as :meth:`protocol.messages.Message.open`.
        """
        key = self.manifest.roles.learner
        require_signer(envelope, opened_by(key), "the learner")
        return cls.open(envelope, key, run_id=self.id)

    def from_verifier(self, envelope: Envelope, cls: type[_M]) -> tuple[_M, str]:
        """A message that only a verifier may send, and the verifier's id.

        Raises:
            PeerFault: ``E_WRONG_KEY``, and as :meth:`protocol.messages.Message.open`.
        """
        signer = next((name for name in envelope.signatures if name in self._verifiers), None)
        if signer is None:
            raise wrong_key("a verifier of this run", envelope)
        return cls.open(envelope, self._verifiers[signer], run_id=self.id), signer

    def peek(self, envelope: Envelope, cls: type[_M]) -> _M:
        """A message of this run whose signature is *not* checked yet.

        Raises:
            PeerFault: ``E_PAYLOAD_TYPE``, ``E_JSON``, ``E_SCHEMA`` or ``E_WRONG_RUN``.
        """
        if envelope.payload_type != cls.TYPE:
            raise PeerFault(E_PAYLOAD_TYPE, "wrong kind of message", expected=cls.TYPE, got=envelope.payload_type[:80])
        message = cls.from_payload(envelope.payload)
        if message.run_id != self.id:
            raise PeerFault(E_WRONG_RUN, f"{cls.__name__} of another run", expected=self.id, got=message.run_id)
        return message


def require_signer(envelope: Envelope, signer: str, who: str) -> None:
    """Refuse an envelope that does not even claim to be signed by ``signer``.

    Raises:
        PeerFault: ``E_WRONG_KEY``.
    """
    if signer not in envelope.signatures:
        raise wrong_key(f"{who} ({signer[:16]})", envelope)


def wrong_key(expected: str, envelope: Envelope) -> PeerFault:
    """The fault of a message that somebody else had to sign."""
    return PeerFault(
        E_WRONG_KEY, f"this message must be signed by {expected}", expected=expected,
        got=", ".join(name[:16] for name in envelope.signatures),
    )
