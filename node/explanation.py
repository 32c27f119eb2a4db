"""``assay node explain``: what became of one of the node's leases, from signed receipt, verdicts and log."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from node.home import Home
from node.spool import Receipts
from node.uploader import E_RECEIPT
from protocol.api import E_NODE_BANNED, E_WITHHELD
from protocol.causes import advice, likely_causes
from protocol.client import CoordinatorClient
from protocol.envelope import Envelope
from protocol.errors import E_NOT_FOUND, E_USAGE, AssayError, LocalFault, PeerFault
from protocol.identity import key_id
from protocol.log_proof import LogProof
from protocol.messages import Finding, Receipt, RunManifest, Verdict
from protocol.text import printable

#: States of a receipt that call for an explanation.
_UNWELCOME = frozenset({"fail", "aside", "void"})


@dataclass(frozen=True)
class Explanation:
    """What became of a lease. Whatever is not signed by whom it must be signed by is not in here."""

    receipt_id: str
    lease_id: str
    state: str  #: as the coordinator says: pending, claimed, pass, fail, aside, void
    code: str | None
    receipt_kept: bool  #: the receipt is the one that this node kept
    in_log: bool  #: receipt and verdicts are under a head of the log that the coordinator signed
    log_fault: str | None  #: why they are not, when they are not
    verdicts: tuple[Verdict, ...]  #: by verifiers of the run, oldest first
    url: str  #: where the evidence is
    root: str  #: root public key of the run, hex
    withheld: bool = False  #: the evidence is not shown yet, for somebody could hand in a copy of the bundle
    banned: str | None = None  #: why and how long the node is banned, as the coordinator says; None when it is not

    @property
    def failures(self) -> list[Finding]:
        """Checks of the last verdict that do not hold."""
        return [finding for verdict in self.verdicts[-1:] for finding in verdict.findings if not finding.ok]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as JSON."""
        fields = {key: value for key, value in asdict(self).items() if key != "verdicts"}
        return fields | {
            "verdicts": [verdict.model_dump(mode="json") for verdict in self.verdicts],
            "likely_causes": list(likely_causes(self.code)),
        }

    def lines(self) -> list[str]:
        """The explanation in words."""
        lines = [
            f"receipt   {self.receipt_id} of lease {self.lease_id}: {self.state} {self.code or ''}".rstrip(),
            f"kept      {'the same receipt is in receipts.jsonl' if self.receipt_kept else 'not in receipts.jsonl'}",
            f"log       {'receipt and verdicts are in it' if self.in_log else f'NOT shown: {self.log_fault}'}",
        ]
        if self.banned is not None:
            lines.append(f"banned    {self.banned}")
        for verdict in self.verdicts:
            ended = verdict.outcome if verdict.code is None else f"{verdict.outcome} {verdict.code}"
            lines.append(f"verdict   {ended} by {verdict.verifier_id[:16]}")
        for finding in self.failures:
            place = "" if finding.position is None else f" (sample {finding.sample}, position {finding.position})"
            lines += [f"check     {finding.check}{place}", f"expected  {finding.expected}", f"got       {finding.got}"]
        if self.code is not None:
            lines += [f"cause?    {cause}" for cause in likely_causes(self.code)]
            lines.append(f"to do     {advice(self.code)}")
        evidence = f"{self.url}/v1/evidence/{self.receipt_id}"
        again = f"assay audit {self.receipt_id} --root {self.root} --checkpoint DIR"
        if self.withheld:
            lines.append("evidence  not shown yet: another node may still be making the same rollouts; ask again later")
        else:
            lines += [f"evidence  curl -O {evidence}", f"audit it  {again}"]
        return [printable(line) for line in lines]


def explain(home: Home, client: CoordinatorClient, what: str | None) -> Explanation:
    """What became of a lease.

    Args:
        what: receipt or lease id; None takes the receipt that the node was banned for, or else the newest that failed,
            or else the newest that did not pass: a ban voids what came after its reason.

    Raises:
        LocalFault: ``E_USAGE`` for what is no id; ``E_NOT_FOUND`` when there is no such receipt, or none that did
            not pass; ``E_WITHHELD`` when it is not shown yet and this node kept none; ``E_NODE_BANNED`` when the node
            is banned and no receipt says why.
        PeerFault: the coordinator shows another receipt than the one this node kept, or one it did not sign.
    """
    if what is not None and re.fullmatch("[0-9a-f]{32}", what) is None:
        raise LocalFault(E_USAGE, "not the id of a receipt or a lease", expected="32 hex digits", got=what[:80])
    run, pin = home.manifest(), home.pin()
    kept = Receipts(home.receipts).find(what) if what is not None else None
    record = client.node(home.identity().id)
    receipt_id = kept[0] if kept is not None else what or _worst(record)
    found = client.get_object(f"/v1/receipts/{receipt_id}")
    kept = kept or Receipts(home.receipts).find(receipt_id)
    withheld = found.get("withheld") is True
    if withheld and kept is None:
        raise LocalFault(
            E_WITHHELD, "the receipt is not shown yet, and this node kept none", expected="one in receipts.jsonl",
            got=f"state {found.get('state')} {found.get('code') or ''}".rstrip(), hint="ask again later",
        )
    envelope = Envelope.from_dict(kept[1] if withheld and kept is not None else found.get("receipt"))
    receipt = Receipt.open(envelope, run.roles.coordinator, run_id=run.run_id)
    if kept is not None and Envelope.from_dict(kept[1]).digest != envelope.digest:
        raise PeerFault(
            E_RECEIPT, "the coordinator shows another receipt than the one it gave us",
            expected=Envelope.from_dict(kept[1]).digest, got=envelope.digest,
            hint="keep receipts.jsonl: two signed receipts of one lease prove it",
        )
    verdicts = _verdicts(found.get("verdicts"), run)
    fault = _log_fault(found.get("log"), run, [envelope, *(signed for signed, _ in verdicts)])
    return Explanation(
        receipt.receipt_id, receipt.lease_id, str(found.get("state")), found.get("code"), kept is not None,
        fault is None, fault, tuple(verdict for _, verdict in verdicts), pin.coordinator, pin.root, withheld,
        ban_in_words(record),
    )


def ban_in_words(record: dict[str, Any]) -> str | None:
    """Why, and until when, a node is banned, from ``/v1/nodes/ID``; None when it is not."""
    if record.get("state") != "banned":
        return None
    until = record.get("ban_until_ms")
    ends = datetime.fromtimestamp(until / 1000, UTC).isoformat(timespec="minutes") if isinstance(until, int) else None
    why = ": ".join(str(part) for part in (record.get("ban_code"), record.get("ban_reason")) if part)
    return f"{why} ({f'until {ends}' if ends else 'for good'})"


def _worst(record: dict[str, Any]) -> str:
    if record.get("state") == "banned" and record.get("ban_receipt_id"):
        return str(record["ban_receipt_id"])
    receipts = record.get("receipts", [])
    for states in ({"fail"}, _UNWELCOME):
        for receipt in receipts:
            if receipt.get("state") in states:
                return str(receipt["receipt_id"])
    banned = ban_in_words(record)
    if banned is not None:
        raise PeerFault(E_NODE_BANNED, f"this node is banned: {banned}", hint="ask the operator")
    raise LocalFault(
        E_NOT_FOUND, "none of this node's newest receipts failed or was set aside", hint="name a receipt or a lease"
    )


def _verdicts(value: Any, run: RunManifest) -> list[tuple[Envelope, Verdict]]:
    """Verdicts that a verifier of the run signed; others are dropped."""
    keys = {key_id(bytes.fromhex(key)): key for key in run.roles.verifiers}
    found = []
    for item in value if isinstance(value, list) else []:
        envelope = Envelope.from_dict(item)
        signer = next((name for name in envelope.signatures if name in keys), None)
        if signer is not None:
            found.append((envelope, Verdict.open(envelope, keys[signer], run_id=run.run_id)))
    return found


def _log_fault(value: Any, run: RunManifest, signed: list[Envelope]) -> str | None:
    """Why receipt and verdicts are not shown to be in the log; None when they are."""
    try:
        proof = LogProof.from_dict(value)
        proof.open(run.run_id, bytes.fromhex(run.roles.coordinator))
    except AssayError as error:
        return str(error)
    digests = {item.entry.body.get("sha256") for item in proof.entries}
    missing = [envelope.digest[:16] for envelope in signed if envelope.digest not in digests]
    return f"no entry of {', '.join(missing)}" if missing else None
