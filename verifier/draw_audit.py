"""Every audit draw of a run, made again from its log once the keys are revealed.

Steps D.1 to D.6 of ``docs/spec/log.md``, "Auditing the draws". All that can fail here is the coordinator's doing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from protocol.audit_draw import commit_to, is_drawn
from protocol.errors import PeerFault, code
from protocol.log_entry import E_LOG_ENTRY, LogEntry
from protocol.messages import RunManifest
from verifier.findings import Report, counted
from verifier.node_trust import TrustBook

E_DRAW_KEY = code("E_DRAW_KEY", "a draw key is not the one that was committed to, or not revealed in its turn")
E_DRAW_LATE = code("E_DRAW_LATE", "a receipt was logged when its draw key was not yet bound, or no longer secret")
E_DRAW_RATE = code("E_DRAW_RATE", "a bundle was drawn at another rate than the rules give its node")
E_DRAW_SKIPPED = code("E_DRAW_SKIPPED", "a bundle that was drawn passed without a recomputation")
E_DRAW_PRETEXT = code("E_DRAW_PRETEXT", "a bundle was recomputed that was neither drawn nor under review")
E_BAN_UNFOUNDED = code("E_BAN_UNFOUNDED", "a ban names a bundle that no verdict of the log speaks against")

_CHECKS: Final = {
    E_DRAW_KEY: ("D.1 draw keys", "as committed to, revealed once, in turn"),
    E_DRAW_LATE: ("D.2 receipts before keys", "each receipt logged while its key was bound and secret"),
    E_DRAW_RATE: ("D.3 rates", "those of the rules"),
    E_DRAW_SKIPPED: ("D.4 no drawn bundle skipped", "T2 before every pass of a drawn bundle"),
    E_DRAW_PRETEXT: ("D.5 no false pretext", "T2 only for drawn bundles and reviews"),
    E_BAN_UNFOUNDED: ("D.6 bans", "each upon a failure in the log, or the operator's with a reason"),
}
#: Code of a ban that rests on a sum over bundles instead of one that failed.
_BY_SUSPICION: Final = "E_SUSPICION"


@dataclass
class DrawAudit:
    """What was counted on the way."""

    receipts: int = 0
    drawn: int = 0  #: selected by a revealed key; the sum of the next six
    drawn_recomputed: int = 0  #: with a verdict that says T2
    drawn_failed: int = 0  #: failed T0 or T1, so that nobody asked the model
    drawn_void: int = 0  #: undecided when their node was banned, which voids what it handed in
    drawn_set_aside: int = 0  #: could not be judged
    drawn_skipped: int = 0  #: passed without T2: D.4 does not hold
    undecided: int = 0  #: none of these by the end of the log
    not_drawn: int = 0  #: spared by a revealed key
    secret: int = 0  #: receipts whose draw key is not revealed yet
    recomputed: int = 0  #: with a verdict that says T2, drawn or not
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
class _Epoch:
    key_sha256: str
    key: bytes | None = None


@dataclass
class _Receipt:
    receipt_id: str
    sha256: str
    node_id: str
    epoch: int
    rate_ppm: int
    index: int
    review: bool = False
    set_aside: bool = False
    void: bool = False  #: undecided when its node was banned
    decided: bool = False
    passed_without_t2: bool = False
    recomputed: bool = False
    pretext: bool = False  #: recomputed outside a review
    failed: bool = False


@dataclass
class _Walk:
    """The log so far."""

    run: RunManifest
    trust: TrustBook
    counts: DrawAudit = field(default_factory=DrawAudit)
    epochs: dict[int, _Epoch] = field(default_factory=dict)
    receipts: dict[str, _Receipt] = field(default_factory=dict)
    suspicion: set[str] = field(default_factory=set)  #: receipts that changed the suspicion of a node
    problems: dict[str, list[PeerFault]] = field(default_factory=dict)

    def problem(self, code: str, message: str, expected: object, got: object) -> None:
        self.problems.setdefault(code, []).append(PeerFault(code, message, expected=expected, got=got))


def audit_draws(run: RunManifest, entries: Iterable[LogEntry], report: Report) -> DrawAudit:
    """Follow a log from its first entry and write down, per step, whether it holds.

    Raises:
        PeerFault: ``E_LOG_ENTRY`` for an entry that does not say what its kind must.
    """
    walk = _Walk(run, TrustBook(run))
    for entry in entries:
        try:
            _STEPS.get(entry.kind, _nothing)(walk, entry)
            walk.trust.follow(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PeerFault(
                E_LOG_ENTRY, f"entry {entry.index} is no '{entry.kind}'", expected="the fields of its kind",
                got=f"{type(error).__name__}: {error}",
            ) from None
    _settle(walk)
    for found, (check, expected) in _CHECKS.items():
        problems = walk.problems.get(found, [])
        for problem in problems[:20]:
            report.fault(check, problem, blames_node=True)
        if not problems:
            report.note(check, expected, _told(walk, found))
    return walk.counts


def _began(walk: _Walk, entry: LogEntry) -> None:
    number = entry.body["epoch"]
    if walk.epochs and (number != max(walk.epochs) + 1 or walk.epochs[number - 1].key is None):
        walk.problem(E_DRAW_KEY, f"entry {entry.index}: epoch out of turn", max(walk.epochs) + 1, number)
    walk.epochs[number] = _Epoch(entry.body["key_sha256"])


def _revealed(walk: _Walk, entry: LogEntry) -> None:
    number, key = entry.body["epoch"], bytes.fromhex(entry.body["key"])
    epoch = walk.epochs.get(number)
    if epoch is None:
        if walk.epochs:
            walk.problem(E_DRAW_KEY, f"entry {entry.index}: key of an epoch that never began", "a commitment", number)
        return
    if epoch.key is not None or commit_to(key) != epoch.key_sha256:
        walk.problem(
            E_DRAW_KEY, f"entry {entry.index}: another key for epoch {number}", epoch.key_sha256, commit_to(key)
        )
        return
    epoch.key = key


def _submitted(walk: _Walk, entry: LogEntry) -> None:
    body = entry.body
    expected = walk.trust.expected_ppm(body["node_id"], entry.at_ms)
    if "epoch" not in body:
        return  # by the first release, whose log cannot be followed
    receipt = _Receipt(
        body["receipt_id"], body["sha256"], body["node_id"], body["epoch"], body["rate_ppm"], entry.index
    )
    walk.receipts[receipt.receipt_id] = receipt
    walk.counts.receipts += 1
    if expected is not None and receipt.rate_ppm != expected:
        walk.problem(E_DRAW_RATE, _about(receipt), f"{expected} ppm", f"{receipt.rate_ppm} ppm")
    epoch = walk.epochs.get(receipt.epoch)
    if epoch is None or epoch.key is not None:
        walk.problem(
            E_DRAW_LATE, _about(receipt), f"while epoch {receipt.epoch} is open",
            "before it began" if epoch is None else "after its key was revealed",
        )


def _verdict(walk: _Walk, entry: LogEntry) -> None:
    body = entry.body
    receipt = walk.receipts.get(body["receipt_id"])
    if receipt is None:
        return
    recomputed = "T2" in body["tiers"]
    if recomputed:
        walk.counts.recomputed += 0 if receipt.recomputed else 1
        receipt.recomputed = True
        receipt.pretext = receipt.pretext or not receipt.review
    receipt.failed = receipt.failed or body["outcome"] == "fail"
    if not body["counted"] or body["outcome"] == "inconclusive":
        return
    receipt.decided = True
    if body["outcome"] == "pass":
        receipt.passed_without_t2 = receipt.passed_without_t2 or not recomputed
        if recomputed:
            walk.trust.passed(receipt.node_id)


def _set_aside(walk: _Walk, entry: LogEntry) -> None:
    receipt = walk.receipts.get(entry.body["receipt_id"])
    if receipt is not None:
        receipt.decided = receipt.set_aside = True


def _review(walk: _Walk, entry: LogEntry) -> None:
    receipt = walk.receipts.get(entry.body["receipt_id"])
    if receipt is not None:
        receipt.review = True
        walk.counts.reviewed += 1


def _suspicion(walk: _Walk, entry: LogEntry) -> None:
    if entry.body["after_milli"] > entry.body["before_milli"]:
        walk.suspicion.add(entry.body["receipt_id"])


def _banned(walk: _Walk, entry: LogEntry) -> None:
    receipt_id = entry.body["receipt_id"]
    if receipt_id is None:
        walk.counts.operator_bans += 1
    else:
        _check_ban(walk, entry, receipt_id)
    for other in walk.receipts.values():
        if other.node_id == entry.body["node_id"] and not other.decided:
            other.decided = other.void = True  # what it handed in is void


def _check_ban(walk: _Walk, entry: LogEntry, receipt_id: str) -> None:
    walk.counts.bans += 1
    receipt = walk.receipts.get(receipt_id)
    by_suspicion = entry.body["code"] == _BY_SUSPICION and receipt_id in walk.suspicion
    if receipt is None or receipt.node_id != entry.body["node_id"] or not (receipt.failed or by_suspicion):
        walk.problem(
            E_BAN_UNFOUNDED, f"entry {entry.index}: ban of node {entry.body['node_id'][:16]}",
            f"a failure of receipt {receipt_id}", "none" if receipt is None or not receipt.failed else "another node's",
        )


def _nothing(walk: _Walk, entry: LogEntry) -> None:
    """An entry that no draw depends on."""


_STEPS: Final = {
    "epoch-began": _began, "epoch-revealed": _revealed, "submitted": _submitted, "verdict": _verdict,
    "set-aside": _set_aside, "review": _review, "suspicion": _suspicion, "banned": _banned,
}


def _settle(walk: _Walk) -> None:
    """Repeat the draws whose keys are known by now."""
    for receipt in walk.receipts.values():
        epoch = walk.epochs.get(receipt.epoch)
        if epoch is None or epoch.key is None:
            walk.counts.secret += 1
            walk.counts.recomputed_secret += receipt.recomputed
            continue
        drawn = is_drawn(epoch.key, receipt.sha256, receipt.rate_ppm)
        _count(walk.counts, receipt, drawn=drawn)
        if drawn and receipt.passed_without_t2:
            walk.problem(E_DRAW_SKIPPED, _about(receipt), "T2 before it passed", "a pass without T2")
        if not drawn and receipt.pretext:
            walk.problem(E_DRAW_PRETEXT, _about(receipt), "no T2: not drawn", "T2 outside a review")


def _count(counts: DrawAudit, receipt: _Receipt, *, drawn: bool) -> None:
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


def _about(receipt: _Receipt) -> str:
    return f"entry {receipt.index}: receipt {receipt.receipt_id} of node {receipt.node_id[:16]}"


def _told(walk: _Walk, found: str) -> str:
    counts = walk.counts
    told: dict[str, Any] = {
        E_DRAW_KEY: counted(len(walk.epochs), "epoch"), E_DRAW_LATE: counted(counts.receipts, "receipt"),
        E_DRAW_RATE: counted(counts.receipts, "receipt"), E_DRAW_SKIPPED: f"{counts.drawn} drawn",
        E_DRAW_PRETEXT: f"{counts.recomputed} recomputed, {counts.reviewed} reviewed",
        E_BAN_UNFOUNDED: f"{counted(counts.bans, 'ban')}, {counts.operator_bans} by the operator",
    }
    return str(told[found])
