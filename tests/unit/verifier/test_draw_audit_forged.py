"""``assay audit run``: logs that a lying coordinator signs, written by hand, and what each is caught by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from protocol import log_file, statistics
from protocol.audit_draw import audit_rate_ppm, commit_to, is_drawn
from protocol.errors import CODES
from protocol.identity import Identity
from protocol.log_entry import LogEntry
from protocol.log_head import LogHead, origin_of
from protocol.messages import RunManifest
from protocol.transparency import Peaks
from tests.fakes.clock import FakeClock
from tests.fakes.coordinator import PROFILE, ROLES, RUN_ID, make_manifest
from verifier.audit_cli import app
from verifier.draw_audit import DrawAudit, audit_draws
from verifier.findings import Report

KEYS = {name: Identity(hashlib.sha256(name.encode()).digest()) for name in ROLES}
RUN = make_manifest(KEYS, FakeClock(), audit={"ramp": 3, "floor_ppm": 100_000, "epoch_ms": 600_000})
ALARM = statistics.alarm_milli(RUN.audit)
STEP = 3000
NODE, OTHER = "aa" * 32, "bb" * 32
FIRST, SECOND = b"1" * 32, b"2" * 32
ALL, T2, T3 = 1_000_000, ("T0", "T1", "T2"), ("T0", "T1", "T2", "T3")

Fact = tuple[str, dict[str, Any]]
_SERIAL = count()


def digest_of(number: int, *, drawn: bool, rate: int = ALL) -> str:
    names = (hashlib.sha256(f"{number} {attempt}".encode()).hexdigest() for attempt in count())
    return next(name for name in names if is_drawn(FIRST, name, rate) == drawn)


def receipt_digest(number: int) -> str:
    return hashlib.sha256(f"receipt {number}".encode()).hexdigest()


def registered(node: str = NODE) -> Fact:
    return "node-registered", {"node_id": node, "profile": PROFILE, "public_key": "00" * 32}


def began(number: int = 0, key: bytes = FIRST) -> Fact:
    return "epoch-began", {"epoch": number, "key_sha256": commit_to(key)}


def submitted(number: int, node: str = NODE, rate: int = ALL, *, drawn: bool = True, **changes: Any) -> Fact:
    commitment = digest_of(number, drawn=drawn, rate=rate) if 0 < rate < ALL else digest_of(number, drawn=True)
    body = {
        "receipt_id": f"{number:032x}", "sha256": receipt_digest(number), "commitment_sha256": commitment,
        "node_id": node, "epoch": 0, "rate_ppm": rate,
    }
    return "submitted", body | changes


def verdict(number: int, outcome: str = "pass", tiers: Sequence[str] = T2, **changes: Any) -> Fact:
    return "verdict", {
        "receipt_id": f"{number:032x}", "sha256": hashlib.sha256(f"verdict {next(_SERIAL)}".encode()).hexdigest(),
        "verifier_id": KEYS["verifier"].id, "outcome": outcome, "code": None if outcome == "pass" else "E_REPLAY",
        "tiers": list(tiers), "counted": True,
    } | changes


def suspicion(number: int, before: int, after: int) -> Fact:
    return "suspicion", {
        "receipt_id": f"{number:032x}", "node_id": NODE, "before_milli": before, "after_milli": after
    }


def banned(number: int | None, found: str = "E_REPLAY", reason: str = "so it was") -> Fact:
    receipt_id = None if number is None else f"{number:032x}"
    body = {"node_id": NODE, "code": found, "reason": reason, "receipt_id": receipt_id, "until_ms": None}
    return "banned", body


def forced(bundles: int) -> Fact:
    return "audits-forced", {"node_id": NODE, "bundles": bundles, "why": "screen"}


def changed_profile() -> Fact:
    return "profile-changed", {"node_id": NODE, "profile": PROFILE}


FOUNDED: Fact = ("founded", {"run_id": RUN_ID, "name": "a run"})
END: tuple[Fact, ...] = (("epoch-revealed", {"epoch": 0, "key": FIRST.hex()}), began(1, SECOND))


def the_log(
    *facts: Fact, start: Sequence[Fact] = (FOUNDED, registered(), began()), end: Sequence[Fact] = END
) -> list[LogEntry]:
    """The facts, a second apart."""
    return [LogEntry(index, 1000 * (index + 1), *fact) for index, fact in enumerate((*start, *facts, *end))]


def found(log: list[LogEntry], run: RunManifest = RUN) -> tuple[set[str | None], DrawAudit]:
    report = Report()
    counts = audit_draws(run, log, report)
    return {finding.code for finding in report.findings if not finding.ok}, counts


def codes(*facts: Fact, **parts: Sequence[Fact]) -> set[str | None]:
    return found(the_log(*facts, **parts))[0]


def judged(*numbers: int, tiers: Sequence[str] = T2) -> list[Fact]:
    return [fact for number in numbers for fact in (submitted(number), verdict(number, tiers=tiers))]


def test_an_honest_log_by_hand_holds() -> None:
    rate = audit_rate_ppm(RUN.audit, 3)
    assert codes(*judged(1, 2, 3), submitted(4, rate=rate, drawn=False), verdict(4, tiers=("T0", "T1"))) == set()
    assert codes(submitted(1), verdict(1, "fail"), banned(1)) == set()
    assert codes(banned(None)) == set()
    assert codes(start=(FOUNDED,), end=()) == set()


def test_a_verdict_before_its_receipt() -> None:
    assert "E_LOG_ORDER" in codes(verdict(1, tiers=("T0", "T1")), submitted(1))


@pytest.mark.parametrize("kind", ["set-aside", "review"])
def test_other_acts_upon_a_receipt_that_nobody_handed_in(kind: str) -> None:
    assert codes((kind, {"receipt_id": "1" * 32, "code": "E_STORE"})) == {"E_LOG_ORDER"}


def test_a_receipt_without_its_epoch_uses_up_no_forced_audit() -> None:
    shorn = {name: value for name, value in submitted(9)[1].items() if name != "epoch"}
    spared = submitted(5, rate=audit_rate_ppm(RUN.audit, 3), drawn=False)
    assert codes(*judged(1, 2, 3), forced(1), ("submitted", shorn), spared) == {"E_LOG_ENTRY", "E_DRAW_RATE"}


def test_a_receipt_twice() -> None:
    again = submitted(1, sha256=digest_of(9, drawn=True))
    names, counts = found(the_log(submitted(1), verdict(1, tiers=("T0", "T1")), again, verdict(1)))
    assert {"E_LOG_ORDER", "E_DRAW_SKIPPED"} <= names
    assert (counts.receipts, counts.drawn_skipped) == (1, 1)
    assert codes(submitted(1), submitted(2, sha256=receipt_digest(1))) == {"E_LOG_ORDER"}
    # a second receipt for one commitment would be a second draw, dated as one likes
    again = submitted(2, commitment_sha256=digest_of(1, drawn=True))
    assert codes(submitted(1), again) == {"E_LOG_ORDER"}
    assert codes(forced(1), submitted(1), submitted(1), start=(FOUNDED, registered(), began())) == {"E_LOG_ORDER"}


@pytest.mark.parametrize("rate", [0, -5, 100_000, 2**50])
def test_the_rules_hold_for_nodes_that_never_registered(rate: int) -> None:
    assert codes(submitted(1, rate=rate), start=(FOUNDED, began())) == {"E_DRAW_RATE", "E_LOG_ORDER"}
    bare: Fact = ("node-registered", {"node_id": NODE})
    names = codes(submitted(1, rate=rate), start=(FOUNDED, bare, began()))
    assert names == {"E_DRAW_RATE", "E_LOG_ENTRY", "E_LOG_ORDER"}


def test_a_node_that_registers_again_keeps_what_is_forced() -> None:
    facts = [*judged(1, 2, 3), forced(1), registered(), submitted(4, rate=audit_rate_ppm(RUN.audit, 3), drawn=False)]
    assert codes(*facts) == {"E_DRAW_RATE", "E_LOG_ORDER"}


def test_one_verdict_a_thousand_times() -> None:
    rate = audit_rate_ppm(RUN.audit, 1000)
    once = verdict(1)
    spared = submitted(2, rate=rate, drawn=False)
    assert codes(submitted(1), *[once] * 1000, spared) == {"E_LOG_ORDER", "E_DRAW_RATE"}
    others = [verdict(1) for _ in range(999)]  # other messages on one bundle
    assert codes(submitted(1), once, *others, spared) == {"E_LOG_ORDER", "E_DRAW_RATE"}


def test_forced_audits_are_only_used_up() -> None:
    spared = submitted(4, rate=audit_rate_ppm(RUN.audit, 3), drawn=False)
    assert codes(*judged(1, 2, 3), forced(20), forced(0), spared) == {"E_LOG_ORDER", "E_DRAW_RATE"}
    assert codes(*judged(1, 2, 3), forced(20), forced(20)) == {"E_LOG_ORDER"}
    assert codes(*judged(1, 2, 3), forced(2), *judged(4), forced(20)) == set()


def test_a_verdict_by_somebody_who_is_no_verifier() -> None:
    by = {"verifier_id": "dd" * 32}
    assert codes(submitted(1), verdict(1, **by)) == {"E_LOG_ORDER"}
    assert codes(submitted(1), verdict(1, "fail", **by), banned(1)) == {"E_LOG_ORDER", "E_BAN_UNFOUNDED"}


def test_counted_is_what_the_log_says_of_the_receipt() -> None:
    assert codes(submitted(1), verdict(1, counted=False)) == {"E_LOG_ORDER"}
    assert codes(submitted(1), verdict(1), verdict(1)) == {"E_LOG_ORDER"}
    assert codes(submitted(1), verdict(1), verdict(1, "fail", counted=False)) == set()
    assert codes(submitted(1), ("set-aside", {"receipt_id": f"{1:032x}"}), verdict(1)) == {"E_LOG_ORDER"}
    assert codes(submitted(1), banned(None), ("unbanned", {"node_id": NODE}), verdict(1)) == {"E_LOG_ORDER"}


def test_a_pass_that_should_not_count_is_skipped_all_the_same() -> None:
    facts = [submitted(1), ("set-aside", {"receipt_id": f"{1:032x}"}), verdict(1, tiers=("T0", "T1"))]
    assert codes(*facts) == {"E_LOG_ORDER", "E_DRAW_SKIPPED"}  # type: ignore[arg-type]


def test_a_review_is_of_a_bundle_that_had_passed() -> None:
    rate = audit_rate_ppm(RUN.audit, 3)
    review: Fact = ("review", {"receipt_id": f"{4:032x}", "node_id": NODE, "why": "screen"})
    handed_in = [*judged(1, 2, 3), submitted(4, rate=rate, drawn=False)]
    passed = verdict(4, tiers=("T0", "T1"))
    assert codes(*handed_in, passed, review, verdict(4)) == set()
    assert codes(*handed_in, passed, review, verdict(4, "fail", T3), banned(4)) == set()
    assert codes(*handed_in, review, verdict(4)) == {"E_LOG_ORDER", "E_DRAW_PRETEXT"}
    assert codes(*handed_in, passed, review, verdict(4), review) == {"E_LOG_ORDER"}


SPARED: tuple[Fact, ...] = (*judged(1, 2, 3), submitted(4, rate=audit_rate_ppm(RUN.audit, 3), drawn=False))
PASSED = verdict(4, tiers=("T0", "T1"))


@pytest.mark.parametrize("tiers", [T2, T3, ("T0", "T1", "T3")])
@pytest.mark.parametrize("outcome", ["pass", "fail", "inconclusive"])
def test_what_a_verifier_does_unasked_is_not_the_coordinators(outcome: str, tiers: Sequence[str]) -> None:
    """Any verifier key could have the coordinator accused otherwise: what does not count, it has to keep."""
    later = verdict(4, outcome, tiers, counted=False)
    report, plain = Report(), Report()
    told = audit_draws(RUN, the_log(*SPARED, PASSED, later), report)
    assert told == audit_draws(RUN, the_log(*SPARED, PASSED), plain)  # it counts for no sum either
    assert report.clean
    [finding] = [finding for finding in report.findings if not finding.ok]
    assert (finding.code, finding.check) == ("E_VERIFIER_UNASKED", "V.1 verifiers")
    assert RUN.roles.verifiers[0] in finding.got


def test_an_end_without_a_decision_is_the_verifiers_too() -> None:
    assert codes(*SPARED, verdict(4, "inconclusive"), PASSED) == {"E_VERIFIER_UNASKED"}


def test_a_recomputation_that_counted_unasked_is_the_coordinators() -> None:
    for outcome, tiers in (("pass", T2), ("fail", T3)):
        report = Report()
        audit_draws(RUN, the_log(*SPARED, verdict(4, outcome, tiers)), report)
        assert report.blamed == "E_DRAW_PRETEXT"
        [finding] = [finding for finding in report.findings if not finding.ok]
        assert RUN.roles.verifiers[0] in finding.got


def test_a_verdict_too_many_on_a_drawn_bundle_is_nobodys_fault() -> None:
    assert codes(*judged(1), verdict(1, "fail", T3, counted=False)) == set()


def waiting(*times_ms: int, reveal_last: bool = False) -> tuple[set[str | None], Report]:
    log = the_log(*judged(1), end=())
    for at_ms in times_ms:
        log.append(LogEntry(len(log), at_ms, "leased", {}))
    if reveal_last:
        log.append(LogEntry(len(log), times_ms[-1], *END[0]))
    report = Report()
    audit_draws(RUN, log, report)
    return {finding.code for finding in report.findings if not finding.ok}, report


def test_a_key_is_told_in_its_time() -> None:
    due_ms = 3000 + 2 * (RUN.audit.epoch_ms + RUN.batch.lease_ms) + 300_000
    assert waiting(due_ms)[0] == set()
    for last_ms in (due_ms + 600_001, 864_000_000):  # the coordinator acts, and goes on to keep its key
        names, report = waiting(due_ms + 1, last_ms)
        assert (names, report.blamed) == ({"E_DRAW_KEY"}, "E_DRAW_KEY")
    assert waiting(due_ms + 1, due_ms + 300_002, reveal_last=True)[1].blamed == "E_DRAW_KEY"


def test_a_coordinator_that_was_away_tells_its_key_when_it_is_back() -> None:
    assert waiting(864_000_000, 864_001_000, reveal_last=True)[0] == set()
    names, report = waiting(864_000_000)  # the log ends there: perhaps it tells it a second later
    assert (names, report.blamed, report.excused) == ({"E_DRAW_KEY"}, None, "E_DRAW_KEY")
    assert waiting(864_000_000, 500_000)[0] == set()  # its clock was wrong for a moment


def test_a_key_may_outlast_its_epoch_but_no_receipt_is_drawn_by_it() -> None:
    told = END[0]
    assert codes(*judged(1), began(1, SECOND), told, end=()) == set()
    assert codes(began(1, SECOND), submitted(1), told, end=()) == {"E_DRAW_LATE"}
    assert codes(began(2, SECOND), end=()) == {"E_DRAW_KEY"}
    assert codes(began(0, SECOND), *END) == {"E_DRAW_KEY"}


def test_bans_upon_verdicts_that_do_not_count() -> None:
    fail = verdict(1, "fail")
    assert codes(submitted(1), verdict(1), verdict(1, "fail", counted=False), banned(1)) == {"E_BAN_UNFOUNDED"}
    assert codes(submitted(1), verdict(1), fail, banned(1)) == {"E_LOG_ORDER", "E_BAN_UNFOUNDED"}
    assert codes(submitted(1), banned(1), fail) == {"E_LOG_ORDER", "E_BAN_UNFOUNDED"}
    assert codes(submitted(1), fail, banned(1, found="E_HEAD_KL")) == {"E_BAN_UNFOUNDED"}
    assert "E_BAN_UNFOUNDED" in codes(
        submitted(1, OTHER), fail, banned(1), start=(FOUNDED, registered(), registered(OTHER), began())
    )


@pytest.mark.parametrize("reason", ["", "  ", None, 7])
def test_a_ban_by_an_operator_who_gives_no_reason(reason: Any) -> None:
    assert codes(banned(None, reason=reason)) == {"E_BAN_UNFOUNDED"}


def climb(first: int = 1, before: int = 0) -> tuple[list[Fact], int]:
    """Recomputed bundles until the alarm, and the last one's number."""
    facts: list[Fact] = []
    number = first - 1
    while before < ALARM:
        number, after = number + 1, before + STEP
        facts += [submitted(number), verdict(number, tiers=T3), suspicion(number, before, after)]
        before = after
    return facts, number


def test_suspicion_grows_step_by_step_to_the_alarm() -> None:
    run = RUN.model_copy(update={"audit": RUN.audit.model_copy(update={"ramp": 1000})})
    facts, last = climb()
    assert last > 2

    def named(*facts: Fact) -> set[str | None]:
        return found(the_log(*facts), run)[0]

    ban = banned(last, "E_SUSPICION")
    assert named(*facts, ban) == set()
    assert named(*facts, banned(last - 1, "E_SUSPICION")) == {"E_BAN_UNFOUNDED"}
    assert named(*facts[:-3], banned(last - 1, "E_SUSPICION")) == {"E_BAN_UNFOUNDED"}
    assert named(*judged(1), suspicion(1, 0, 1), banned(1, "E_SUSPICION")) == {"E_BAN_UNFOUNDED"}
    steps = (0, STEP + 1), (0, ALARM), (ALARM - 1, ALARM), (0, -1)
    for step in (suspicion(1, before, after) for before, after in steps):
        wanted = {"E_LOG_ORDER", "E_BAN_UNFOUNDED"}
        assert named(*judged(1, tiers=T3), step, banned(1, "E_SUSPICION")) == wanted
    half = statistics.unconfirmed_limit(ALARM)
    unconfirmed = [*facts[:-2], verdict(last), suspicion(last, STEP * (last - 1), STEP * last)]
    assert STEP * last > half
    assert named(*unconfirmed, ban) == {"E_LOG_ORDER", "E_BAN_UNFOUNDED"}
    assert named(*judged(1), suspicion(1, 0, 5), suspicion(1, 5, 10)) == {"E_LOG_ORDER"}
    assert named(submitted(1), suspicion(1, 0, 5)) == {"E_LOG_ORDER"}


def test_what_was_chosen_for_review_is_never_weighed() -> None:
    rate = audit_rate_ppm(RUN.audit, 3)
    chosen = [submitted(4, rate=rate, drawn=False), verdict(4, tiers=("T0", "T1"))]
    chosen += [("review", {"receipt_id": f"{4:032x}"}), verdict(4)]
    assert codes(*judged(1, 2, 3), *chosen) == set()
    assert codes(*judged(1, 2, 3), *chosen, suspicion(4, 0, 5)) == {"E_LOG_ORDER"}


def test_suspicion_may_end_with_a_profile_or_outlast_it() -> None:
    first = [*judged(1), suspicion(1, 0, 900)]
    for before in (0, 900):
        assert codes(*first, changed_profile(), *judged(2), suspicion(2, before, before + 100)) == set()
    assert codes(*first, changed_profile(), *judged(2), suspicion(2, 450, 500)) == {"E_LOG_ORDER"}
    assert codes(*first, *judged(2), suspicion(2, 0, 100)) == {"E_LOG_ORDER"}
    unbanned: Fact = ("unbanned", {"node_id": NODE, "reason": "so"})
    assert codes(*first, banned(None), unbanned, *judged(2), suspicion(2, 0, 100)) == set()
    assert codes(*first, banned(None), unbanned, *judged(2), suspicion(2, 900, 901)) == {"E_LOG_ORDER"}


def test_a_log_that_is_of_no_run_or_of_another() -> None:
    assert found([])[0] == {"E_LOG_ORDER"}
    assert codes(start=(registered(), began())) == {"E_LOG_ORDER"}
    assert codes(start=(registered(), FOUNDED, began())) == {"E_LOG_ORDER"}
    assert codes(FOUNDED) == {"E_LOG_ORDER"}
    assert codes(start=(("founded", {"run_id": "cd" * 16, "name": ""}), registered(), began())) == {"E_LOG_ORDER"}


def test_a_log_of_the_first_release_is_doubtful_and_no_excuse_later() -> None:
    old = [FOUNDED, ("node-registered", {"node_id": NODE}), ("submitted", {"receipt_id": "1", "node_id": NODE})]

    def named(*facts: Fact, entries: int = 3) -> tuple[set[str | None], str | None]:
        report = Report()
        audit_draws(RUN, the_log(*facts, start=(*old, ("log-rebuilt", {"entries": entries}), began())), report)
        return {finding.code for finding in report.findings if not finding.ok}, report.blamed

    assert named() == ({"E_LOG_ENTRY"}, None)
    assert named(submitted(2, rate=0), verdict(1)) == ({"E_LOG_ENTRY"}, None)
    assert named(entries=2)[1] is not None
    assert named(submitted(2), verdict(2, tiers=("T0", "T1")))[1] == "E_DRAW_SKIPPED"
    assert named(submitted(2), ("log-rebuilt", {"entries": 6}))[1] == "E_LOG_ORDER"


SIGNED = [
    *judged(1), *judged(2), suspicion(2, 0, 9), forced(3), changed_profile(),
    ("group-cancelled", {"group": 0, "cause": "stale", "held_by": {}, "dropped_by": {NODE: 1}}),
    submitted(3), verdict(3, "fail"), banned(3), ("unbanned", {"node_id": NODE, "reason": "so"}),
    ("set-aside", {"receipt_id": f"{3:032x}", "code": "E"}), ("review", {"receipt_id": f"{1:032x}"}),
    ("log-rebuilt", {"entries": 0}),
]
STRANGE = st.sampled_from([
    None, True, 7, -1, 2**52, "", "zz", "aa" * 32, "AA" * 32, [], [7], [[]], {}, {"a": {}}, "pass", "T2", 0, "0" * 32,
])


@given(place=st.integers(0, 10**6), name=st.integers(0, 20), value=STRANGE, drop=st.booleans())
def test_no_signed_body_ends_the_audit(place: int, name: int, value: Any, drop: bool) -> None:
    log = the_log(*SIGNED)  # type: ignore[arg-type]
    entry = log[place % len(log)]
    body = dict(entry.body)
    key = sorted(body)[name % len(body)]
    if drop:
        del body[key]
    else:
        body[key] = value
    log[entry.index] = LogEntry(entry.index, entry.at_ms, entry.kind, body)
    names, counts = found(log)
    assert names <= set(CODES)
    assert counts.receipts == counts.drawn + counts.not_drawn + counts.secret


@pytest.mark.parametrize(
    "bent", [{"sha256": "zz"}, {"commitment_sha256": None}, {"rate_ppm": "x"}, {"node_id": 7}, {"epoch": True}]
)
def test_the_command_says_so_in_its_form(tmp_path: Path, bent: dict[str, Any]) -> None:
    log = the_log(submitted(1, **bent))
    peaks = Peaks()
    for entry in log:
        peaks.append(entry.leaf)
    head = LogHead(origin_of(RUN_ID), peaks.size, peaks.root).sign(KEYS["coordinator"])
    log_file.write(tmp_path / "a.log", KEYS["root"].public_key, RUN.sign(KEYS["root"]), head, log)
    result = CliRunner().invoke(app, ["run", str(tmp_path / "a.log"), "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["outcome"], told["code"]) == (1, "fail", "E_LOG_ENTRY")
    assert any("entry 3, submitted" in finding["got"] for finding in told["findings"])
