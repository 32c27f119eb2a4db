"""The run manifest that somebody shows, held against the root key that a caller trusts."""

from __future__ import annotations

from protocol.envelope import Envelope
from protocol.errors import E_SIGNATURE, PeerFault
from protocol.messages import RunManifest

ROOT_HINT = "compare --root and the address with the run's join link (root=...): another run is served there"


def open_run_manifest(envelope: Envelope, root: bytes | str, *, now_ms: int | None = None) -> RunManifest:
    """The run manifest, once it is known to be signed by the root key (bytes or hex).

    Raises:
        PeerFault: as :meth:`protocol.messages.RunManifest.open`; ``E_SIGNATURE`` names the root key.
    """
    try:
        return RunManifest.open(envelope, root, now_ms=now_ms)
    except PeerFault as error:
        if error.code != E_SIGNATURE:
            raise
        key = root.hex() if isinstance(root, bytes) else root
        raise PeerFault(
            E_SIGNATURE, "the run manifest is not signed by the root key that was given",
            expected=f"signed by the root key {key}", got="signed by another key, or not as it was signed",
            hint=ROOT_HINT,
        ) from None
