"""How closely a node is looked at: its audit rate, and what makes its next bundles audited for certain."""

from __future__ import annotations

import math
from typing import Final

from sqlalchemy.orm import Session

from coordinator import counters, draw, event_log
from coordinator.models import Node, Receipt
from coordinator.run import Run
from protocol.messages import AuditPolicy

#: Rollouts of a node before its mean reward is compared with everybody's.
REWARD_ROLLOUTS: Final = 64
#: Standard errors that a mean reward may be away from everybody's.
REWARD_SIGMAS: Final = 4.0
_MICRO: Final = 1_000_000


def next_rate_ppm(run: Run, node: Node, now_ms: int) -> int:
    """Audit rate of a node's next bundle, 1e-6; uses up one of its forced audits."""
    policy = run.manifest.audit
    if node.submitted_ms is not None and now_ms - node.submitted_ms >= policy.quiet_ms:
        node.forced_audits = max(node.forced_audits, policy.forced_after_quiet)
    node.submitted_ms = now_ms
    if node.forced_audits > 0:
        node.forced_audits -= 1
        return _MICRO
    if node.profile not in run.profile_names:
        return _MICRO
    return draw.audit_rate_ppm(policy, node.audited_passes)


def force(session: Session, node: Node, bundles: int, why: str, now_ms: int) -> None:
    """Have a node's next ``bundles`` audited for certain."""
    if bundles <= node.forced_audits:
        return
    node.forced_audits = bundles
    event_log.append(session, now_ms, "audits-forced", {"node_id": node.id, "bundles": bundles, "why": why})


def note_rewards(session: Session, policy: AuditPolicy, receipt: Receipt, node: Node, now_ms: int) -> None:
    """Count the rewards of a bundle that passed, and force audits when the node's mean is out of line.

    Rewards lie in [0, 1], so their standard deviation is at most one half; the rollouts of one group are alike, so
    the standard error is that of whole bundles. The node itself is left out of everybody's mean.
    """
    rewards = [int(value) for value in (receipt.rewards or {}).values()]
    node.reward_micro += sum(rewards)
    counters.add(session, "rewards_micro", sum(rewards))
    totals = counters.totals(session)
    others = totals.get("rollouts_accepted", 0) - node.accepted
    if node.accepted < REWARD_ROLLOUTS or others < REWARD_ROLLOUTS or not rewards:
        return
    mean = node.reward_micro / node.accepted / _MICRO
    mean_others = (totals["rewards_micro"] - node.reward_micro) / others / _MICRO
    bundle = len(rewards)
    error = 0.5 * math.sqrt(bundle / node.accepted + bundle / others)
    if abs(mean - mean_others) > REWARD_SIGMAS * error:
        force(session, node, policy.forced, "reward", now_ms)
