"""What an evidence file shows of the run's log: receipt and verdicts are under a head the coordinator signed.

Steps L.1 to L.3 of ``docs/spec/verification.md``. The log is the coordinator's: nothing here is ever the node's fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from protocol.envelope import Envelope
from protocol.errors import PeerFault, code
from protocol.evidence import Evidence
from protocol.identity import key_id
from protocol.log_entry import E_LOG_ENTRY, LogEntry
from protocol.log_head import LogHead
from protocol.log_proof import LogProof
from protocol.messages import Receipt, RunManifest, Verdict
from verifier.entry_form import malformed
from verifier.findings import Report

E_LOG_SILENT = code("E_LOG_SILENT", "the log says nothing, or something else, about an act that must be in it")
E_LOG_VERDICT = code("E_LOG_VERDICT", "the log tells of a verdict that is not shown to be signed by a verifier")

_SHOWN: Final = 16


def check_log(
    evidence: Evidence, run: RunManifest, verdicts: Sequence[tuple[Envelope, Verdict]], report: Report
) -> bool:
    """Check the log's part of an evidence file; without one there is nothing to check.

    What the coordinator serves holds every verdict on the receipt, and every entry on it: each needs the other.

    Args:
        verdicts: those in the evidence that verifiers of the run signed on this submission.

    Returns:
        Whether receipt and verdicts are shown to be in the log.
    """
    proof = evidence.log
    if proof is None:
        return False
    head = report.attempt(
        "L.1 log head and inclusion", "signed by the coordinator, with every entry under it",
        lambda: _open(proof, run), node=False,
        got=lambda head: f"{len(proof.entries)} entries under {head.size} ({head.root.hex()[:_SHOWN]})",
    )
    if head is None or evidence.receipt is None:
        return False
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
    signed = {envelope.digest for envelope, _ in verdicts}
    for entry in _verdict_entries(proof, receipt):
        if entry.body.get("sha256") not in signed:
            report.fault("L.3 verdict in the log", _unsigned(entry), blames_node=False)
    return report.clean


def _open(proof: LogProof, run: RunManifest) -> LogHead:
    """The head, once every entry is under it and in the form of its kind, so that the steps after this can read it."""
    head = proof.open(run.run_id, bytes.fromhex(run.roles.coordinator))
    for item in proof.entries:
        wrong = malformed(item.entry, complete=False)
        if wrong is not None:
            name, expected, got = wrong
            place = f"entry {item.entry.index}, {item.entry.kind}: {name}"
            raise PeerFault(E_LOG_ENTRY, f"the coordinator signed {place}"[:200], expected=expected, got=got)
    return head


def _verdict_entries(proof: LogProof, receipt: Envelope) -> list[LogEntry]:
    """Entries that tell of a verdict on the receipt; one that names no receipt is taken to be on this one."""
    entries = [item.entry for item in proof.entries if item.entry.kind == "verdict"]
    try:
        ours = Receipt.from_payload(receipt.payload).receipt_id
    except PeerFault:
        return entries  # it is no receipt, which L.2 has said
    return [entry for entry in entries if entry.body.get("receipt_id", ours) == ours]


def _unsigned(entry: LogEntry) -> PeerFault:
    """A verdict that the coordinator alone vouches for."""
    told = f"{entry.body.get('outcome')} by {str(entry.body.get('verifier_id'))[:_SHOWN]}"
    return PeerFault(
        E_LOG_VERDICT, "the file holds no such verdict", got=f"entry {entry.index}, {told}",
        expected="a verdict in the file that a verifier of the run signed, for every one in the log",
    )


def _submitted(proof: LogProof, receipt: Envelope, node_public_key: bytes) -> LogEntry:
    message = Receipt.from_payload(receipt.payload)
    return _agreed(proof, "submitted", receipt.digest, {
        "receipt_id": message.receipt_id, "commitment_sha256": message.commitment_sha256,
        "node_id": key_id(node_public_key), "epoch": message.epoch,
    })


def _judged(proof: LogProof, envelope: Envelope, verdict: Verdict) -> LogEntry:
    return _agreed(proof, "verdict", envelope.digest, {
        "outcome": verdict.outcome, "code": verdict.code, "tiers": list(verdict.tiers),
        "verifier_id": verdict.verifier_id,
    })


def _agreed(proof: LogProof, kind: str, digest: str, wanted: Mapping[str, object]) -> LogEntry:
    """The entry of a digest, once it and every other of that digest say what was signed.

    Entries of the first release say less.
    """
    entries = [item.entry for item in proof.entries]
    found = [entry for entry in entries if entry.kind == kind and entry.body.get("sha256") == digest]
    if not found:
        raise PeerFault(E_LOG_SILENT, f"no '{kind}' entry of this digest", expected=digest, got=_kinds(proof))
    for entry in found:
        for name, value in wanted.items():
            if entry.body.get(name, value) != value:
                raise PeerFault(E_LOG_SILENT, f"another {name} in the log", expected=value, got=entry.body[name])
    return found[0]


def _kinds(proof: LogProof) -> str:
    return ", ".join(item.entry.kind for item in proof.entries) or "no entries"
