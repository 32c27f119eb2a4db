"""What stands behind a bundle that may be trained on: four signatures that name one another.

The coordinator's lease, the commitment of the lease's node for it, the coordinator's receipt of that commitment, and
the verdict of one of the run's verifiers, a pass, on that receipt. Whoever holds these and the bundle need not take the
coordinator's word that the node made it, that it was checked, and what it earned.
Spec: ``docs/spec/verification.md``, "B: before training".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.api import BundleProof
from protocol.envelope import Envelope
from protocol.errors import E_WRONG_KEY, PeerFault, code
from protocol.identity import key_id
from protocol.messages import Commitment, Lease, Receipt, RunManifest, Verdict
from protocol.tasks.task import FULL_REWARD_MICRO

E_PROVENANCE = code("E_PROVENANCE", "what was signed for an admitted bundle does not belong together, or is not a pass")


@dataclass(frozen=True)
class Provenance:
    """The opened messages behind one bundle."""

    commitment: Commitment
    receipt: Receipt
    verdict: Verdict
    rewards_micro: dict[int, int]  #: of each sample of the lease, 1e-6, 0 to ``FULL_REWARD_MICRO``


def open_provenance(run: RunManifest, lease: Lease, lease_sha256: str, proof: BundleProof) -> Provenance:
    """What a proof says about the bundle of a lease.

    Args:
        run: checked against the root key.
        lease: opened with the coordinator's key; ``lease_sha256`` is the digest of its payload.

    Raises:
        PeerFault: ``E_WRONG_KEY`` for a key that is not the node's or a verdict of nobody the run names as a verifier;
            ``E_PROVENANCE`` for messages about something else, a verdict that is no pass, or rewards out of bounds;
            codes of ``Message.open``. All of them are faults of who put the proof together, none is the node's.
    """
    commitment = _commitment(run, lease, lease_sha256, proof)
    receipt = Receipt.open(proof.receipt, run.roles.coordinator, run_id=run.run_id)
    _require(
        (receipt.lease_id, receipt.node_id, receipt.commitment_sha256, receipt.object_sha256),
        (lease.lease_id, lease.node_id, proof.commitment.digest, commitment.object_sha256),
        "the receipt is for something else",
    )
    verdict = _verdict(run, proof.verdict)
    _require(
        (verdict.lease_id, verdict.node_id, verdict.receipt_sha256),
        (lease.lease_id, lease.node_id, proof.receipt.digest), "the verdict is on something else",
    )
    _require(verdict.outcome, "pass", "the verdict is no pass")
    _require({"T0", "T1"} - set(verdict.tiers), set(), "the verdict passed without these tiers")
    return Provenance(commitment, receipt, verdict, _rewards(lease, verdict))


def _commitment(run: RunManifest, lease: Lease, lease_sha256: str, proof: BundleProof) -> Commitment:
    key = _key(proof.node_public_key)
    if key_id(key) != lease.node_id:
        raise PeerFault(E_WRONG_KEY, "the key is not that of the lease's node", expected=lease.node_id, got=key_id(key))
    commitment = Commitment.open(proof.commitment, key, run_id=run.run_id)
    _require(
        (commitment.node_id, commitment.lease_id, commitment.lease_sha256),
        (lease.node_id, lease.lease_id, lease_sha256), "the commitment is for another lease",
    )
    return commitment


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise PeerFault(E_PROVENANCE, "not a public key", expected="64 hex digits", got=text[:80])
    return key


def _verdict(run: RunManifest, envelope: Envelope) -> Verdict:
    """The verdict, signed by the verifier that it names, one of the run's."""
    signers = [key for key in run.roles.verifiers if key_id(bytes.fromhex(key)) in envelope.signatures]
    if not signers:
        raise PeerFault(
            E_WRONG_KEY, "a verdict of no verifier of the run", expected="a verifier's signature",
            got=", ".join(signer[:16] for signer in envelope.signatures),
        )
    verdict = Verdict.open(envelope, signers[0], run_id=run.run_id)
    _require(verdict.verifier_id, key_id(bytes.fromhex(signers[0])), "the verdict names another verifier")
    return verdict


def _rewards(lease: Lease, verdict: Verdict) -> dict[int, int]:
    _require(sorted(verdict.samples), sorted(lease.samples), "the verdict is on other samples")
    _require(len(verdict.rewards_micro), len(verdict.samples), "a verdict has a reward for each sample")
    outside = [reward for reward in verdict.rewards_micro if not 0 <= reward <= FULL_REWARD_MICRO]
    if outside:
        raise PeerFault(
            E_PROVENANCE, "a reward is out of bounds", expected=f"0 to {FULL_REWARD_MICRO}", got=outside[0]
        )
    return dict(zip(verdict.samples, verdict.rewards_micro, strict=True))


def _require(got: Any, expected: Any, problem: str) -> None:
    if got != expected:
        raise PeerFault(E_PROVENANCE, problem, expected=expected, got=got)
