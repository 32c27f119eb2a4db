"""What an evidence file shows of the run's log: receipt and verdicts are under a head the coordinator signed.

Steps L.1 to L.3 of ``docs/spec/verification.md``. The log is the coordinator's: nothing here is ever the node's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from protocol.envelope import Envelope
from protocol.errors import PeerFault, code
from protocol.evidence import Evidence
from protocol.identity import key_id
from protocol.log_entry import LogEntry
from protocol.log_proof import LogProof
from protocol.messages import Receipt, RunManifest, Verdict
from verifier.findings import Report

E_LOG_SILENT = code("E_LOG_SILENT", "the log says nothing, or something else, about an act that must be in it")

_SHOWN: Final = 16


def check_log(
    evidence: Evidence, run: RunManifest, verdicts: Sequence[tuple[Envelope, Verdict]], report: Report
) -> None:
    """Check the log's part of an evidence file; without one there is nothing to check.

    Args:
        verdicts: those in the evidence that verifiers of the run signed.
    """
    proof = evidence.log
    if proof is None:
        return
    head = report.attempt(
        "L.1 log head and inclusion", "signed by the coordinator, with every entry under it",
        lambda: proof.open(run.run_id, bytes.fromhex(run.roles.coordinator)), node=False,
        got=lambda head: f"{len(proof.entries)} entries under {head.size} ({head.root.hex()[:_SHOWN]})",
    )
    if head is None or evidence.receipt is None:
        return
    receipt = evidence.receipt
    report.attempt(
        "L.2 receipt in the log", receipt.digest[:_SHOWN], lambda: _submitted(proof, receipt, evidence.node_public_key),
        node=False, got=lambda entry: f"entry {entry.index}",
    )
    for envelope, verdict in verdicts:
        report.attempt(
            "L.3 verdict in the log", f"{verdict.outcome}, {envelope.digest[:_SHOWN]}",
            partial(_judged, proof, envelope, verdict), node=False, got=lambda entry: f"entry {entry.index}",
        )


def _submitted(proof: LogProof, receipt: Envelope, node_public_key: bytes) -> LogEntry:
    entry = _find(proof, "submitted", receipt.digest)
    message = Receipt.from_payload(receipt.payload)
    return _agrees(entry, {
        "receipt_id": message.receipt_id, "node_id": key_id(node_public_key), "epoch": message.epoch,
    })


def _judged(proof: LogProof, envelope: Envelope, verdict: Verdict) -> LogEntry:
    return _agrees(_find(proof, "verdict", envelope.digest), {
        "outcome": verdict.outcome, "code": verdict.code, "tiers": list(verdict.tiers),
        "verifier_id": verdict.verifier_id,
    })


def _agrees(entry: LogEntry, wanted: Mapping[str, object]) -> LogEntry:
    """The entry, once it says the same as what was signed. Entries of the first release say less."""
    for name, value in wanted.items():
        if entry.body.get(name, value) != value:
            raise PeerFault(E_LOG_SILENT, f"another {name} in the log", expected=value, got=entry.body[name])
    return entry


def _find(proof: LogProof, kind: str, digest: str) -> LogEntry:
    found = _first(proof, lambda entry: entry.kind == kind and entry.body.get("sha256") == digest)
    if found is None:
        raise PeerFault(E_LOG_SILENT, f"no '{kind}' entry of this digest", expected=digest, got=_kinds(proof))
    return found


def _first(proof: LogProof, fits: Callable[[LogEntry], bool]) -> LogEntry | None:
    return next((item.entry for item in proof.entries if fits(item.entry)), None)


def _kinds(proof: LogProof) -> str:
    return ", ".join(item.entry.kind for item in proof.entries) or "no entries"
