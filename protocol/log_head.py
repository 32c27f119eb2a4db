"""Signed heads of a run's log: C2SP checkpoints (``tlog-checkpoint``), signed by the coordinator's Ed25519 key.

A head says *the log of this run has so many entries under this root*. Any tool that knows the format can check it.
Spec: ``docs/spec/log.md``, "Heads".
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Final

from protocol import signed_note
from protocol.errors import PeerFault, code
from protocol.identity import Identity
from protocol.transparency import MAX_SIZE

E_LOG_ORIGIN = code("E_LOG_ORIGIN", "a log head is of another log than the run's")

_SIZE: Final = re.compile(r"0|[1-9][0-9]{0,14}")


@dataclass(frozen=True)
class LogHead:
    """Size and root of a log."""

    origin: str
    size: int  #: entries
    root: bytes  #: Merkle root over them, 32 bytes

    def sign(self, identity: Identity) -> str:
        """The signed note. The same head and key always give the same text."""
        text = f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"
        return signed_note.sign(text, self.origin, identity)

    @classmethod
    def open(cls, note: str, run_id: str, public_key: bytes) -> LogHead:
        """The head of a run's log, once it is known to be signed by the coordinator's key.

        Raises:
            PeerFault: ``E_NOTE`` or ``E_TOO_LARGE`` for what is no head, ``E_LOG_ORIGIN`` for another run's,
                ``E_SIGNATURE``.
        """
        head = cls.peek(note)
        if head.origin != origin_of(run_id):
            raise PeerFault(E_LOG_ORIGIN, "head of another log", expected=origin_of(run_id), got=head.origin[:100])
        signed_note.verify(note, head.origin, public_key)
        return head

    @classmethod
    def peek(cls, note: str) -> LogHead:
        """A head whose signature is *not* checked. Lines after the third are extensions, which we ignore.

        Raises:
            PeerFault: ``E_NOTE`` or ``E_TOO_LARGE``.
        """
        lines = signed_note.text_of(note).split("\n")[:-1]
        if len(lines) < 3 or not all(lines):
            raise signed_note.malformed("lines origin, size, root", note)
        origin, size, root_text = lines[:3]
        if not _SIZE.fullmatch(size) or int(size) > MAX_SIZE:
            raise signed_note.malformed(f"a decimal size up to {MAX_SIZE}", size)
        root = signed_note.canonical_base64(root_text)
        if len(root) != 32:
            raise signed_note.malformed("a root of 32 bytes", root_text)
        return cls(origin, int(size), root)


def origin_of(run_id: str) -> str:
    """Name of a run's log, and of the key that signs its heads."""
    return f"assay-log/{run_id}"
