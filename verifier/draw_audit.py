"""Every audit draw of a run, made again from its log once the keys are revealed.

Steps D.1 to D.8 and V.1 of ``docs/spec/log.md``, "Auditing the draws". What fails in D is the coordinator's doing. What
a verifier did by itself is V.1, which names it and changes no outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from protocol.audit_draw import commit_to, is_drawn
from protocol.errors import LocalFault, PeerFault, code
from protocol.identity import key_id
from protocol.log_entry import E_LOG_ENTRY, LogEntry
from protocol.messages import RunManifest
from verifier.ban_grounds import BanGrounds
from verifier.draw_counts import DrawAudit, DrawnReceipt, count
from verifier.entry_form import malformed
from verifier.findings import Report, counted
from verifier.node_trust import TrustBook

__all__ = ["DrawAudit", "audit_draws"]

E_DRAW_KEY = code("E_DRAW_KEY", "a draw key is not the one that was committed to, or not revealed in its turn")
E_DRAW_LATE = code("E_DRAW_LATE", "a receipt was logged when its draw key was not yet bound, or no longer secret")
E_DRAW_RATE = code("E_DRAW_RATE", "a bundle was drawn at another rate than the rules give its node")
E_DRAW_SKIPPED = code("E_DRAW_SKIPPED", "a bundle that was drawn passed without a recomputation")
E_DRAW_PRETEXT = code("E_DRAW_PRETEXT", "a recomputation counted of a bundle that was neither drawn nor under review")
E_VERIFIER_UNASKED = code(
    "E_VERIFIER_UNASKED", "a verifier recomputed a bundle that was neither drawn nor under review; it did not count"
)
E_BAN_UNFOUNDED = code("E_BAN_UNFOUNDED", "a ban rests on nothing in the log that counts, and on no operator's reason")
E_LOG_ORDER = code("E_LOG_ORDER", "an entry of the log tells what cannot have happened after the entries before it")

_CHECKS: Final = {
    E_DRAW_KEY: ("D.1 draw keys", "as committed to, revealed once, in turn"),
    E_DRAW_LATE: ("D.2 receipts before keys", "each receipt logged while its key was bound and secret"),
    E_DRAW_RATE: ("D.3 rates", "those of the rules"),
    E_DRAW_SKIPPED: ("D.4 no drawn bundle skipped", "T2 before every pass of a drawn bundle"),
    E_DRAW_PRETEXT: ("D.5 no false pretext", "T2 counts for drawn bundles and reviews only"),
    E_BAN_UNFOUNDED: ("D.6 bans", "each upon a failure in the log, or the operator's with a reason"),
    E_LOG_ENTRY: ("D.7 form of entries", "the fields of their kinds"),
    E_LOG_ORDER: ("D.8 order of entries", "each what can have happened after those before it"),
}
_UNASKED: Final = ("V.1 verifiers", "T2 of drawn bundles and reviews only")
#: How much longer than its time a key may stay secret, and how long a coordinator that was away has to tell it, in ms.
_SLACK_MS: Final = 300_000
_SHOWN: Final = 20
_RECOMPUTATIONS: Final = frozenset({"T2", "T3"})


@dataclass
class _Epoch:
    key_sha256: str
    due_ms: int  #: when its key must be revealed at the latest
    key: bytes | None = None
    overdue_ms: int | None = None  #: first time after that of which the log tells


@dataclass
class _Walk:
    """The log so far."""

    run: RunManifest
    trust: TrustBook
    grounds: BanGrounds
    verifiers: dict[str, str]  #: key id -> public key, hex
    counts: DrawAudit = field(default_factory=DrawAudit)
    epochs: dict[int, _Epoch] = field(default_factory=dict)
    newest: int = -1  #: number of the last epoch that began
    secret: set[int] = field(default_factory=set)  #: epochs whose keys are awaited
    receipts: dict[str, DrawnReceipt] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)  #: signed messages that were logged
    entries: int = 0
    at_ms: int = 0
    founded: bool = False
    rebuilt: bool = False  #: what came before is of the first release, which told too little
    problems: dict[str, list[PeerFault]] = field(default_factory=dict)

    def problem(self, code: str, message: str, expected: object, got: object) -> None:
        self.problems.setdefault(code, []).append(PeerFault(code, message, expected=expected, got=got))

    def disorder(self, entry: LogEntry, expected: object, got: object) -> None:
        self.problem(E_LOG_ORDER, f"entry {entry.index}, {entry.kind}", expected, got)

    def receipt(self, entry: LogEntry) -> DrawnReceipt | None:
        """The receipt that an entry is about."""
        found = self.receipts.get(entry.body["receipt_id"])
        if found is None and not self.rebuilt:
            self.disorder(entry, "a receipt that was logged before", entry.body["receipt_id"])
        return found


def audit_draws(run: RunManifest, entries: Iterable[LogEntry], report: Report) -> DrawAudit:
    """Follow a log from its first entry and write down, per step, whether it holds.

    What the coordinator signed and nobody can read is its doing too: no entry ends the audit.
    """
    verifiers = {key_id(bytes.fromhex(key)): key for key in run.roles.verifiers}
    walk = _Walk(run, TrustBook(run), BanGrounds(run), verifiers)
    for entry in entries:
        _follow(walk, entry)
    if not walk.founded and not walk.rebuilt:
        walk.problem(E_LOG_ORDER, "the log tells nothing of its run", "a first entry: founded", "none")
    _settle(walk)
    for found, (check, expected) in _CHECKS.items():
        problems = walk.problems.get(found, [])
        for problem in problems[:_SHOWN]:
            report.fault(check, problem, blames_node=True)
        doubt = _doubt(walk, found)
        if doubt is not None:
            report.fault(check, doubt, blames_node=False)
        elif not problems:
            report.note(check, expected, _told(walk, found))
    _tell_of_verifiers(walk, report)
    return walk.counts


def _tell_of_verifiers(walk: _Walk, report: Report) -> None:
    """Step V.1: the coordinator must keep what verifiers sign, so it is not blamed for it; that is told beside."""
    check, expected = _UNASKED
    problems = walk.problems.get(E_VERIFIER_UNASKED, [])
    for problem in problems[:_SHOWN]:
        report.observe(check, problem)
    if not problems:
        report.note(check, expected, counted(len(walk.verifiers), "verifier"))


def _doubt(walk: _Walk, found: str) -> LocalFault | None:
    """What can neither be said to hold nor held against the coordinator."""
    if found == E_LOG_ENTRY and walk.rebuilt:
        return LocalFault(
            found, "the first entries are of the first release, whose draws cannot be made again",
            expected="no log-rebuilt", got="log-rebuilt",
        )
    overdue = sorted(number for number in walk.secret if walk.at_ms > walk.epochs[number].due_ms)
    if found == E_DRAW_KEY and overdue:
        return LocalFault(
            found, f"the log ends just after the key of epoch {overdue[0]} was due", expected="the key, by now",
            got="a coordinator that was away, or one that never tells it",
            hint="ask the coordinator for its log again",
        )
    return None


def _follow(walk: _Walk, entry: LogEntry) -> None:
    walk.entries, walk.at_ms = walk.entries + 1, entry.at_ms
    _check_keys_told(walk, entry)
    wrong = malformed(entry)
    if wrong is not None:
        name, expected, got = wrong
        walk.problem(E_LOG_ENTRY, f"entry {entry.index}, {entry.kind}: {name}", expected, got)
        return
    disorder = walk.trust.out_of_order(entry)
    if disorder is not None:
        walk.disorder(entry, *disorder)
    _STEPS.get(entry.kind, _nothing)(walk, entry)
    walk.trust.follow(entry)


def _check_keys_told(walk: _Walk, entry: LogEntry) -> None:
    """A key is told in its time, or as soon as a coordinator that was away is back."""
    for number in sorted(walk.secret):
        epoch = walk.epochs[number]
        if entry.at_ms <= epoch.due_ms:
            continue
        if epoch.overdue_ms is None:
            epoch.overdue_ms = entry.at_ms
        elif entry.at_ms > epoch.overdue_ms + _SLACK_MS:
            walk.secret.discard(number)
            late_s = (entry.at_ms - epoch.due_ms) // 1000
            walk.problem(
                E_DRAW_KEY, f"entry {entry.index}: the key of epoch {number} is still secret", "told when it is due",
                f"{late_s} s later",
            )


def _founded(walk: _Walk, entry: LogEntry) -> None:
    if entry.index != 0:
        walk.disorder(entry, "once, as the first entry", "later")
    if entry.body["run_id"] != walk.run.run_id:
        walk.disorder(entry, f"run {walk.run.run_id}", entry.body["run_id"][:80])
    walk.founded = walk.founded or entry.index == 0


def _rebuilt(walk: _Walk, entry: LogEntry) -> None:
    """The entries before are of the first release: nothing can be said of them, nor of the nodes they tell of."""
    if walk.rebuilt or walk.receipts or entry.body["entries"] != entry.index:
        walk.disorder(entry, "once, and after entries of the first release only", f"{entry.body['entries']} entries")
        return
    walk.problems.clear()
    walk.rebuilt, walk.trust.began = True, False


def _began(walk: _Walk, entry: LogEntry) -> None:
    number = entry.body["epoch"]
    if number != walk.newest + 1:
        walk.problem(E_DRAW_KEY, f"entry {entry.index}: epoch out of turn", walk.newest + 1, number)
    if number in walk.epochs:
        return
    time_ms = 2 * (walk.run.audit.epoch_ms + walk.run.batch.lease_ms) + _SLACK_MS
    walk.epochs[number] = _Epoch(entry.body["key_sha256"], entry.at_ms + time_ms)
    walk.newest = max(walk.newest, number)
    walk.secret.add(number)


def _revealed(walk: _Walk, entry: LogEntry) -> None:
    number, key = entry.body["epoch"], bytes.fromhex(entry.body["key"])
    epoch = walk.epochs.get(number)
    if epoch is None:
        walk.problem(E_DRAW_KEY, f"entry {entry.index}: key of an epoch that never began", "a commitment", number)
        return
    if epoch.key is not None or commit_to(key) != epoch.key_sha256:
        walk.problem(
            E_DRAW_KEY, f"entry {entry.index}: another key for epoch {number}", epoch.key_sha256, commit_to(key)
        )
        return
    epoch.key = key
    walk.secret.discard(number)


def _submitted(walk: _Walk, entry: LogEntry) -> None:
    body = entry.body
    names = {body["sha256"], body["commitment_sha256"]}
    if body["receipt_id"] in walk.receipts or names & walk.digests:
        walk.disorder(entry, "each receipt and each commitment once", f"receipt {body['receipt_id']} again")
        return
    walk.digests |= names
    expected = walk.trust.expected_ppm(body["node_id"], entry.at_ms)
    receipt = DrawnReceipt(
        body["receipt_id"], body["sha256"], body["commitment_sha256"], body["node_id"], body["epoch"],
        body["rate_ppm"], entry.index,
    )
    walk.receipts[receipt.receipt_id] = receipt
    walk.counts.receipts += 1
    if expected is not None and receipt.rate_ppm != expected:
        walk.problem(E_DRAW_RATE, _about(receipt), f"{expected} ppm", f"{receipt.rate_ppm} ppm")
    epoch = walk.epochs.get(receipt.epoch)
    if epoch is None or epoch.key is not None or receipt.epoch != walk.newest:
        walk.problem(
            E_DRAW_LATE, _about(receipt), f"while epoch {receipt.epoch} is open",
            "before it began" if epoch is None else "after its key was revealed" if epoch.key is not None
            else f"when epoch {walk.newest} had begun",
        )


def _verdict(walk: _Walk, entry: LogEntry) -> None:
    body = entry.body
    receipt = walk.receipt(entry)
    if body["verifier_id"] not in walk.verifiers:
        walk.disorder(entry, "a verifier of the run", body["verifier_id"][:16])
        return
    if body["sha256"] in walk.digests:
        walk.disorder(entry, "each verdict once", f"verdict {body['sha256'][:16]} again")
        return
    walk.digests.add(body["sha256"])
    if receipt is None:
        return
    recomputed = "T2" in body["tiers"]
    if recomputed and (body["counted"] or receipt.review):
        walk.counts.recomputed += 0 if receipt.recomputed else 1
        receipt.recomputed = True
    if not receipt.review and not _RECOMPUTATIONS.isdisjoint(body["tiers"]):
        # It refuses to let one count that is not due; what does not count is kept as the verifier signed it.
        decides = body["counted"] and body["outcome"] != "inconclusive"
        by = f"{body['outcome']} in entry {entry.index} by verifier {walk.verifiers[body['verifier_id']]}"
        (receipt.pretexts if decides else receipt.unasked).append(by)
    if not body["counted"] and not receipt.decided:
        walk.disorder(entry, "counted: the receipt was not decided", "not counted")
    if body["counted"] and receipt.decided and not receipt.in_review:
        walk.disorder(entry, "not counted: the receipt was decided", "counted")
    elif body["counted"] and body["outcome"] != "inconclusive":
        _decided(walk, receipt, body, recomputed=recomputed)
    # Whatever it counts for: a drawn bundle never passes without a recomputation.
    if body["counted"] and body["outcome"] == "pass":
        receipt.passed_without_t2 = receipt.passed_without_t2 or not recomputed


def _decided(walk: _Walk, receipt: DrawnReceipt, body: Mapping[str, Any], *, recomputed: bool) -> None:
    receipt.decided, receipt.in_review = True, False
    receipt.passed = body["outcome"] == "pass"
    receipt.failed = receipt.failed or not receipt.passed
    found = body["outcome"], body["code"], body["tiers"]
    walk.grounds.counted(receipt.receipt_id, *found, review=receipt.review)
    if receipt.passed and recomputed:
        walk.trust.passed(receipt.node_id)


def _set_aside(walk: _Walk, entry: LogEntry) -> None:
    receipt = walk.receipt(entry)
    if receipt is None:
        return
    if receipt.decided:
        walk.disorder(entry, "a receipt that was not decided", receipt.receipt_id)
    receipt.decided = receipt.set_aside = True


def _review(walk: _Walk, entry: LogEntry) -> None:
    receipt = walk.receipt(entry)
    if receipt is None:
        return
    if not receipt.passed or receipt.review:
        walk.disorder(entry, "once, of a receipt that had passed", receipt.receipt_id)
        return
    receipt.review = receipt.in_review = True
    walk.counts.reviewed += 1


def _suspicion(walk: _Walk, entry: LogEntry) -> None:
    receipt = walk.receipt(entry)
    if receipt is None:
        return
    if receipt.node_id != entry.body["node_id"]:
        walk.disorder(entry, f"a receipt of node {entry.body['node_id'][:16]}", "another node's")
        return
    wrong = walk.grounds.weigh(entry)
    if wrong is not None:
        walk.disorder(entry, *wrong)


def _banned(walk: _Walk, entry: LogEntry) -> None:
    node_id, receipt_id = entry.body["node_id"], entry.body["receipt_id"]
    if receipt_id is None:
        walk.counts.operator_bans += 1
    else:
        walk.counts.bans += 1
    receipt = None if receipt_id is None else walk.receipts.get(receipt_id)
    wrong = walk.grounds.of_ban(entry, None if receipt is None else receipt.node_id)
    if wrong is not None and not (walk.rebuilt and receipt_id is not None and receipt is None):
        walk.problem(E_BAN_UNFOUNDED, f"entry {entry.index}: ban of node {node_id[:16]}", *wrong)
    for other in walk.receipts.values():
        if other.node_id == node_id:
            other.in_review = False
            if not other.decided:
                other.decided = other.void = True  # what it handed in is void


def _unbanned(walk: _Walk, entry: LogEntry) -> None:
    walk.grounds.unbanned(entry.body["node_id"])


def _profile_changed(walk: _Walk, entry: LogEntry) -> None:
    walk.grounds.changed_profile(entry.body["node_id"])


def _nothing(walk: _Walk, entry: LogEntry) -> None:
    """An entry that no draw depends on."""


_STEPS: Final = {
    "founded": _founded, "log-rebuilt": _rebuilt, "epoch-began": _began, "epoch-revealed": _revealed,
    "submitted": _submitted, "verdict": _verdict, "set-aside": _set_aside, "review": _review,
    "suspicion": _suspicion, "banned": _banned, "unbanned": _unbanned, "profile-changed": _profile_changed,
}


def _settle(walk: _Walk) -> None:
    """Repeat the draws whose keys are known by now."""
    for receipt in walk.receipts.values():
        epoch = walk.epochs.get(receipt.epoch)
        if epoch is None or epoch.key is None:
            walk.counts.secret += 1
            walk.counts.recomputed_secret += receipt.recomputed
            continue
        drawn = is_drawn(epoch.key, receipt.commitment_sha256, receipt.rate_ppm)
        count(walk.counts, receipt, drawn=drawn)
        if drawn and receipt.passed_without_t2:
            walk.problem(E_DRAW_SKIPPED, _about(receipt), "T2 before it passed", "a pass without T2")
        for by in () if drawn else receipt.pretexts:
            walk.problem(E_DRAW_PRETEXT, _about(receipt), "no T2: not drawn", f"T2 outside a review counted: {by}")
        for by in () if drawn else receipt.unasked:
            walk.problem(E_VERIFIER_UNASKED, _about(receipt), "no T2: not drawn", by)


def _about(receipt: DrawnReceipt) -> str:
    return f"entry {receipt.index}: receipt {receipt.receipt_id} of node {receipt.node_id[:16]}"


def _told(walk: _Walk, found: str) -> str:
    counts, entries = walk.counts, "1 entry" if walk.entries == 1 else f"{walk.entries} entries"
    told: dict[str, Any] = {
        E_DRAW_KEY: counted(len(walk.epochs), "epoch"), E_DRAW_LATE: counted(counts.receipts, "receipt"),
        E_DRAW_RATE: counted(counts.receipts, "receipt"), E_DRAW_SKIPPED: f"{counts.drawn} drawn",
        E_DRAW_PRETEXT: f"{counts.recomputed} recomputed, {counts.reviewed} reviewed",
        E_BAN_UNFOUNDED: f"{counted(counts.bans, 'ban')}, {counts.operator_bans} by the operator",
        E_LOG_ENTRY: entries, E_LOG_ORDER: entries,
    }
    return str(told[found])
