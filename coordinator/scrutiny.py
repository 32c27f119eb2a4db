"""How closely a node is looked at: its audit rate, and what makes its next bundles audited for certain."""

from __future__ import annotations

import math
from typing import Final

from sqlalchemy.orm import Session

from coordinator import counters, event_log
from coordinator.models import Counter, Node, NodeReason, Receipt
from coordinator.run import Run
from protocol import audit_draw
from protocol.api import E_DISAGREE
from protocol.messages import AuditPolicy

#: Standard errors that a node's mean reward may be away from everybody's.
REWARD_SIGMAS: Final = 4.0
#: Bundles that a node's mean and everybody's mean remember.
NODE_MEMORY: Final = 32
LEVEL_MEMORY: Final = 256
#: Counter of everybody's mean reward, 1e-6.
LEVEL: Final = "reward_level_micro"
_MICRO: Final = 1_000_000
#: Accepted rollouts of a node that make up for one such bundle; the first costs nothing.
PER_DISAGREEMENT: Final = 1000


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
    return audit_draw.audit_rate_ppm(policy, node.audited_passes)


def force(session: Session, node: Node, bundles: int, why: str, now_ms: int) -> None:
    """Have a node's next ``bundles`` audited for certain."""
    if bundles <= node.forced_audits:
        return
    node.forced_audits = bundles
    event_log.append(session, now_ms, "audits-forced", {"node_id": node.id, "bundles": bundles, "why": why})


def note_rewards(session: Session, policy: AuditPolicy, receipt: Receipt, node: Node, now_ms: int) -> None:
    """Count the rewards of a bundle that passed, and force audits when the node is out of line.

    Both sides forget (exponential means over bundles), because the policy learns: a node that joined late is compared
    with what everybody earns now. Rewards lie in [0, 1], so the standard deviation of a bundle's mean is at most 1/2.
    """
    rewards = [int(value) for value in (receipt.rewards or {}).values()]
    if not rewards:
        return
    mean, level = sum(rewards) // len(rewards), session.get(Counter, LEVEL)
    if level is None:
        counters.add(session, LEVEL, mean)
        return
    node.reward_micro += round((mean - level.value - node.reward_micro) / NODE_MEMORY)
    level.value += round((mean - level.value) / LEVEL_MEMORY)
    if abs(node.reward_micro) > REWARD_SIGMAS * _MICRO / 2 * math.sqrt(1 / (2 * NODE_MEMORY - 1)):
        force(session, node, policy.forced, "reward", now_ms)


def disagreements(session: Session, node: Node) -> int:
    """Bundles of a node that the verifier's configurations disagreed on, beyond the few that chance may explain.

    Limits are far from what honest nodes measure, so an honest one hardly ever gets there once; whoever places a number
    between the two configurations may do it at will.
    """
    row = session.get(NodeReason, (node.id, E_DISAGREE))
    return 0 if row is None else max(0, row.count - 1 - node.accepted // PER_DISAGREEMENT)


def note_disagreement(session: Session, policy: AuditPolicy, node: Node, now_ms: int) -> None:
    """Force audits of a node whose bundles end so again and again; ``coordinator.leases`` gives it less work too."""
    if disagreements(session, node):
        force(session, node, policy.forced, "disagree", now_ms)
