"""A coordinator whose database was put back from a backup is told what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.config import LearnerConfig
from learner.retelling import E_RESUME
from protocol.errors import LocalFault
from protocol.store import DirectoryStore
from tests.fakes.learning import FakeCoordinator, make_learner, stocked

STEPS = 3


@pytest.fixture(scope="module")
def stock(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DirectoryStore, FakeCoordinator]:
    store = DirectoryStore(tmp_path_factory.mktemp("store"))
    return store, stocked(model_dir, store, 2 * STEPS + 4)


def groups_of(client: FakeCoordinator, version: int) -> set[int]:
    return {entry.group for entry in client.plans[version].groups}


def test_a_learner_that_starts_again_tells_what_is_lacking_and_goes_on(model_dir, stock, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    make_learner(tmp_path, model_dir, store, client).run(STEPS)
    told = client.manifests | {}
    client.forget(1)
    assert make_learner(tmp_path, model_dir, store, client).run(STEPS + 1) == "complete"
    assert {version: client.manifests[version].digest for version in told} == {v: m.digest for v, m in told.items()}
    assert sorted(client.receipts) == [1, 2, 3, 4]  # all groups were there still, so all batches are in the books again
    assert client.heads[-1].version == STEPS + 1


@pytest.mark.parametrize("kept", [-1, 0, 1])
def test_batches_whose_groups_are_lost_are_left_out_of_the_books(model_dir, stock, tmp_path, kept):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    make_learner(tmp_path, model_dir, store, client).run(2)
    client.lost = groups_of(client, 1 + max(kept, 0))
    client.forget(kept)
    assert make_learner(tmp_path, model_dir, store, client).run(STEPS) == "complete"
    assert len(client.manifests) == STEPS + 1
    assert sorted(client.plans) == [version for version in (1, 2, 3) if version != 1 + max(kept, 0)]
    assert sorted(client.receipts) == sorted(client.plans)


def test_a_learner_that_waits_notices(model_dir, stock, tmp_path):
    """The head it signs again and again is refused: nothing else tells it."""
    store, pool = stock
    config = LearnerConfig.model_validate({"optim": {"lr": 1e-2}, "publish": {"heartbeat_ms": 1000}})
    client = FakeCoordinator(groups=pool.groups[:4])
    polls = 0

    def later(name: str) -> None:
        nonlocal polls
        if name != "admitted" or len(client.manifests) < 3:
            return
        polls += 1
        if polls == 2:
            client.lost = groups_of(client, 1) | groups_of(client, 2)
            client.forget(0)
        if polls == 3:
            learner.publisher._beat_once()
        if polls == 5:
            client.groups = pool.groups

    client.on_call = later
    learner = make_learner(tmp_path, model_dir, store, client, config=config)
    assert learner.run(STEPS) == "complete"
    assert sorted(client.manifests) == [0, 1, 2, 3]
    assert sorted(client.plans) == [3]


def test_what_was_forgotten_during_a_step_is_told_with_it(model_dir, stock, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    struck = False

    def strike(name: str) -> None:
        nonlocal struck
        if name == "post_batch done" and 2 in client.plans and not struck:
            struck = True
            client.lost = groups_of(client, 2)
            client.forget(0)

    client.on_call = strike
    assert make_learner(tmp_path, model_dir, store, client).run(STEPS) == "complete"
    assert sorted(client.manifests) == [0, 1, 2, 3]
    assert sorted(client.receipts) == [1, 3]


def test_a_batch_that_alone_was_forgotten_is_no_obstacle(model_dir, stock, tmp_path):
    """The database is from between the plan and the version that the plan made."""
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)

    def strike(name: str) -> None:
        if name == "post_batch done" and 2 in client.plans and not client.lost:
            client.lost = groups_of(client, 2)
            del client.plans[2]

    client.on_call = strike
    assert make_learner(tmp_path, model_dir, store, client).run(STEPS) == "complete"
    assert sorted(client.receipts) == [1, 3]


def test_a_work_directory_that_is_older_than_the_run_says_what_to_do(model_dir, stock, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    make_learner(tmp_path / "work", model_dir, store, client).run(1)
    (tmp_path / "old").mkdir()
    for file in (tmp_path / "work").rglob("*"):
        if file.is_file():
            target = tmp_path / "old" / file.relative_to(tmp_path / "work")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    make_learner(tmp_path / "work", model_dir, store, client).run(2)
    with pytest.raises(LocalFault, match="newer versions") as caught:
        make_learner(tmp_path / "old", model_dir, store, client).run(3)
    assert caught.value.code == E_RESUME
    assert "new run" in (caught.value.hint or "")
