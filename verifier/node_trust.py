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
#: Kinds of entries about a node that must have registered before.
_ABOUT_NODES: Final = frozenset(
    {"submitted", "profile-changed", "banned", "unbanned", "audits-forced", "suspicion"}
)


@dataclass
class NodeTrust:
    """What the log says about one node."""

    profile: str | None = None
    passes: int = 0  #: recomputed bundles that passed since the last incident
    forced: int = 0  #: next bundles that are recomputed for certain
    submitted_ms: int | None = None
    registered: bool = True


@dataclass
class TrustBook:
    """All nodes of a run, followed entry by entry."""

    run: RunManifest
    nodes: dict[str, NodeTrust] = field(default_factory=dict)
    began: bool = True  #: False when the log does not reach back to the beginning: nobody can be judged by it

    def node(self, node_id: str) -> NodeTrust:
        """A node; one that never registered in this log is nobody's node, and is trusted like an unlisted profile."""
        return self.nodes.setdefault(node_id, NodeTrust(registered=False))

    def expected_ppm(self, node_id: str, at_ms: int) -> int | None:
        """The rate of the bundle that a node hands in now, 1e-6; uses up a forced audit. None when it is not known."""
        node, policy = self.node(node_id), self.run.audit
        if node.submitted_ms is not None and at_ms - node.submitted_ms >= policy.quiet_ms:
            node.forced = max(node.forced, policy.forced_after_quiet)
        node.submitted_ms = at_ms
        if not self.began:
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

    def out_of_order(self, entry: LogEntry) -> tuple[str, str] | None:
        """What the rules expect and what the entry does instead; None where it is in order."""
        body = entry.body
        if entry.kind == "node-registered":
            return ("a node registers once", "again") if self.node(body["node_id"]).registered else None
        if entry.kind not in _ABOUT_NODES or not self.began:
            return None
        node = self.node(body["node_id"])
        if not node.registered:
            return "a node that registered", "none of this log"
        if entry.kind == "audits-forced" and body["bundles"] <= node.forced:
            return f"more than the {node.forced} that are forced already", str(body["bundles"])
        return None

    def follow(self, entry: LogEntry) -> None:
        """Take in what an entry does to trust."""
        body = entry.body
        if entry.kind == "node-registered":
            node = self.node(body["node_id"])
            if not node.registered:
                node.registered, node.profile = True, body["profile"]
        elif entry.kind == "profile-changed":
            node = self.node(body["node_id"])
            node.profile, node.passes = body["profile"], 0
        elif entry.kind in ("banned", "unbanned"):
            self.node(body["node_id"]).passes = 0
        elif entry.kind == "audits-forced":
            node = self.node(body["node_id"])
            node.forced = max(node.forced, body["bundles"])  # only a bundle that is handed in uses one up
        elif entry.kind == "group-cancelled" and body["cause"] == _STALE:
            for node_id in body["dropped_by"]:
                self.node(node_id).passes = 0
