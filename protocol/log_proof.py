"""Entries of a log with a signed head and the proofs that they are under it: what an evidence file carries.

Spec: ``docs/spec/log.md``, "Proofs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from protocol.errors import PeerFault
from protocol.log_entry import E_LOG_ENTRY, LogEntry
from protocol.log_head import LogHead
from protocol.merkle import MAX_PROOF
from protocol.transparency import check_entry

#: Most entries one proof holds.
MAX_ENTRIES: Final = 1000


@dataclass(frozen=True)
class ProvenEntry:
    """An entry and its inclusion proof."""

    entry: LogEntry
    proof: tuple[bytes, ...]  #: siblings up to the root of the head, 32 bytes each

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"entry": self.entry.to_dict(), "proof": [node.hex() for node in self.proof]}


@dataclass(frozen=True)
class LogProof:
    """Some entries under one head. Nothing in it is checked until :meth:`open`."""

    head: str  #: signed note
    entries: tuple[ProvenEntry, ...]

    def open(self, run_id: str, public_key: bytes) -> LogHead:
        """The head, once it is known to be signed by the coordinator's key and every entry to be under it.

        Raises:
            PeerFault: codes of ``LogHead.open``; ``E_LOG_INCLUSION``.
        """
        head = LogHead.open(self.head, run_id, public_key)
        for item in self.entries:
            check_entry(item.entry.leaf, item.entry.index, head.size, item.proof, head.root)
        return head

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"head": self.head, "entries": [item.to_dict() for item in self.entries]}

    @classmethod
    def from_dict(cls, value: Any) -> LogProof:
        """Strictly read the JSON form.

        Raises:
            PeerFault: ``E_LOG_ENTRY``.
        """
        if not isinstance(value, dict) or set(value) != {"head", "entries"} or not isinstance(value["head"], str):
            raise _malformed("keys head (text), entries", value)
        entries = value["entries"]
        if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
            raise _malformed(f"a list of at most {MAX_ENTRIES} entries", entries)
        return cls(value["head"], tuple(_proven(item) for item in entries))


def nodes_of(value: Any) -> tuple[bytes, ...]:
    """Hashes of a proof from their JSON form, a list of hex.

    Raises:
        PeerFault: ``E_LOG_ENTRY``.
    """
    # A consistency proof may be one node longer than an inclusion proof.
    if not isinstance(value, list) or len(value) > MAX_PROOF + 1 or not all(isinstance(node, str) for node in value):
        raise _malformed(f"a list of at most {MAX_PROOF + 1} hashes", value)
    try:
        nodes = tuple(bytes.fromhex(node) for node in value)
    except ValueError:
        raise _malformed("hashes in hex", value) from None
    if [node.hex() for node in nodes] != value:
        raise _malformed("hashes in lower-case hex", value)
    return nodes


def _proven(value: Any) -> ProvenEntry:
    if not isinstance(value, dict) or set(value) != {"entry", "proof"}:
        raise _malformed("keys entry, proof", value)
    return ProvenEntry(LogEntry.from_dict(value["entry"]), nodes_of(value["proof"]))


def _malformed(expected: str, got: Any) -> PeerFault:
    return PeerFault(E_LOG_ENTRY, "malformed log proof", expected=expected, got=str(got)[:120])
