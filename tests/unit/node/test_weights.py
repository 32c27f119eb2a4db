"""The node's copy of the weights: follows, refuses, steps back, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.weights import Weights, fetch_model
from protocol.clock import SystemClock
from protocol.errors import LocalFault, PeerFault
from protocol.messages import CheckpointManifest, ModelSpec
from protocol.weights.chain import sign_head
from tests.unit.node.office import LEARNER, RUN_ID, FakeCoordinator, pool_of, run_manifest, state_of


def follow(office: FakeCoordinator, path: Path, seen: list[CheckpointManifest] | None = None) -> Weights:
    client: Any = office
    on_version = None if seen is None else seen.append
    return Weights(client, pool_of(office, path), office.run, office.layout, path, on_version=on_version)


@pytest.fixture
def office() -> FakeCoordinator:
    office = FakeCoordinator()
    for version in range(3):
        office.publish(state_of(version))
    return office


def now() -> int:
    return SystemClock().now_ms()


def test_it_follows_and_tells(tmp_path: Path, office: FakeCoordinator) -> None:
    seen: list[CheckpointManifest] = []
    weights = follow(office, tmp_path, seen)
    assert (weights.newest(), weights.announced, weights.has(0)) == (-1, -1, False)
    assert weights.poll(now())
    assert not weights.poll(now())
    office.publish(state_of(3))
    assert weights.poll(now())
    assert [manifest.version for manifest in seen] == [2, 3]
    assert (weights.newest(), weights.announced) == (3, 3)
    with weights.state(3) as state:
        assert (state["w"] == state_of(3)["w"]).all()


def test_a_long_download_says_how_far_it_is(
    tmp_path: Path, office: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("node.weights.AHEAD_CHUNKS", 1)
    with caplog.at_level("INFO"):
        assert follow(office, tmp_path).poll(now())
    told = [record.__dict__ for record in caplog.records if record.getMessage() == "fetching weights"]
    assert len(told) == 3  # an anchor and two diffs
    assert [line["bytes"] for line in told] == sorted({line["bytes"] for line in told})
    assert told[-1]["bytes"] == told[-1]["total"]


def test_older_versions_are_at_hand(tmp_path: Path, office: FakeCoordinator) -> None:
    weights = follow(office, tmp_path)
    weights.poll(now())
    office.publish(state_of(3))
    weights.poll(now())
    for version in (2, 0, 3, 1):
        weights.prepare(version)
        with weights.state(version) as state:
            assert (state["w"] == state_of(version)["w"]).all()
    assert weights.has(0)
    assert not weights.has(4)
    with pytest.raises(LocalFault), weights.state(4):
        pass


def test_a_rollback_is_refused_and_changes_nothing(tmp_path: Path, office: FakeCoordinator) -> None:
    weights = follow(office, tmp_path)
    weights.poll(now())
    office.manifests.pop()
    with pytest.raises(PeerFault) as caught:
        weights.poll(now())
    assert caught.value.code == "E_CHECKPOINT_ROLLBACK"
    assert weights.newest() == 2


def test_a_frozen_head_is_refused(tmp_path: Path, office: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = follow(office, tmp_path)
    old = sign_head(LEARNER, office.manifests[2], run_id=RUN_ID, version=2, clock=SystemClock(), ttl_ms=1)
    monkeypatch.setattr(office, "head", lambda: old)
    with pytest.raises(PeerFault) as caught:
        weights.poll(now() + 1000)
    assert caught.value.code == "E_EXPIRED"


def test_damaged_chunks_are_refused(tmp_path: Path, office: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = follow(office, tmp_path)
    weights.poll(now())
    office.publish(state_of(30))  # a diff that is not in the cache yet
    fetch = office.fetch
    monkeypatch.setattr(office, "fetch", lambda sha256: fetch(sha256)[:-1] + b"\0")
    with pytest.raises(PeerFault) as caught:
        weights.poll(now())
    assert caught.value.code == "E_OBJECT_HASH"
    assert weights.newest() == 2
    monkeypatch.undo()
    assert weights.poll(now())


def test_another_versions_manifest_is_refused(
    tmp_path: Path, office: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = follow(office, tmp_path)
    weights.poll(now())
    assert weights.manifest_of(0).version == 0
    monkeypatch.setattr(office, "checkpoint", lambda version: office.manifests[0])
    fresh = follow(office, tmp_path)
    with pytest.raises(PeerFault) as caught:
        fresh.manifest_of(1)
    assert caught.value.code == "E_CHECKPOINT_MIX"


def test_the_manifest_of_weights_is_named_also_after_a_restart(tmp_path: Path, office: FakeCoordinator) -> None:
    """The newest state is on disk; an older one is built again, by manifests that are asked for again."""
    weights = follow(office, tmp_path)
    with pytest.raises(LocalFault) as caught:
        weights.digest_of(2)
    assert caught.value.code == "E_NO_VERSION"
    weights.poll(now())
    weights.save()
    again = follow(office, tmp_path)
    assert again.restore()
    for version in (2, 1):
        again.prepare(version)
        assert again.digest_of(version) == office.manifests[version].digest


def test_saved_weights_are_taken_up_and_damaged_ones_fetched_again(tmp_path: Path, office: FakeCoordinator) -> None:
    weights = follow(office, tmp_path)
    assert not weights.restore()
    weights.poll(now())
    weights.save()
    again = follow(office, tmp_path)
    assert again.restore()
    assert again.newest() == 2
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    third = follow(office, tmp_path)
    assert not third.restore()
    assert third.poll(now())


def test_model_files_are_fetched_once_and_checked(tmp_path: Path) -> None:
    office = FakeCoordinator()
    office.run = run_manifest(
        model=ModelSpec(
            name="m", layout_sha256=office.layout.sha256, files={"config.json": office.store.put(b"{}")}
        )
    )
    fetched: list[str] = []

    class Client:
        def fetch(self, sha256: str, max_bytes: int | None = None) -> bytes:
            fetched.append(sha256)
            return office.store.get(sha256)

    client, config = Client(), office.run.model.files["config.json"]
    assert fetch_model(client, office.run, tmp_path / "model") == office.layout
    assert fetch_model(client, office.run, tmp_path / "model") == office.layout
    assert sorted(fetched) == sorted([config, office.layout.sha256])
    (tmp_path / "model" / "config.json").write_bytes(b"[]")
    fetch_model(client, office.run, tmp_path / "model")
    assert fetched.count(config) == 2
    assert (tmp_path / "model" / "config.json").read_bytes() == b"{}"
