"""What a verdict must look like before it may touch anybody."""

from __future__ import annotations

from coordinator.models import Receipt, ReceiptState
from protocol.api import E_VERDICT
from protocol.errors import E_WRONG_KEY, PeerFault
from protocol.messages import Verdict
from protocol.tasks.task import FULL_REWARD_MICRO


def check_verdict(verdict: Verdict, verifier_id: str, receipt: Receipt, samples: list[int]) -> None:
    """Refuse a verdict that contradicts itself, its signer or its receipt.

    Raises:
        PeerFault: ``E_WRONG_KEY`` or ``E_VERDICT``.
    """
    if verdict.verifier_id != verifier_id:
        raise PeerFault(
            E_WRONG_KEY, "the verdict names another verifier", expected=verifier_id, got=verdict.verifier_id
        )
    if (verdict.node_id, verdict.lease_id) != (receipt.node_id, receipt.lease_id):
        raise _contradiction(
            "node and lease of the receipt", f"{receipt.node_id[:16]} {receipt.lease_id}",
            f"{verdict.node_id[:16]} {verdict.lease_id}",
        )
    if (verdict.outcome == "pass") != (verdict.code is None):
        raise _contradiction("a code exactly when the outcome is not pass", verdict.outcome, verdict.code)
    undecided = receipt.state in (ReceiptState.PENDING, ReceiptState.CLAIMED)
    recomputed = [tier for tier in verdict.tiers if tier in ("T2", "T3")]
    if undecided and recomputed and not (receipt.drawn or receipt.review):
        # Trust is counted in recomputations, so nobody is lent any by a verifier that likes it; and a log that told of
        # one would read as if the coordinator had asked for it. A verdict that decides nothing is kept as it is.
        rule = "no recomputation of a bundle that is neither drawn nor under review"
        raise _contradiction(rule, "T0, T1", ", ".join(verdict.tiers))
    if verdict.outcome == "pass":
        _check_pass(verdict, receipt, samples)
    elif verdict.scores:
        raise _contradiction("scores only with a pass", "none", f"{len(verdict.scores)} rollouts")
    if verdict.outcome == "fail" and "T2" in verdict.tiers and "T3" not in verdict.tiers:
        raise _contradiction("a second configuration (T3) before a failure of T2", "T3", ", ".join(verdict.tiers))


def _check_pass(verdict: Verdict, receipt: Receipt, samples: list[int]) -> None:
    recomputed = receipt.drawn or receipt.review
    needed = {"T0", "T1"} | ({"T2"} if recomputed else set())
    if not needed <= set(verdict.tiers):
        raise _contradiction("every tier that was due", ", ".join(sorted(needed)), ", ".join(verdict.tiers))
    if verdict.samples != samples:
        raise _contradiction("the lease's samples", samples, verdict.samples)
    if len(verdict.rewards_micro) != len(samples):
        raise _contradiction("one reward per sample", len(samples), len(verdict.rewards_micro))
    if not all(0 <= reward <= FULL_REWARD_MICRO for reward in verdict.rewards_micro):
        raise _contradiction("rewards of 0 to 1", f"0 to {FULL_REWARD_MICRO}", verdict.rewards_micro)
    weighed = [rollout.sample for rollout in verdict.scores]
    if weighed and (not recomputed or len(set(weighed)) != len(weighed) or not set(weighed) <= set(samples)):
        raise _contradiction("scores of recomputed samples, each once", samples, weighed)
    if verdict.tokens != receipt.tokens:
        raise _contradiction("the tokens of the commitment", receipt.tokens, verdict.tokens)


def _contradiction(rule: str, expected: object, got: object) -> PeerFault:
    return PeerFault(E_VERDICT, f"a verdict must have {rule}", expected=expected, got=got)
