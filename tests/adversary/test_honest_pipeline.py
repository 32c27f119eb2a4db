"""The honest zoo through the whole pipeline: what befalls an honest node and its verifier in the course of a run."""

from __future__ import annotations

import pytest

from node.leaser import Leaser
from node.uploader import Sealer, Uploader
from protocol.errors import LocalFault, Transient, code
from protocol.weights.layout import State
from tests.adversary import world as world_module
from tests.adversary.honest_zoo import ALL_DRAWN
from tests.adversary.pipeline import NodeAtWork, Pipeline
from tests.adversary.world import EOS, World, to_bits
from tests.fakes.clock import FakeClock

E_TEST_FULL = code("E_TEST_FULL", "a disk that is full in a test")


@pytest.fixture
def pipeline(tmp_path):
    made = Pipeline(World(tmp_path, versions=2, batch={"groups_per_batch": 100}, audit=ALL_DRAWN))
    yield made
    made.close()


def passed(pipeline: Pipeline, node: NodeAtWork) -> int:
    """Everything the node handed in passed with a recomputation; how many bundles."""
    pipeline.verify()
    receipts = pipeline.receipts_of(node)
    for one in receipts:
        verdict = pipeline.verdicts(one.receipt_id)[-1]
        assert (verdict.outcome, verdict.tiers) == ("pass", ["T0", "T1", "T2"])
    row = node.row
    assert (row["state"], row["rejected"], row["dropped"]) == ("active", 0, 0)
    return len(receipts)


def test_checkpoints_rotate_while_a_lease_is_under_way(pipeline):
    node = pipeline.node()
    node.worker(Leaser).work()
    for _ in range(6):
        node.daemon._turn()
    pipeline.show(2)
    node.daemon._parts.weights.poll(pipeline.clock.now_ms())
    for _ in range(node.generate()):
        node.worker(Sealer).work()
        node.worker(Uploader).work()
    assert passed(pipeline, node) == 2
    verdicts = [pipeline.verdicts(one.receipt_id)[-1] for one in pipeline.receipts_of(node)]
    versions = [f.got for verdict in verdicts for f in verdict.findings if f.check.startswith("T0.9")]
    # The second lease was still waiting to start at version 1, so the first stays there; then the second moves on.
    assert versions == ["[1]", "[1, 2]"]


def test_a_node_that_dies_before_it_uploads_delivers_after_its_restart(pipeline):
    node = pipeline.node()
    node.worker(Leaser).work()
    for _ in range(node.generate()):
        node.worker(Sealer).work()
    again = pipeline.node(home=node.daemon._parts.home)
    for _ in range(2):
        again.worker(Uploader).work()
    assert passed(pipeline, again) == 2


def test_a_lost_lease_made_by_another_node_is_the_same_bundle(pipeline):
    lost = pipeline.node("lost")
    lost.worker(Leaser).work()
    for _ in range(lost.generate()):
        lost.worker(Sealer).work()
    spool = lost.daemon._outbox.spool
    kept = {spool.get(lease_id).commitment.object_sha256 for lease_id in spool.ids()}
    pipeline.clock.advance(pipeline.world.run.batch.lease_ms / 1000 + 1)
    other = pipeline.node("other")
    other.turn()
    assert passed(pipeline, other) == 2
    assert kept == set(objects_of(pipeline, other))


def objects_of(pipeline: Pipeline, node: NodeAtWork) -> list[str]:
    from protocol.envelope import Envelope
    from protocol.messages import Commitment

    bodies = [pipeline.client(None).get_object(f"/v1/receipts/{one.receipt_id}") for one in pipeline.receipts_of(node)]
    return [Commitment.from_payload(Envelope.from_dict(body["commitment"]).payload).object_sha256 for body in bodies]


def test_an_answer_that_is_lost_makes_the_same_upload_twice(pipeline):
    node = pipeline.node()
    submit, answers = node.client.submit, []

    def lossy(commitment):
        answers.append(submit(commitment))
        if len(answers) == 1:
            raise Transient("E_UNREACHABLE", "the answer is lost")
        return answers[-1]

    node.client.submit = lossy
    node.worker(Leaser).work()
    for _ in range(node.generate()):
        node.worker(Sealer).work()
    with pytest.raises(Transient):
        node.worker(Uploader).work()
    for _ in range(2):
        node.worker(Uploader).work()
    assert sum(answer.duplicate for answer in answers) == 1
    assert passed(pipeline, node) == 2


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_node_whose_clock_is_minutes_off(pipeline, minutes):
    clock = FakeClock(start_ms=pipeline.clock.now_ms())
    clock.jump(60 * minutes)
    node = pipeline.node(clock=clock)
    assert len(node.turn()) == 2
    assert passed(pipeline, node) == 2


class Shifted:
    """A clock that is off by so many minutes."""

    def __init__(self, clock: FakeClock, minutes: float):
        self._clock, self._ms = clock, int(60_000 * minutes)

    def now_ms(self) -> int:
        return self._clock.now_ms() + self._ms

    def __getattr__(self, name: str) -> object:
        return getattr(self._clock, name)


def rotate(pipeline: Pipeline, node: NodeAtWork) -> None:
    """The node leases and begins, a version comes out, the node takes it up and hands in."""
    node.worker(Leaser).work()
    for _ in range(6):
        node.daemon._turn()
    pipeline.show(pipeline.shown + 1)
    node.daemon._parts.weights.poll(pipeline.clock.now_ms())
    for _ in range(node.generate()):
        node.worker(Sealer).work()
        node.worker(Uploader).work()


@pytest.mark.parametrize("when", ["before the lease", "before the upload"])
def test_a_coordinator_whose_clock_is_set_back(pipeline, when):
    pipeline.clock.advance(1)
    node = pipeline.node()
    if when == "before the lease":
        pipeline.coordinator.clock = Shifted(pipeline.clock, -10)
        rotate(pipeline, node)
    else:
        work = node.worker(Uploader).work

        def later() -> float:
            pipeline.coordinator.clock = Shifted(pipeline.clock, -10)
            return work()

        node.worker(Uploader).work = later
        rotate(pipeline, node)
    assert passed(pipeline, node) == 2


def test_a_learner_whose_clock_is_ahead(tmp_path, monkeypatch):
    world = World(tmp_path, versions=2, batch={"groups_per_batch": 100}, audit=ALL_DRAWN)
    pipeline = Pipeline(world)
    node = pipeline.node()
    publish = world_module.publish
    monkeypatch.setattr(
        world_module, "publish", lambda *args, clock, **words: publish(*args, clock=Shifted(clock, 4.9), **words)
    )
    rotate(pipeline, node)
    assert passed(pipeline, node) == 2
    pipeline.close()


def test_a_verifier_that_is_shown_an_old_head_blames_nobody(pipeline):
    node, old = pipeline.node(), pipeline.verifier._client.head()
    pipeline.verifier._client.head = lambda: old
    rotate(pipeline, node)
    pipeline.verify()
    verdicts = [pipeline.verdicts(one.receipt_id)[-1] for one in pipeline.receipts_of(node)]
    assert [(verdict.outcome, verdict.code) for verdict in verdicts] == [
        ("pass", None), ("inconclusive", "E_VERSION_MISSING"),
    ]
    assert (node.row["state"], node.row["rejected"]) == ("active", 0)


def test_a_verifier_with_a_slow_disk_loses_its_claim_and_hurts_nobody(pipeline):
    node = pipeline.node()
    node.turn()
    fetch, waits = pipeline.verifier._fetch, [700.0, 0.0, 0.0, 0.0]

    def slow(sha256: str) -> bytes:
        pipeline.clock.advance(waits.pop(0) if waits else 0.0)
        return fetch(sha256)

    pipeline.verifier._fetch = slow
    assert passed(pipeline, node) == 2


def test_a_verifier_without_disk_space_blames_nobody(pipeline):
    node = pipeline.node()
    handed = node.turn()

    def full(_: str) -> bytes:
        raise LocalFault(E_TEST_FULL, "no space left")

    pipeline.verifier._fetch = full
    pipeline.verify()
    assert {pipeline.verdicts(one.receipt_id)[-1].outcome for one in handed} == {"inconclusive"}
    row = node.row
    assert (row["state"], row["rejected"], row["forfeited"], row["suspicion_milli"]) == ("active", 0, 0, 0)
    assert row["inconclusive"] == 8


class LongWorld(World):
    """A model that hardly ever ends by itself: the end's embedding is zero and everything else is louder."""

    def _next_state(self) -> State:
        state = super()._next_state()
        state["model.embed_tokens.weight"][EOS] = 0
        state["model.norm.weight"] = to_bits(3 * (state["model.norm.weight"] != 0))
        return state


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_eight_thousand_tokens(tmp_path):
    batch = {"groups_per_batch": 4, "samples_per_lease": 1, "group_size": 2}
    world = LongWorld(tmp_path, versions=2, positions=8_400, max_new_tokens=8_192, batch=batch, audit=ALL_DRAWN)
    pipeline = Pipeline(world)
    node = pipeline.node()
    handed = node.turn()
    assert passed(pipeline, node) == len(handed) >= 2
    assert max(one.tokens for one in handed) == 8_192
    pipeline.close()
