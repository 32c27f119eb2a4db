from __future__ import annotations

from typing import Any

import pytest

from coordinator import checkpoints
from protocol.errors import LocalFault, PeerFault
from protocol.messages import CheckpointHead, UpdateReceipt
from tests.fakes.coordinator import RUN_ID, World, sha
from tests.unit.coordinator.conftest import MakeWorld


def test_versions_are_published_and_read_back(make_world: MakeWorld) -> None:
    world = make_world()
    client = world.learner.client
    with pytest.raises(LocalFault) as caught:
        client.head()
    assert caught.value.code == "E_NOT_FOUND"
    world.publish()
    world.publish()
    head = CheckpointHead.open(client.head(), world.keys["learner"].public_key, run_id=RUN_ID)
    assert (head.version, head.manifest_sha256) == (1, client.checkpoint(1).digest)
    assert [e.digest for e in client.checkpoints(0, 9)] == [e.digest for e in world.learner.manifests]
    assert [e.digest for e in client.checkpoints(1, 1)] == [world.learner.manifests[1].digest]


def test_a_page_of_manifests_is_no_longer_than_can_be_held(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        world.publish()
    sizes = [len(envelope.to_bytes()) for envelope in world.learner.manifests]
    monkeypatch.setattr(checkpoints, "MAX_PAGE_BYTES", sum(sizes[2:]))
    client = world.learner.client
    assert [len(client.checkpoints(first, 9)) for first in range(5)] == [2, 2, 2, 1, 0]
    monkeypatch.setattr(checkpoints, "MAX_PAGE_BYTES", 1)
    assert [len(client.checkpoints(first, 9)) for first in range(4)] == [1, 1, 1, 1]


def test_publishing_again_is_harmless(world: World) -> None:
    envelope = world.learner.manifests[0]
    assert world.learner.client.publish_checkpoint(envelope).duplicate is True
    assert world.learner.client.publish_head(world.learner.head().sign(world.learner.key)).duplicate is True


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3}, {"parent_sha256": sha("x")}, {"parent_sha256": None}, {"layout_sha256": sha("x")},
        {"base_root": sha("x")}, {"state_hash": "blake3"}, {"diff": [], "anchor": []},
    ],
)
def test_a_checkpoint_that_does_not_follow_is_refused(world: World, change: dict[str, Any]) -> None:
    manifest = world.learner.manifest(world.store, **change)
    with pytest.raises(PeerFault) as caught:
        world.learner.client.publish_checkpoint(manifest.sign(world.learner.key))
    assert caught.value.code == "E_CHECKPOINT_CHAIN"


def test_another_manifest_of_a_published_version_is_refused(world: World) -> None:
    world.learner.manifests.clear()
    with pytest.raises(PeerFault) as caught:
        world.learner.client.publish_checkpoint(
            world.learner.manifest(world.store, beacon=sha("another")).sign(world.learner.key)
        )
    assert caught.value.code == "E_CHECKPOINT_CHAIN"


def test_chunks_must_be_in_the_store(world: World) -> None:
    with pytest.raises(PeerFault) as caught:
        world.learner.client.publish_checkpoint(world.learner.manifest().sign(world.learner.key))
    assert caught.value.code == "E_OBJECT_MISSING"


def test_only_the_learner_publishes(world: World) -> None:
    for key in (world.keys["coordinator"], world.keys["verifier"]):
        with pytest.raises(PeerFault) as caught:
            world.learner.client.publish_checkpoint(world.learner.manifest(world.store).sign(key))
        assert caught.value.code == "E_WRONG_KEY"
        with pytest.raises(PeerFault) as caught:
            world.learner.client.publish_head(world.learner.head().sign(key))
        assert caught.value.code == "E_WRONG_KEY"


def test_a_head_never_goes_back_nor_ahead_nor_lies(world: World) -> None:
    world.publish()
    first = world.learner.manifests[0]
    for change, code in (
        ({"version": 0, "manifest_sha256": first.digest}, "E_CHECKPOINT_CHAIN"),
        ({"version": 2}, "E_CHECKPOINT_CHAIN"),
        ({"manifest_sha256": first.digest}, "E_CHECKPOINT_CHAIN"),
        ({"expires_at_ms": 1}, "E_EXPIRED"),
    ):
        with pytest.raises(PeerFault) as caught:
            world.learner.client.publish_head(world.learner.head(**change).sign(world.learner.key))
        assert caught.value.code == code


def ready(world: World) -> None:
    world.node().join().work(4)
    world.verifier.pass_all()


def test_a_batch_consumes_its_groups_and_pays_for_them(world: World) -> None:
    ready(world)
    plan = world.learner.plan()
    assert world.learner.client.post_batch(plan).duplicate is False
    assert world.learner.client.post_batch(plan).duplicate is True
    assert world.learner.client.admitted(9) == []
    row = world.node_row(world.node())
    assert (row["credit"], row["credit_pending"]) == (40, 0)
    batch = world.learner.client.batch(1)
    assert [g.group for g in batch.groups] == [0, 1]
    assert (batch.plan.digest, batch.update) == (plan.sign(world.learner.key).digest, None)
    status = world.http.get("/v1/status").json()
    assert (status["reward_mean"], status["lag_histogram"], status["tokens_trained"]) == ([0.5], {"0": 8}, 40)


def test_lag_is_counted_from_the_start_version(world: World) -> None:
    ready(world)
    world.publish()
    world.learner.client.post_batch(world.learner.plan())
    assert world.http.get("/v1/status").json()["lag_histogram"] == {"1": 8}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": 2}, "E_BATCH"),
        ({"parent_version": 1, "version": 2}, "E_BATCH"),
        ({"groups": []}, "E_BATCH"),
        ({"groups": [{"group": 7, "receipts": []}]}, "E_BATCH"),
        ({"groups": [{"group": 0, "receipts": []}]}, "E_BATCH"),
        ({"groups": [{"group": 0, "receipts": [sha("x")]}]}, "E_BATCH"),
        ({"run_id": "cd" * 16}, "E_WRONG_RUN"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_whole(world: World, change: dict[str, Any], code: str) -> None:
    ready(world)
    plan = world.learner.plan(**change)
    world.learner.client.run_id = None
    with pytest.raises(PeerFault) as caught:
        world.learner.client.post_batch(plan)
    assert caught.value.code == code
    world.learner.client.run_id = RUN_ID
    assert len(world.learner.client.admitted(9)) == 2
    assert world.node_row(world.node())["credit_pending"] == 40


def test_a_second_batch_of_one_version_is_refused(world: World) -> None:
    ready(world)
    plan = world.learner.plan()
    world.learner.client.post_batch(plan)
    with pytest.raises(PeerFault) as caught:
        world.learner.client.post_batch(plan.model_copy(update={"config_sha256": sha("other")}))
    assert caught.value.code == "E_CONFLICT"


def test_an_update_receipt_names_its_batch_and_its_checkpoint(world: World) -> None:
    ready(world)
    plan = world.learner.plan()
    world.learner.client.post_batch(plan)

    def receipt(**changes: Any) -> UpdateReceipt:
        fields = {
            "run_id": RUN_ID, "version": 1, "parent_version": 0, "batch_sha256": plan.sign(world.learner.key).digest,
            "manifest_sha256": world.learner.manifests[-1].digest, "config_sha256": sha("config"),
            "metrics_micro": {"kl": 1500}, "issued_at_ms": 1,
        }
        return UpdateReceipt.model_validate(fields | changes)

    with pytest.raises(PeerFault) as caught:
        world.learner.client.post_update(receipt())  # its checkpoint is not published yet
    assert caught.value.code == "E_BATCH"
    world.publish()
    with pytest.raises(PeerFault) as caught:
        world.learner.client.post_update(receipt(batch_sha256=sha("x")))
    assert caught.value.code == "E_BATCH"
    assert world.learner.client.post_update(receipt()).duplicate is False
    assert world.learner.client.post_update(receipt()).duplicate is True
    assert world.learner.client.batch(1).update is not None
    assert world.http.get("/v1/status").json()["batches"][0]["metrics"] == {"kl": 0.0015}


def test_versions_under_check_and_within_the_staleness_bound_are_needed(world: World) -> None:
    """``world`` has version 0; its staleness bound is one version."""

    def needed() -> int:
        return int(world.learner.client.status()["oldest_version_needed"])

    world.node().join().work(1)
    for _ in range(3):
        world.publish()
    assert needed() == 0  # the submission still waits for its check
    world.verifier.pass_all()
    assert needed() == 2
