"""The daemon with a coordinator in this process: work, weights, draining, refusals, recovery."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.engine import Finished, Request
from node.health import Outcome
from protocol.api import LeaseReply
from protocol.bundle import bundle_root, decode
from protocol.errors import LocalFault
from protocol.identity import Identity
from protocol.messages import LeaseRequest
from protocol.rollout import rollout_seed
from protocol.sampler import replay
from tests.fakes.waiting import beside, until
from tests.unit.node.office import (
    COORDINATOR,
    NODE,
    RUN_ID,
    FakeCoordinator,
    banned,
    make_daemon,
    run_manifest,
    state_of,
    unreachable,
)

STRANGER = Identity(b"\7" * 32)


@pytest.fixture
def office() -> FakeCoordinator:
    office = FakeCoordinator()
    office.publish(state_of(0))
    return office


def status(path: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads((path / "status.json").read_bytes())
    return value


def test_a_run_from_the_first_lease_to_the_last_version(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(*(office.lease_of(i) for i in range(12)))
    office.complete_after = 12

    publishing = threading.Lock()  # leases are handed in side by side

    def publish_now_and_then() -> None:
        with publishing:
            due = sum(len(office.commitments) >= count for count in (3, 6, 12))
            while len(office.manifests) <= due:
                office.publish(state_of(len(office.manifests)))

    office.on_submit = publish_now_and_then
    daemon, engine = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    assert sorted(office.commitments) == sorted(office.given)
    assert not office.returned
    for lease_id, (commitment,) in office.commitments.items():
        lease = office.given[lease_id]
        bundle = decode(office.store.get(commitment.object_sha256), office.run.sampling)
        digest = hashlib.sha256(lease.to_payload()).hexdigest()
        assert commitment.lease_sha256 == digest
        assert commitment.bundle_root == bundle_root(bundle, digest)
        assert [rollout.sample for rollout in bundle.rollouts] == lease.samples
        for rollout in bundle.rollouts:
            seed = rollout_seed(RUN_ID, lease.beacon, lease.prompt_sha256, lease.group, rollout.sample)
            assert replay(rollout, seed, office.run.sampling) is None
    last = office.manifest(3)
    state = json.loads((tmp_path / "state.json").read_bytes())
    assert (state["version"], state["state_root"]) == (3, last.state_root)
    found = status(tmp_path)
    assert found["state"] == "stopped"
    assert found["why"] == "run complete"
    assert found["accepted"] == 3
    assert found["tokens"] == engine.tokens
    assert len((tmp_path / "receipts.jsonl").read_text().splitlines()) == 12


def test_draining_finishes_what_is_begun_and_hands_the_rest_back(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(*(office.lease_of(i) for i in range(40)))
    daemon, engine = make_daemon(tmp_path, office, prefetch=2.0)
    step = engine.step

    def begin_and_wait() -> list[Finished]:
        """Once something is begun nothing moves until the node drains."""
        finished = step()
        engine.stuck = engine.tokens > 0 and not daemon.health.draining.is_set()
        return finished

    def drain_when_full() -> None:
        until(lambda: engine.stuck and daemon._workload.open_samples >= 8)
        daemon.drain()

    engine.step = begin_and_wait  # type: ignore[method-assign]
    beside(drain_when_full)
    assert daemon.run() is Outcome.DONE
    assert office.commitments
    assert office.commitments.keys() | office.returned.keys() == office.given.keys()
    assert not office.commitments.keys() & office.returned.keys()
    assert set(office.returned.values()) == {"node ends"}


def test_draining_gives_up_at_its_deadline(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(office.lease_of(0))
    daemon, engine = make_daemon(tmp_path, office, drain_timeout_s=0.2)
    taken = engine.submit

    def take_and_hang(requests: Sequence[Request]) -> None:
        taken(requests)
        engine.step()
        engine.stuck = True
        daemon.drain()

    engine.submit = take_and_hang  # type: ignore[method-assign]
    assert daemon.run() is Outcome.DONE
    assert office.returned == {office.lease_of(0).lease_id: "node ends"}


def test_leases_that_arrive_while_it_ends_go_back_too(tmp_path: Path, office: FakeCoordinator) -> None:
    """The answer is still on its way when the node has nothing left to do."""
    office.offer(office.lease_of(0))
    daemon, _ = make_daemon(tmp_path, office)
    asked = office.lease

    def answer_late(request: LeaseRequest) -> LeaseReply:
        reply = asked(request)
        if reply.leases:
            daemon.drain()
            assert daemon.health.stopping.wait(20)
        return reply

    office.lease = answer_late  # type: ignore[method-assign]
    assert daemon.run() is Outcome.DONE
    assert office.returned == {office.lease_of(0).lease_id: "node ends"}


def test_told_twice_it_ends_at_once_and_keeps_finished_work(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(*(office.lease_of(i) for i in range(4)))
    office.fail("upload", *(unreachable() for _ in range(100)))
    daemon, _ = make_daemon(tmp_path, office)

    def stop_when_spooled() -> None:
        until(lambda: any(tmp_path.glob("spool/0*")))
        daemon.drain()
        daemon.abort()

    beside(stop_when_spooled)
    assert daemon.run() is Outcome.FAULT
    assert all(worker.join(60) for worker in daemon.workers)  # it does not wait for them, and one may still be spooling
    kept = {path.name for path in tmp_path.glob("spool/0*")}
    assert kept
    assert not office.commitments
    before = {name: (tmp_path / "spool" / name / "commitment.json").read_bytes() for name in kept}
    office.trouble.clear()
    office.complete_after = len(kept)
    again, _ = make_daemon(tmp_path, office)
    assert again.run() is Outcome.DONE
    for name, payload in before.items():
        assert office.commitments[name][0].to_payload() == payload
    assert not list(tmp_path.glob("spool/0*"))


def test_a_submission_that_timed_out_is_repeated_word_for_word(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(office.lease_of(0))
    office.complete_after = 1
    answered = []

    def lose_the_answer() -> None:
        answered.append(1)
        if len(answered) < 3:
            raise unreachable()

    office.on_submit = lose_the_answer
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    (commitments,) = office.commitments.values()
    assert len(commitments) == 3
    assert len({commitment.to_payload() for commitment in commitments}) == 1


def test_a_lost_lease_request_is_asked_again_with_its_nonce(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(office.lease_of(0))
    office.fail("lease", unreachable(), unreachable())
    office.complete_after = 1
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    assert len({request.nonce for request in office.lease_requests[:3]}) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"key": STRANGER}, "E_SIGNATURE"),
        ({"run_id": "00" * 16}, "E_WRONG_RUN"),
        ({"node_id": STRANGER.id}, "E_LEASE_NODE"),
        ({"environment": "poems"}, "E_LEASE_ENVIRONMENT"),
        ({"samples": [1, 1]}, "E_LEASE_SAMPLES"),
        ({"samples": [3, 4]}, "E_LEASE_SAMPLES"),
        ({"prompt_sha256": "0" * 64}, "E_LEASE_PROMPT"),
        ({"prompt_tokens": [3, 48]}, "E_LEASE_PROMPT"),
        ({"beacon": "0" * 64}, "E_LEASE_BEACON"),
        ({"start_version": 9}, "E_LEASE_VERSION"),
        ({"start_version": 0}, "E_LEASE_VERSION"),
        ({"deadline_ms": 1}, "E_EXPIRED"),
    ],
    ids=["key", "run", "node", "environment", "twice", "group", "hash", "token", "beacon", "future", "stale", "late"],
)
def test_leases_it_must_not_obey_are_refused_by_name(
    tmp_path: Path, office: FakeCoordinator, change: dict[str, object], code: str
) -> None:
    for version in range(1, 4):
        office.publish(state_of(version))
    changes = dict(change)
    key = changes.pop("key", COORDINATOR)
    assert isinstance(key, Identity)
    office.offer(office.lease_of(0, **changes), key=key)
    office.offer(office.lease_of(1))
    office.complete_after = 1
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    assert list(office.commitments) == [f"{1:032x}"]
    assert daemon.health.snapshot()["refusals"] == {code: 1}
    ours = code not in {"E_SIGNATURE", "E_WRONG_RUN"}
    assert office.returned == ({f"{0:032x}": code} if ours else {})


def test_a_lease_the_engine_cannot_obey_goes_back(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(office.lease_of(0), office.lease_of(1))
    office.complete_after = 1
    daemon, engine = make_daemon(tmp_path, office)

    def check(request: Request) -> None:
        if request.key.startswith(f"{0:032x}"):
            raise LocalFault("E_ENGINE_REQUEST", "too long")

    engine.check = check  # type: ignore[method-assign]
    assert daemon.run() is Outcome.DONE
    assert office.returned == {f"{0:032x}": "E_ENGINE_REQUEST"}


def test_a_lease_of_a_newer_version_makes_it_catch_up_first(tmp_path: Path, office: FakeCoordinator) -> None:
    daemon, _ = make_daemon(tmp_path, office)
    daemon._watcher.work()
    office.publish(state_of(1))
    daemon._leaser._consider(office.lease_of(0).sign(COORDINATOR))
    assert [unit.lease.start_version for unit in daemon._workload.units()] == [1]


def test_work_that_would_come_too_late_goes_back_unless_it_is_begun(tmp_path: Path, office: FakeCoordinator) -> None:
    soon = {"deadline_ms": office.clock.now_ms() + 1, "issued_at_ms": office.clock.now_ms()}
    daemon, engine = make_daemon(tmp_path, office, slots=2)
    daemon._watcher.work()
    for number in range(3):
        daemon._leaser._consider(office.lease_of(number, **soon).sign(COORDINATOR))
    for unit in daemon._workload.take_incoming():
        daemon._begin(unit)
    engine.step()
    threading.Event().wait(0.01)
    daemon._give_up_late()
    assert daemon._workload.take_returns() == {f"{number:032x}": "too late" for number in (1, 2)}
    assert {key.partition("/")[0] for key in engine._open} == {f"{0:032x}"}


def test_a_clock_that_is_off_by_minutes_does_no_harm(tmp_path: Path, office: FakeCoordinator) -> None:
    then = office.clock.now_ms() - 300_000
    office.offer(office.lease_of(0, issued_at_ms=then, deadline_ms=then + 60_000))
    office.complete_after = 1
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    assert len(office.commitments) == 1


def test_no_work_is_taken_while_the_head_is_frozen(tmp_path: Path, office: FakeCoordinator) -> None:
    daemon, _ = make_daemon(tmp_path, office)
    daemon._watcher.work()
    assert daemon._leaser._obstacle() is None
    assert daemon._parts.weights.frozen(office.clock.now_ms() + 3_600_000)


def test_a_banned_node_says_so(tmp_path: Path, office: FakeCoordinator) -> None:
    office.fail("lease", banned())
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.REFUSED
    assert "banned" in str(status(tmp_path)["why"])


def test_a_ban_found_in_the_record_ends_it_too(tmp_path: Path, office: FakeCoordinator) -> None:
    office.record = {"state": "banned", "ban_code": "E_REPLAY", "ban_reason": "another token"}
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.REFUSED
    assert "E_REPLAY" in str(status(tmp_path)["why"])


def test_a_broken_engine_hands_everything_back(tmp_path: Path, office: FakeCoordinator) -> None:
    office.offer(office.lease_of(0))
    daemon, engine = make_daemon(tmp_path, office)
    engine.fails = LocalFault("E_ENGINE", "out of memory")
    assert daemon.run() is Outcome.FAULT


def test_it_says_why_it_is_idle(tmp_path: Path) -> None:
    office = FakeCoordinator()
    daemon, _ = make_daemon(tmp_path, office)
    thread = beside(daemon.run)
    until(lambda: "no weights yet" in told(tmp_path))
    office.publish(state_of(0))
    until(lambda: "nothing to do" in told(tmp_path))
    daemon._parts.home.pause(paused=True)
    until(lambda: "paused by its owner" in told(tmp_path))
    office.fail("head", *(unreachable() for _ in range(50)))
    until(lambda: "E_UNREACHABLE" in told(tmp_path))
    daemon.drain()
    thread.join(60)
    assert not thread.is_alive()
    assert not office.given


def told(home: Path) -> str:
    """Why it is idle, as its status says; nothing before the first."""
    return str(status(home)["why"]) if (home / "status.json").exists() else ""


def test_the_last_report_asks_once_more(tmp_path: Path, office: FakeCoordinator) -> None:
    daemon, _ = make_daemon(tmp_path, office, contact_s=3600)
    thread = beside(daemon.run)
    until(lambda: "nothing to do" in told(tmp_path) and status(tmp_path)["accepted"] == 3)  # it has asked once
    office.record = office.record | {"accepted": 9}
    daemon.drain()
    thread.join(60)
    assert not thread.is_alive()
    assert status(tmp_path)["accepted"] == 9


def test_a_bug_in_a_thread_ends_the_daemon(tmp_path: Path, office: FakeCoordinator) -> None:
    daemon, _ = make_daemon(tmp_path, office)
    office.leases = None  # type: ignore[assignment]
    assert daemon.run() is Outcome.FAULT


@pytest.mark.parametrize("code", ["E_OBJECT_MISSING", "E_COMMITMENT_CHECKPOINT"])
def test_work_is_handed_in_again_when_that_may_help(tmp_path: Path, office: FakeCoordinator, code: str) -> None:
    """An upload was given up on its way; a coordinator was restored and is not told all versions yet."""
    from protocol.errors import PeerFault

    office.offer(office.lease_of(0), office.lease_of(1))
    office.fail("submit", PeerFault(code, "not there"))
    office.complete_after = 2
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    assert daemon.health.snapshot()["refusals"] == {}
    assert len((tmp_path / "receipts.jsonl").read_text().splitlines()) == 2
    assert not list(tmp_path.glob("spool/*"))


def test_work_the_coordinator_will_not_take_is_dropped_and_counted(tmp_path: Path, office: FakeCoordinator) -> None:
    from protocol.errors import PeerFault

    office.offer(office.lease_of(0), office.lease_of(1))
    office.fail("submit", PeerFault("E_LEASE_EXPIRED", "too late"))
    office.complete_after = 1
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    assert daemon.health.snapshot()["refusals"] == {"E_LEASE_EXPIRED": 1}
    assert not list(tmp_path.glob("spool/*"))


def test_weights_are_taken_up_again_after_a_restart(tmp_path: Path, office: FakeCoordinator) -> None:
    office.publish(state_of(1))
    office.complete_after = 0
    daemon, _ = make_daemon(tmp_path, office)
    assert daemon.run() is Outcome.DONE
    office.fail("fetch", *(unreachable() for _ in range(5)))
    again, _ = make_daemon(tmp_path, office)
    assert again._parts.weights.newest() == 1


def test_a_signal_may_come_in_anywhere(tmp_path: Path, office: FakeCoordinator) -> None:
    """A handler runs on the main thread, which may hold the very lock that the handler takes."""
    daemon, _ = make_daemon(tmp_path, office)
    with daemon.health._lock, daemon._workload._lock:
        daemon.status()
        daemon.drain()
        daemon.abort()
    assert daemon.health.ending is not None
    assert daemon.health.ending[0] is Outcome.FAULT


def test_two_daemons_do_not_share_a_home(tmp_path: Path, office: FakeCoordinator) -> None:
    daemon, _ = make_daemon(tmp_path, office)
    home = daemon._parts.home
    with home.locked(), pytest.raises(LocalFault) as caught, home.locked():
        pass
    assert caught.value.code == "E_HOME"


def test_the_run_it_checks_against_is_the_pinned_one(tmp_path: Path, office: FakeCoordinator) -> None:
    home = make_daemon(tmp_path, office)[0]._parts.home
    forged = run_manifest(name="another").sign(STRANGER)
    (tmp_path / "manifest.json").write_bytes(forged.to_bytes())
    with pytest.raises(Exception, match="E_SIGNATURE"):
        home.manifest()
    assert home.identity().id == NODE.id
