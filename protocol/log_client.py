"""Reads of a coordinator's log. Nothing that comes back is checked. Spec: ``docs/spec/log.md``, "Routes"."""

from __future__ import annotations

from protocol.client import CoordinatorClient
from protocol.errors import E_SCHEMA, PeerFault
from protocol.log_entry import LogEntry
from protocol.log_proof import LogProof, ProvenEntry, nodes_of
from protocol.signed_note import MAX_NOTE_BYTES, malformed


class LogClient:
    """The log of the coordinator that ``client`` speaks to; raises as the client does."""

    def __init__(self, client: CoordinatorClient):
        self._client = client

    def head(self) -> str:
        """The newest head, a signed note."""
        body = self._client.get_bytes("/v1/log/head", MAX_NOTE_BYTES)
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise malformed("UTF-8", repr(body[:80])) from None

    def entries(self, first: int, limit: int) -> list[LogEntry]:
        """Up to ``limit`` entries from number ``first`` on."""
        found = self._client.get_object("/v1/log", {"from": first, "limit": limit}).get("entries")
        if not isinstance(found, list):
            raise PeerFault(E_SCHEMA, "the coordinator's answer holds no entries", got=str(found)[:80])
        return [LogEntry.from_dict(entry) for entry in found]

    def consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """Proof that the log of ``new`` entries begins with that of ``old``."""
        return nodes_of(self._client.get_object("/v1/log/consistency", {"from": old, "to": new}).get("proof"))

    def inclusion(self, index: int, size: int) -> ProvenEntry:
        """One entry, with the proof that it is among the first ``size``."""
        found = self._client.get_object("/v1/log/inclusion", {"index": index, "size": size})
        return ProvenEntry(LogEntry.from_dict(found.get("entry")), nodes_of(found.get("proof")))

    def proof_about(self, receipt_id: str) -> LogProof:
        """All that the log holds on a receipt, with proofs."""
        return LogProof.from_dict(self._client.get_object(f"/v1/receipts/{receipt_id}").get("log"))
