"""What became of every receipt of a log: each is in exactly one of the sums. Keys: ``docs/auditing.md``, "Machines"."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from verifier.findings import counted


@dataclass
class DrawAudit:
    """What was counted on the way."""

    receipts: int = 0
    drawn: int = 0  #: selected by a revealed key; the sum of the next six
    drawn_recomputed: int = 0  #: with such a verdict
    drawn_failed: int = 0  #: failed T0 or T1, so that nobody asked the model
    drawn_void: int = 0  #: undecided when their node was banned, which voids what it handed in
    drawn_set_aside: int = 0  #: could not be judged
    drawn_skipped: int = 0  #: passed without T2: D.4 does not hold
    undecided: int = 0  #: none of these by the end of the log
    not_drawn: int = 0  #: spared by a revealed key
    secret: int = 0  #: receipts whose draw key is not revealed yet
    recomputed: int = 0  #: with a verdict that says T2 and counted or came upon a review, drawn or not
    recomputed_secret: int = 0  #: those of them under a key still secret
    reviewed: int = 0  #: put back into the queue after they had passed
    bans: int = 0
    operator_bans: int = 0

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def words(self) -> str:
        """The counts for a human."""
        besides = self.recomputed - self.drawn_recomputed - self.recomputed_secret
        skipped = f"{self.drawn_skipped} PASSED WITHOUT IT, " if self.drawn_skipped else ""
        return "\n".join([
            f"{counted(self.receipts, 'receipt')}: {self.drawn} drawn, {self.not_drawn} not drawn, "
            f"{self.secret} under a key still secret",
            f"of the {self.drawn} drawn: {self.drawn_recomputed} recomputed, {self.drawn_failed} failed before that, "
            f"{self.drawn_void} void because the node was banned first, {self.drawn_set_aside} set aside, {skipped}"
            f"{self.undecided} undecided",
            f"recomputed besides: {besides} not drawn, {self.recomputed_secret} under a key still secret; "
            f"{self.reviewed} put under review",
            f"{counted(self.bans, 'ban')} upon the log, {self.operator_bans} by the operator",
        ])


@dataclass
class DrawnReceipt:
    """One receipt, as far as the log was read."""

    receipt_id: str
    sha256: str
    commitment_sha256: str  #: what is drawn
    node_id: str
    epoch: int
    rate_ppm: int
    index: int
    review: bool = False
    in_review: bool = False  #: put under review and not judged since
    set_aside: bool = False
    void: bool = False  #: not decided when its node was banned
    decided: bool = False
    passed: bool = False
    passed_without_t2: bool = False
    recomputed: bool = False  #: by a verdict that counted, or upon a review
    pretexts: list[str] = field(default_factory=list)  #: verdicts that counted and say T2, outside a review
    unasked: list[str] = field(default_factory=list)  #: the same of verdicts that did not count
    failed: bool = False


def count(counts: DrawAudit, receipt: DrawnReceipt, *, drawn: bool) -> None:
    """Put a receipt whose key is known into exactly one of the sums."""
    counts.drawn += drawn
    if not drawn:
        counts.not_drawn += 1
    elif receipt.passed_without_t2:
        counts.drawn_skipped += 1
    elif receipt.recomputed:
        counts.drawn_recomputed += 1
    elif receipt.failed:
        counts.drawn_failed += 1
    elif receipt.set_aside:
        counts.drawn_set_aside += 1
    elif receipt.void:
        counts.drawn_void += 1
    else:
        counts.undecided += 1
