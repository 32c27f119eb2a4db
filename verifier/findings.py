"""What an audit found: a report that grows check by check, and the judgement it ends in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar

from protocol.errors import AssayError, PeerFault
from protocol.messages import Finding, RolloutScore
from protocol.text import printable

Tier = Literal["T0", "T1", "T2", "T3"]
Outcome = Literal["pass", "fail", "inconclusive"]
Samples = tuple[int, ...]

_T = TypeVar("_T")

#: Lengths that the schema of ``protocol.messages.Finding`` allows.
_TEXT: Final = 400
_CHECK: Final = 80
#: Text beyond this is not looked at.
_READ: Final = 2 * _TEXT


class RolloutFault(PeerFault):
    """A peer fault with its place: which sample, which completion position."""

    def __init__(
        self, code: str, message: str, *, sample: int | None = None, position: int | None = None,
        expected: object = None, got: object = None, hint: str | None = None,
    ):
        super().__init__(code, message, expected=expected, got=got, hint=hint)
        self.sample, self.position = sample, position


@dataclass(frozen=True)
class Judgement:
    """The end of an audit."""

    outcome: Outcome
    code: str | None  #: None exactly when the outcome is pass
    tiers: tuple[Tier, ...]  #: tiers that were run to their end
    findings: tuple[Finding, ...]
    samples: Samples = ()
    rewards_micro: tuple[int, ...] = ()  #: reward of each sample; empty unless the tokens passed
    tokens: int = 0
    diverges: bool = False  #: another node's replica of the unit has other tokens, and this one passed
    scores: tuple[RolloutScore, ...] = ()  #: of each recomputed rollout of a pass, where calibrated


@dataclass
class Report:
    """Findings in the order of the checks. ``excused`` collects codes of failures that are not the node's."""

    findings: list[Finding] = field(default_factory=list)
    tiers: list[Tier] = field(default_factory=list)
    blamed: str | None = None  #: code of the first failure that is the node's doing
    excused: str | None = None  #: code of the first failure that is somebody else's

    def note(self, check: str, expected: object, got: object) -> None:
        """A check that holds."""
        self.findings.append(Finding(check=_text(check, _CHECK), ok=True, expected=_text(expected), got=_text(got)))

    def fault(self, check: str, error: AssayError, *, blames_node: bool) -> None:
        """A check that does not hold. Only a :class:`PeerFault` can ever blame the node."""
        self.observe(check, error)
        if blames_node and isinstance(error, PeerFault):
            self.blamed = self.blamed or error.code
        else:
            self.excused = self.excused or error.code

    def observe(self, check: str, error: AssayError) -> None:
        """Write a failed check down without deciding yet whose doing it is."""
        self.findings.append(
            Finding(
                check=_text(check, _CHECK), ok=False, expected=_text(error.expected or "no fault"),
                got=_text(error.message if error.got is None else f"{error.message}: {error.got}"), code=error.code,
                sample=getattr(error, "sample", None), position=getattr(error, "position", None),
            )
        )

    def attempt(
        self, check: str, expected: object, step: Callable[[], _T], *, node: bool, got: Callable[[_T], object] = str
    ) -> _T | None:
        """Run a step and write down how it went: what it returned as told by ``got``, or its error.

        ``node`` says whether a peer fault in it is the node's. None when the step failed.
        """
        try:
            value = step()
        except AssayError as error:
            self.fault(check, error, blames_node=node)
            return None
        self.note(check, expected, got(value))
        return value

    def absorb(self, other: Report) -> None:
        """Take over what another report holds."""
        self.findings += other.findings
        self.blamed = self.blamed or other.blamed
        self.excused = self.excused or other.excused

    def before(self, judgement: Judgement) -> Judgement:
        """A judgement with these findings before its own; a failure among them makes it inconclusive."""
        findings = (*self.findings, *judgement.findings)
        if self.clean:
            return replace(judgement, findings=findings)
        return replace(judgement, findings=findings, outcome="inconclusive", code=self.excused or self.blamed)

    @property
    def clean(self) -> bool:
        """Nothing failed so far."""
        return self.blamed is None and self.excused is None

    def judgement(self, samples: Samples = (), rewards_micro: tuple[int, ...] = (), tokens: int = 0) -> Judgement:
        """The outcome: ``fail`` only when all that failed is the node's doing."""
        outcome: Outcome = "pass" if self.blamed is None else "fail"
        if self.excused is not None:
            outcome = "inconclusive"
        return Judgement(
            outcome, self.excused or self.blamed, tuple(self.tiers), tuple(self.findings), samples, rewards_micro,
            tokens,
        )


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _text(value: object, most: int = _TEXT) -> str:
    """Text for a finding, which others read: one line of what prints, so that it fits the schema whatever it is."""
    text = printable(str(value)[:_READ])
    return text if len(text) <= most else text[: most - 1] + "…"
