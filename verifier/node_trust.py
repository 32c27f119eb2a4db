"""The audit rate that the rules give a node, worked out again from the log alone.

Mirrors what the coordinator does (``docs/spec/http-api.md``, "Audit draw"), from entries and not from its word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from protocol.audit_draw import audit_rate_ppm
from protocol.log_entry import LogEntry
from protocol.messages import RunManifest

_PPM: Final = 1_000_000
#: Cause of cancelled groups whose droppers lose their trust.
_STALE: Final = "stale"


@dataclass
class NodeTrust:
    """What the log says about one node."""

    profile: str | None = None
    passes: int = 0  #: recomputed bundles that passed since the last incident
    forced: int = 0  #: next bundles that are recomputed for certain
    submitted_ms: int | None = None
    known: bool = True  #: False when the log does not reach back to the node's beginning


@dataclass
class TrustBook:
    """All nodes of a run, followed entry by entry."""

    run: RunManifest
    nodes: dict[str, NodeTrust] = field(default_factory=dict)

    def node(self, node_id: str) -> NodeTrust:
        """A node; one that never registered in this log is not known well enough to be judged by."""
        return self.nodes.setdefault(node_id, NodeTrust(known=False))

    def expected_ppm(self, node_id: str, at_ms: int) -> int | None:
        """The rate of the bundle that a node hands in now, 1e-6; uses up a forced audit. None when it is not known."""
        node, policy = self.node(node_id), self.run.audit
        if node.submitted_ms is not None and at_ms - node.submitted_ms >= policy.quiet_ms:
            node.forced = max(node.forced, policy.forced_after_quiet)
        node.submitted_ms = at_ms
        if not node.known:
            return None
        if node.forced > 0:
            node.forced -= 1
            return _PPM
        if node.profile not in {profile.name for profile in self.run.profiles}:
            return _PPM
        return audit_rate_ppm(policy, node.passes)

    def passed(self, node_id: str) -> None:
        """A recomputed bundle of the node passed."""
        self.node(node_id).passes += 1

    def follow(self, entry: LogEntry) -> None:
        """Take in what an entry does to trust."""
        body = entry.body
        if entry.kind == "node-registered":
            self.nodes[body["node_id"]] = NodeTrust(body.get("profile"), known="profile" in body)
        elif entry.kind == "profile-changed":
            node = self.node(body["node_id"])
            node.profile, node.passes = body["profile"], 0
        elif entry.kind in ("banned", "unbanned"):
            self.node(body["node_id"]).passes = 0
        elif entry.kind == "audits-forced":
            self.node(body["node_id"]).forced = body["bundles"]
        elif entry.kind == "group-cancelled" and body["cause"] == _STALE:
            for node_id in body["dropped_by"]:
                self.node(node_id).passes = 0
