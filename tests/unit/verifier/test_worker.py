"""The daemon against a coordinator in memory: claims, verdicts, faults of the carrier, draining."""

from __future__ import annotations

from collections import deque

import pytest

from protocol.api import Ack, AuditJob
from protocol.errors import E_NOT_FOUND, E_UNREACHABLE, LocalFault, PeerFault, Transient
from protocol.identity import Identity
from protocol.messages import Verdict
from protocol.weights.chain import sign_head
from tests.adversary.world import LEARNER, ROOT, RUN_ID, VERIFIER, World, identity
from tests.fakes.clock import FakeClock
from tests.fakes.web import Mirror, serving
from verifier.checkpoints import CheckpointBook
from verifier.config import VerifierConfig
from verifier.session import Session
from verifier.worker import Worker, start


class Coordinator:
    """What a worker asks of ``CoordinatorClient``."""

    def __init__(self, world: World):
        self.world = world
        self.jobs: deque[AuditJob] = deque()
        self.verdicts: list[Verdict] = []
        self.broken: Exception | None = None

    def run_manifest(self):
        return self.world.run_envelope

    def fetch(self, sha256):
        return self.world.store.get(sha256)

    def head(self):
        manifest, envelope = self.world.checkpoints[-1]
        return sign_head(LEARNER, envelope, run_id=RUN_ID, version=manifest.version, clock=self.world.clock)

    def checkpoints(self, first, last):
        return [envelope for _, envelope in self.world.checkpoints[first : min(last, first + 1) + 1]]

    def claim_audit(self, claim):
        if self.broken is not None:
            raise self.broken
        return self.jobs.popleft() if self.jobs else None

    def verdict(self, verdict):
        self.verdicts.append(Verdict.from_payload(verdict.sign(VERIFIER).payload))
        return Ack()

    def submit(self, submission):
        self.world.store.put(submission.bundle)
        self.jobs.append(AuditJob(
            receipt=submission.receipt, commitment=submission.commitment, lease=submission.lease,
            drawn=submission.drawn, node_profile="torch-cpu-fp32", node_public_key=submission.node_public_key.hex(),
        ))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=8)


@pytest.fixture
def coordinator(world):
    return Coordinator(world)


@pytest.fixture
def worker(world, coordinator):
    session = Session(world.run, CheckpointBook(world.run), world.rewards, world.shelf)
    return Worker(coordinator, VERIFIER, session, world.store.get, clock=FakeClock())


def test_a_pass_carries_rewards_in_the_order_of_the_lease(world, coordinator, worker):
    lease = world.lease(samples=(3, 1))
    coordinator.submit(world.submission(lease, world.generate(lease)))
    # The worker's book is empty at first: it learns of all versions, a page at a time.
    world.session.book.add([])
    assert worker.step() is True
    verdict = coordinator.verdicts[0]
    assert (verdict.outcome, verdict.code, verdict.samples) == ("pass", None, [3, 1])
    assert len(verdict.rewards_micro) == 2
    assert verdict.tiers == ["T0", "T1"] or verdict.tiers == ["T0", "T1", "T2"]
    assert verdict.verifier_id == VERIFIER.id


def test_a_failure_names_code_and_place(world, coordinator, worker):
    lease = world.lease()
    bundle = world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples})
    coordinator.submit(world.submission(lease, bundle, drawn=False))
    worker.step()
    verdict = coordinator.verdicts[0]
    assert (verdict.outcome, verdict.code) == ("fail", "E_REPLAY")
    assert (verdict.samples, verdict.rewards_micro) == ([], [])
    assert next(f for f in verdict.findings if not f.ok).position is not None


def test_no_job(worker):
    assert worker.step() is False


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LocalFault(E_NOT_FOUND, "gone"), "E_NOT_FOUND"),
        (Transient(E_UNREACHABLE, "no answer"), "E_UNREACHABLE"),
    ],
)
def test_a_bundle_that_cannot_be_had_is_inconclusive(world, coordinator, error, code):
    def fetch(_):
        raise error

    session = Session(world.run, CheckpointBook(world.run), world.rewards, world.shelf)
    lease = world.lease()
    coordinator.submit(world.submission(lease, world.honest(lease)))
    Worker(coordinator, VERIFIER, session, fetch, clock=FakeClock()).step()
    assert (coordinator.verdicts[0].outcome, coordinator.verdicts[0].code) == ("inconclusive", code)


def test_a_head_of_another_learner_is_inconclusive(world, coordinator, worker, monkeypatch):
    manifest, envelope = world.checkpoints[-1]
    forged = sign_head(identity("x"), envelope, run_id=RUN_ID, version=manifest.version, clock=world.clock)
    monkeypatch.setattr(coordinator, "head", lambda: forged)
    lease = world.lease()
    coordinator.submit(world.submission(lease, world.honest(lease)))
    worker.step()
    assert (coordinator.verdicts[0].outcome, coordinator.verdicts[0].code) == ("inconclusive", "E_SIGNATURE")


def test_it_finishes_the_job_in_hand_and_stops(world, coordinator, worker):
    lease = world.lease()
    for _ in range(3):
        coordinator.submit(world.submission(lease, world.honest(lease), drawn=False))
    worker.run(lambda: len(coordinator.verdicts) == 2)
    assert len(coordinator.verdicts) == 2
    assert len(coordinator.jobs) == 1


def test_it_waits_out_an_unreachable_coordinator(world, coordinator):
    coordinator.broken = Transient(E_UNREACHABLE, "no answer")
    clock = FakeClock()

    def mend(_: float) -> None:
        if clock.monotonic() > 60:
            coordinator.broken = None

    clock = FakeClock(on_sleep=mend)
    session = Session(world.run, CheckpointBook(world.run), world.rewards, world.shelf)
    lease = world.lease()
    coordinator.submit(world.submission(lease, world.honest(lease), drawn=False))
    Worker(coordinator, VERIFIER, session, world.store.get, clock=clock).run(lambda: bool(coordinator.verdicts))
    assert coordinator.verdicts[0].outcome == "pass"
    assert 60 < clock.monotonic() < 120


# -- starting -----------------------------------------------------------------------------------------------


def _config(tmp_path, root: Identity = ROOT, **fields) -> VerifierConfig:
    known = {"coordinator": "http://unused", "root": root.public_key.hex()}
    known |= {"key": tmp_path / "key", "work": tmp_path / "work"}
    return VerifierConfig(**(known | fields))


@pytest.mark.parametrize("direct", [False, True])
def test_from_a_root_key_to_a_verdict(world, coordinator, tmp_path, direct):
    objects = {path.name: path.read_bytes() for path in world.store.path.rglob("*") if path.is_file()}
    with serving(Mirror({} if direct else objects)) as mirror:
        config = _config(tmp_path, store=f"dir:{world.store.path}" if direct else None, coordinator=mirror.url)
        with start(config, coordinator, VERIFIER, world.clock) as worker:
            assert sorted(path.name for path in (tmp_path / "work/model").iterdir()) == sorted(world.run.model.files)
            lease = world.lease()
            coordinator.submit(world.submission(lease, world.honest(lease)))
            worker.step()
    assert coordinator.verdicts[0].outcome == "pass"
    assert coordinator.verdicts[0].tiers == ["T0", "T1", "T2"]


def test_a_damaged_model_file_is_fetched_again(world, coordinator, tmp_path):
    start(_config(tmp_path), coordinator, VERIFIER, world.clock)
    config = tmp_path / "work/model/config.json"
    good = config.read_bytes()
    config.write_bytes(b"{}")
    start(_config(tmp_path), coordinator, VERIFIER, world.clock)
    assert config.read_bytes() == good


def test_a_key_the_run_does_not_name(world, coordinator, tmp_path):
    with pytest.raises(LocalFault, match="E_WRONG_KEY"):
        start(_config(tmp_path), coordinator, identity("somebody"), world.clock)


def test_a_run_of_another_root(world, coordinator, tmp_path):
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        start(_config(tmp_path, identity("other root")), coordinator, VERIFIER, world.clock)


def test_a_run_past_its_expiry(world, coordinator, tmp_path):
    with pytest.raises(PeerFault, match="E_EXPIRED"):
        start(_config(tmp_path), coordinator, VERIFIER, FakeClock(start_ms=world.run.expires_at_ms + 1))
