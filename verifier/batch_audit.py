"""What the learner trained on: every receipt of a logged batch plan was handed in before, and had passed.

Step D.9 of ``docs/spec/log.md``, "Auditing the draws". The log names a plan by its digest, so a plan that a live
coordinator serves is bound by the head's signature, and it is signed by the learner: both put their names to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from protocol.envelope import Envelope
from protocol.errors import AssayError, LocalFault, PeerFault, Transient, code
from protocol.identity import key_id
from protocol.log_entry import LogEntry
from protocol.messages import BatchPlan, RunManifest
from verifier.entry_form import malformed
from verifier.findings import Report, counted
from verifier.log_source import E_LOG_ANSWER

E_BATCH_UNFOUNDED = code(
    "E_BATCH_UNFOUNDED", "a batch rests on a receipt that nobody had handed in, or that had not passed"
)

_CHECK: Final = "D.9 batches"
_SHOWN: Final = 20
#: Plans that may be missing before no more are asked for.
_MOST_UNANSWERED: Final = 20


@dataclass(frozen=True)
class _Batch:
    """A plan that the log names."""

    index: int  #: of the entry
    version: int
    sha256: str  #: of the plan


@dataclass
class _Receipt:
    """What the log says of one receipt."""

    index: int  #: of its ``submitted`` entry
    decided: list[tuple[int, bool]] = field(default_factory=list)  #: entries of verdicts that counted; whether passes

    def wrong_at(self, index: int) -> str | None:
        """What keeps it from being trained on at an entry; None when nothing does."""
        if self.index > index:
            return f"handed in later, in entry {self.index}"
        before = [passed for place, passed in self.decided if place < index]
        if not before:
            return "no verdict that counted before"
        return None if before[-1] else "a fail that counted before"


class BatchAudit:
    """The batches of a log, followed entry by entry; checked once the entries are known to be those under the head."""

    def __init__(self, run: RunManifest):
        self._run = run
        self._verifiers = frozenset(key_id(bytes.fromhex(key)) for key in run.roles.verifiers)
        self._batches: list[_Batch] = []
        self._receipts: dict[str, _Receipt] = {}  #: by digest
        self._by_id: dict[str, _Receipt] = {}
        self._rebuilt = False  #: what came before is of the first release, which told too little

    def seen(self, entries: Iterator[LogEntry]) -> Iterator[LogEntry]:
        """The entries, taken in on the way past."""
        for entry in entries:
            if malformed(entry) is None:  # else D.7 says so
                self._follow(entry)
            yield entry

    def check(self, plan_of: Callable[[int], Envelope], report: Report) -> None:
        """Ask for the plan of every version and write down whether its receipts had passed.

        Args:
            plan_of: the plan of a version as somebody answers it, unchecked; raises ``LocalFault`` or ``Transient``.
        """
        faults, unanswered = 0, 0
        for batch in self._batches:
            try:
                problems = self._problems(batch, self._open(batch, plan_of(batch.version)))
            except AssayError as error:  # whoever answered, it is not the plan that the log names
                report.fault(_CHECK, error, blames_node=False)
                unanswered += 1
                if isinstance(error, Transient) or unanswered >= _MOST_UNANSWERED:
                    return
                continue
            for problem in problems[: _SHOWN - faults]:
                report.fault(_CHECK, problem, blames_node=True)
            faults = min(_SHOWN, faults + len(problems))
        if not faults and not unanswered:
            report.note(
                _CHECK, "receipts that had been handed in and had passed", f"{counted(len(self._batches), 'plan')}"
            )

    def _follow(self, entry: LogEntry) -> None:
        body = entry.body
        if entry.kind == "log-rebuilt":
            self._rebuilt = True
        elif entry.kind == "submitted":
            receipt = self._receipts.setdefault(body["sha256"], _Receipt(entry.index))
            self._by_id.setdefault(body["receipt_id"], receipt)
        elif entry.kind == "batch":
            self._batches.append(_Batch(entry.index, body["version"], body["sha256"]))
        elif entry.kind == "verdict" and body["counted"] and body["verifier_id"] in self._verifiers:
            found = self._by_id.get(body["receipt_id"])
            if found is not None and body["outcome"] != "inconclusive":
                found.decided.append((entry.index, body["outcome"] == "pass"))

    def _open(self, batch: _Batch, envelope: Envelope) -> BatchPlan:
        """The plan that the log names.

        Raises:
            LocalFault: ``E_LOG_ANSWER`` when it is another one, or not signed by the learner.
        """
        what = f"the batch plan of version {batch.version} (entry {batch.index})"
        if envelope.digest != batch.sha256:
            raise LocalFault(
                E_LOG_ANSWER, f"what was answered is not {what}", expected=batch.sha256, got=envelope.digest
            )
        try:
            return BatchPlan.open(envelope, self._run.roles.learner, run_id=self._run.run_id)
        except PeerFault as error:
            raise LocalFault(
                E_LOG_ANSWER, f"what was answered as {what} is not signed by the learner", expected=error.expected,
                got=f"{error.code}: {error.message}",
            ) from None

    def _problems(self, batch: _Batch, plan: BatchPlan) -> list[PeerFault]:
        found = []
        for group in plan.groups:
            for digest in group.receipts:
                receipt = self._receipts.get(digest)
                if receipt is None and self._rebuilt:
                    continue
                wrong = "nobody handed it in" if receipt is None else receipt.wrong_at(batch.index)
                if wrong is not None:
                    found.append(self._fault(batch, f"receipt {digest[:16]} of group {group.group}", wrong))
        if plan.version != batch.version:
            found.append(self._fault(batch, "another version", str(plan.version)))
        return found

    def _fault(self, batch: _Batch, about: str, wrong: str) -> PeerFault:
        return PeerFault(
            E_BATCH_UNFOUNDED, f"entry {batch.index}, the learner's plan of version {batch.version}: {about}",
            expected="handed in, and a pass that counted, before", got=wrong,
        )
