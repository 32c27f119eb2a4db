"""What the bans of a log rest on: failures that counted, or suspicion that grew to the alarm step by step.

Step D.6 of ``docs/spec/log.md``, "Auditing the draws".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from protocol import statistics
from protocol.log_entry import LogEntry
from protocol.messages import RunManifest

#: Code of a ban that rests on a sum over bundles instead of one that failed.
_BY_SUSPICION: Final = "E_SUSPICION"
#: Most that one bundle adds.
_MOST_MILLI: Final = round(1000 * statistics.MAX_SCORE)
_CONFIRMED: Final = "T3"


@dataclass
class _Suspect:
    """The suspicion of one node, 1e-3 nats."""

    milli: int = 0
    receipt_id: str | None = None  #: the last bundle that was weighed
    reset: bool = False  #: a change of profile since: a coordinator that lets it lapse is no liar


@dataclass
class BanGrounds:
    """All that may speak against nodes, followed entry by entry."""

    run: RunManifest
    fails: dict[str, set[str | None]] = field(default_factory=dict)  #: receipt -> codes of failures that counted
    weighable: dict[str, frozenset[str]] = field(default_factory=dict)  #: receipt -> tiers of a pass not yet weighed
    suspects: dict[str, _Suspect] = field(default_factory=dict)

    def counted(
        self, receipt_id: str, outcome: str, found: str | None, tiers: Iterable[str], *, review: bool
    ) -> None:
        """A verdict of a verifier of the run that decided a bundle; scores of one under review are never weighed."""
        if outcome == "fail":
            self.fails.setdefault(receipt_id, set()).add(found)
        elif "T2" in tiers and not review:
            self.weighable[receipt_id] = frozenset(tiers)

    def changed_profile(self, node_id: str) -> None:
        """Evidence of the old profile may be dropped, or kept."""
        self._suspect(node_id).reset = True

    def unbanned(self, node_id: str) -> None:
        """The node begins anew."""
        self.suspects[node_id] = _Suspect()

    def weigh(self, entry: LogEntry) -> tuple[str, str] | None:
        """Take in a change of suspicion; what was expected and what is there when it cannot have come about."""
        body = entry.body
        receipt_id, before, after = body["receipt_id"], body["before_milli"], body["after_milli"]
        suspect, tiers = self._suspect(body["node_id"]), self.weighable.pop(receipt_id, None)
        may_be = {suspect.milli, 0} if suspect.reset else {suspect.milli}
        if tiers is None:
            return "a recomputed bundle that passed just before", receipt_id
        if before not in may_be:
            return f"{suspect.milli} before", str(before)
        most = before + _MOST_MILLI
        if _CONFIRMED not in tiers:
            most = min(most, max(before, statistics.unconfirmed_limit(self._alarm)))
        if not 0 <= after <= most:
            return f"0 to {most} after {before}", str(after)
        self.suspects[body["node_id"]] = _Suspect(after, receipt_id)
        return None

    def of_ban(self, entry: LogEntry, node_of: str | None) -> tuple[str, str] | None:
        """What a ban should rest on and what there is; None when it is founded.

        Args:
            node_of: the node that handed in the receipt that the ban names, if it names one.
        """
        body = entry.body
        receipt_id, reason, found = body["receipt_id"], body.get("reason"), body.get("code")
        if receipt_id is None:
            stated = isinstance(reason, str) and reason.strip()
            return None if stated else ("the operator's reason", "none")
        if node_of != body["node_id"]:
            whose = "no receipt of the log" if node_of is None else "another node's"
            return f"a failure of receipt {receipt_id}", whose
        if found == _BY_SUSPICION:
            suspect = self._suspect(body["node_id"])
            reached = suspect.milli if suspect.receipt_id == receipt_id else None
            founded = reached is not None and reached >= self._alarm
            return None if founded else (f"suspicion of {self._alarm} by receipt {receipt_id}", str(reached or "none"))
        founded = isinstance(found, str) and found in self.fails.get(receipt_id, ())
        return None if founded else (f"a verdict on receipt {receipt_id} that counted: {found}", "none")

    @property
    def _alarm(self) -> int:
        return statistics.alarm_milli(self.run.audit)

    def _suspect(self, node_id: str) -> _Suspect:
        return self.suspects.setdefault(node_id, _Suspect())
