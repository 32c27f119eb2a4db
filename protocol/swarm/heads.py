"""Signed checkpoint heads that peers pass on: which are news, which are old, which are forged. No network here."""

from __future__ import annotations

import threading

from protocol.envelope import Envelope
from protocol.errors import E_TOO_LARGE, PeerFault
from protocol.messages import CheckpointHead
from protocol.swarm.wire import MAX_HEAD_BYTES
from protocol.weights.link import E_CHECKPOINT_MIX


class Heads:
    """The newest head a learner signed, as far as we heard. Thread-safe."""

    def __init__(self, learner_key: str, run_id: str):
        self._key, self._run_id = learner_key, run_id
        self._lock = threading.Lock()
        self._newest: tuple[CheckpointHead, bytes] | None = None

    @property
    def newest(self) -> bytes | None:
        """The newest head as it was signed."""
        with self._lock:
            return None if self._newest is None else self._newest[1]

    @property
    def version(self) -> int:
        """The version it names; -1 before the first."""
        with self._lock:
            return -1 if self._newest is None else self._newest[0].version

    def hear(self, data: bytes, now_ms: int) -> bool:
        """Take a head in; True when it is news, False when as new a one is known.

        Raises:
            PeerFault: it is not the learner's word: ``E_TOO_LARGE``, ``E_JSON``, ``E_ENVELOPE``, ``E_PAYLOAD_TYPE``,
                ``E_SIGNATURE``, ``E_SCHEMA``, ``E_WRONG_RUN``; ``E_EXPIRED``; ``E_CHECKPOINT_MIX`` when the learner
                named another manifest for this version before.
        """
        if len(data) > MAX_HEAD_BYTES:
            raise PeerFault(E_TOO_LARGE, "head too large", expected=f"<= {MAX_HEAD_BYTES} bytes", got=len(data))
        head = CheckpointHead.open(Envelope.from_bytes(data), self._key, run_id=self._run_id, now_ms=now_ms)
        with self._lock:
            if self._newest is not None:
                known = self._newest[0]
                if head.version == known.version and head.manifest_sha256 != known.manifest_sha256:
                    raise PeerFault(
                        E_CHECKPOINT_MIX, f"head names another version {head.version}",
                        expected=known.manifest_sha256, got=head.manifest_sha256,
                    )
                if (head.version, head.issued_at_ms) <= (known.version, known.issued_at_ms):
                    return False
            self._newest = (head, data)
        return True
