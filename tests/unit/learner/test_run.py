"""The loop: order of acts, crash at every point, resume to the same bytes, bad groups, stopping."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from learner.checkpoint import Cursor
from learner.config import LearnerConfig
from learner.run import E_RESUME
from protocol.api import E_BATCH, AdmittedGroup
from protocol.errors import E_UNREACHABLE, LocalFault, PeerFault, Transient
from protocol.store import DirectoryStore
from protocol.weights.state_root import hash_named, state_root
from tests.fakes.learning import (
    NODE,
    FakeCoordinator,
    Speaker,
    admitted_group,
    load_model,
    make_learner,
    run_manifest,
    stocked,
)

STEPS = 3


class Killed(BaseException):
    """The process ends here and now."""


@pytest.fixture(scope="module")
def stock(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DirectoryStore, FakeCoordinator]:
    store = DirectoryStore(tmp_path_factory.mktemp("store"))
    return store, stocked(model_dir, store, 2 * STEPS + 2)


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path, stock: tuple[DirectoryStore, FakeCoordinator],
                tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Roots of a run that nothing disturbs."""
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    assert make_learner(tmp_path_factory.mktemp("work"), model_dir, store, client).run(STEPS) == "complete"
    return client.roots()


def test_versions_change_and_everything_is_announced_in_order(model_dir, stock, tmp_path):
    store, pool = stock
    calls: list[str] = []
    client = FakeCoordinator(groups=pool.groups, on_call=calls.append)
    make_learner(tmp_path, model_dir, store, client).run(2)
    assert len(set(client.roots())) == 3
    told = [call for call in calls if " " not in call and call != "admitted"]
    # A head is signed again when it nears its expiry, whenever that is; what matters is the first after a checkpoint.
    told = [c for i, c in enumerate(told) if c != "publish_head" or told[i - 1] == "publish_checkpoint"]
    assert told == [
        "publish_checkpoint", "publish_head",
        "post_batch", "publish_checkpoint", "publish_head", "post_update", "post_screen",
        "post_batch", "publish_checkpoint", "publish_head", "post_update", "post_screen",
    ]
    assert client.receipts[1].metrics_micro["tokens"] > 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2]
    assert {
        "reward_mean", "loss", "kl", "ess", "lag_mean", "lag_max", "tokens", "tokens_per_s", "grad_norm", "diff_bytes",
        "full_bytes", "wait_s", "lag_histogram", "ratio_max", "head_mass_q",
    } <= set(lines[0])
    assert lines[1]["lag_max"] == 1
    (seen,) = client.screens[1].nodes
    assert (seen.node_id, seen.tokens, seen.outliers) == (NODE.id, lines[0]["tokens"], 0)


def fault_points(model_dir, stock, tmp_path) -> int:
    store, pool = stock
    calls: list[str] = []
    make_learner(tmp_path / "count", model_dir, store, FakeCoordinator(pool.groups, on_call=calls.append)).run(2)
    return len(calls)


def test_a_crash_at_any_call_resumes_to_the_same_bytes(model_dir, stock, undisturbed, tmp_path):
    store, pool = stock
    for point in range(fault_points(model_dir, stock, tmp_path)):
        work, client = tmp_path / f"work{point}", FakeCoordinator(groups=pool.groups)
        left = point

        def strike(name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        client.on_call = strike
        with pytest.raises(Killed):
            make_learner(work, model_dir, store, client).run(2)
        client.on_call = lambda name: None
        assert make_learner(work, model_dir, store, client).run(2) == "complete"
        assert client.roots() == undisturbed[:3], f"crash at call {point}"
        assert sorted(client.receipts) == sorted(client.screens) == [1, 2]


@pytest.mark.parametrize("name", ["write_plan", "write_publication", "set_told", "write_metrics"])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_around_each_write_resumes_to_the_same_bytes(model_dir, stock, undisturbed, tmp_path, name, after):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    first = make_learner(tmp_path, model_dir, store, client)
    write, calls = getattr(first.journal, name), 0

    def strike(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and not after:
            raise Killed
        write(*arguments)
        if calls == 2:
            raise Killed

    setattr(first.journal, name, strike)
    with pytest.raises(Killed):
        first.run(STEPS)
    make_learner(tmp_path, model_dir, store, client).run(STEPS)
    assert client.roots() == undisturbed


def test_sparse_resume_points_are_made_up_from_the_journal(model_dir, stock, undisturbed, tmp_path):
    store, pool = stock
    config = LearnerConfig.model_validate({"optim": {"lr": 1e-2}, "process": {"checkpoint_every_versions": 100}})
    client = FakeCoordinator(groups=pool.groups)
    first = make_learner(tmp_path, model_dir, store, client, config=config)
    first.points.save = lambda *_: (_ for _ in ()).throw(Killed)  # killed before the clean stop could save
    with pytest.raises(Killed):
        first.run(2)
    make_learner(tmp_path, model_dir, store, client, config=config).run(STEPS)
    assert client.roots() == undisturbed


def test_a_run_by_blake3_resumes_to_the_same_bytes(model_dir, stock, undisturbed, tmp_path):
    store, pool = stock
    manifest = run_manifest(load_model(model_dir)[0])
    manifest = manifest.model_copy(update={"model": manifest.model.model_copy(update={"state_hash": "blake3"})})
    client = FakeCoordinator(groups=pool.groups)
    config = LearnerConfig.model_validate({"optim": {"lr": 1e-2}, "process": {"checkpoint_every_versions": 100}})
    first = make_learner(tmp_path, model_dir, store, client, config=config, manifest=manifest)
    first.points.save = lambda *_: (_ for _ in ()).throw(Killed)
    with pytest.raises(Killed):
        first.run(2)
    again = make_learner(tmp_path, model_dir, store, client, config=config, manifest=manifest)
    again.run(STEPS)  # versions 1 and 2 are made again, and their roots compared
    roots = {"sha-256": undisturbed, "blake3": client.roots()}
    assert len(set(roots["sha-256"] + roots["blake3"])) == 2 * (STEPS + 1)
    for name, told in roots.items():
        assert state_root(again.trainer.layout, again.trainer.published_state(), hash_id=hash_named(name)) == told[-1]


def test_a_damaged_resume_point_falls_back_to_an_older_one(model_dir, stock, undisturbed, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    make_learner(tmp_path, model_dir, store, client).run(2)
    state = tmp_path / "checkpoints" / "00000002" / "part-0-of-1.pt"
    state.write_bytes(state.read_bytes()[:-100])
    make_learner(tmp_path, model_dir, store, client).run(STEPS)
    assert client.roots() == undisturbed


def test_a_resume_point_of_another_ledger_is_refused(model_dir, stock, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    make_learner(tmp_path, model_dir, store, client).run(1)
    path = tmp_path / "checkpoints" / "00000001" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"plan_sha256": "00" * 32}))
    with pytest.raises(LocalFault, match="not of this journal") as caught:
        make_learner(tmp_path, model_dir, store, client).run(STEPS)
    assert caught.value.code == E_RESUME


def test_latest_names_only_what_read_back_whole(model_dir, stock, tmp_path):
    store, pool = stock
    learner = make_learner(tmp_path, model_dir, store, FakeCoordinator(groups=pool.groups))
    learner.run(1)
    latest = tmp_path / "checkpoints" / "LATEST"
    assert latest.read_text() == "00000001"

    def torn(folder: Path) -> None:
        learner.trainer.save(folder)
        (folder / "part-0-of-1.pt").rename(folder / "part-1-of-2.pt")

    with pytest.raises(LocalFault, match="whole state"):
        learner.points.save(Cursor(2, "00" * 32, None), torn, keep=2)
    assert latest.read_text() == "00000001"
    newest = learner.points.newest(at_most=9)
    assert newest is not None
    assert newest.cursor.version == 1


def test_a_stop_in_the_middle_of_a_step_is_taken_up_again(model_dir, stock, undisturbed, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    planned = lambda: (tmp_path / "batches" / "00000002" / "plan.json").exists()  # noqa: E731
    assert make_learner(tmp_path, model_dir, store, client, should_stop=planned).run(STEPS) == "stopped"
    assert len(client.roots()) == 2
    assert make_learner(tmp_path, model_dir, store, client).run(STEPS) == "complete"
    assert client.roots() == undisturbed


def test_waiting_for_groups_stops_when_told(model_dir, stock, tmp_path, clock):
    store, _ = stock
    learner = make_learner(
        tmp_path, model_dir, store, FakeCoordinator(), clock=clock, should_stop=lambda: len(clock.slept) > 30
    )
    assert learner.run() == "stopped"


def test_a_coordinator_that_is_away_is_asked_again(model_dir, stock, undisturbed, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    dice = random.Random(3)

    def away(name: str) -> None:
        if dice.random() < 0.3:
            raise Transient(E_UNREACHABLE, "away")

    client.on_call = away
    make_learner(tmp_path, model_dir, store, client).run(STEPS)
    assert client.roots() == undisturbed


def test_a_refused_plan_is_replaced(model_dir, stock, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    learner = make_learner(tmp_path, model_dir, store, client)
    post, refused = client.post_batch, []

    def refuse_once(plan):
        if not refused:
            refused.append(plan)
            client.groups = client.groups[1:]
            raise PeerFault(E_BATCH, "a group was withdrawn")
        post(plan)

    client.post_batch = refuse_once
    learner.run(1)
    assert refused[0].groups[0].group == 0
    assert [entry.group for entry in client.plans[1].groups] == [1, 2]


def test_a_group_that_does_not_replay_is_quarantined_for_good(model_dir, speaker: Speaker, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    good = [speaker.group(g) for g in range(4)]
    bad = speaker.group(9)
    bad.samples[0].rollout.tokens[0] ^= 1
    client = FakeCoordinator(groups=[admitted_group(g, store) for g in (bad, *good)])
    make_learner(tmp_path / "work", model_dir, store, client).run(2)
    used = [entry.group for plan in client.plans.values() for entry in plan.groups]
    assert used == [0, 1, 2, 3]
    line = json.loads((tmp_path / "work" / "quarantine.jsonl").read_text().splitlines()[0])
    assert line["group"] == 9
    assert line["code"] in {"E_ADMITTED_DRAW", "E_HEAD_TOKEN", "E_HEAD"}


def test_a_group_that_was_trained_on_is_not_trained_on_again(model_dir, stock, tmp_path):
    """Signed by everybody it may be: a coordinator that lists it once more replays it. Also after a restart."""
    store, pool = stock

    class Replaying(FakeCoordinator):
        def admitted(self, limit: int) -> list[AdmittedGroup]:
            return self.groups[: limit if len(self.plans) < 2 else None]

    client = Replaying(groups=pool.groups[:6])
    make_learner(tmp_path / "work", model_dir, store, client).run(1)
    used = [entry.group for entry in client.plans[1].groups]
    make_learner(tmp_path / "work", model_dir, store, client).run(2)
    assert not set(used) & {entry.group for entry in client.plans[2].groups}
    lines = [json.loads(line) for line in (tmp_path / "work" / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["group"], line["code"]) for line in lines] == [(group, "E_ADMITTED_GROUP") for group in used]


def test_groups_without_signal_make_a_version_with_the_same_weights(model_dir, speaker: Speaker, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    flat = [speaker.group(g, rewards=[500_000] * 4) for g in range(2)]
    client = FakeCoordinator(groups=[admitted_group(g, store) for g in flat])
    make_learner(tmp_path / "work", model_dir, store, client).run(1)
    assert len(set(client.roots())) == 1
    assert len(client.roots()) == 2


def test_stale_groups_are_not_used(model_dir, stock, tmp_path, clock):
    store, pool = stock
    manifest = run_manifest(load_model(model_dir)[0], max_lag_versions=1)
    client = FakeCoordinator(groups=pool.groups)
    learner = make_learner(
        tmp_path, model_dir, store, client, manifest=manifest, clock=clock, should_stop=lambda: len(clock.slept) > 3
    )
    assert learner.run() == "stopped"
    assert sorted(client.plans) == [1, 2]


def test_the_run_ends_at_its_last_version_with_a_lasting_head(model_dir, stock, tmp_path):
    store, pool = stock
    manifest = run_manifest(load_model(model_dir)[0], max_versions=1)
    client = FakeCoordinator(groups=pool.groups)
    assert make_learner(tmp_path, model_dir, store, client, manifest=manifest).run() == "complete"
    assert client.heads[-1].expires_at_ms == manifest.expires_at_ms


def test_another_work_directory_is_refused(model_dir, stock, tmp_path, clock):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    make_learner(tmp_path / "one", model_dir, store, client, clock=clock).run(1)
    clock.advance(5)
    with pytest.raises(LocalFault, match="not the one that the run has") as caught:
        make_learner(tmp_path / "two", model_dir, store, client, clock=clock).run(1)
    assert caught.value.code == E_RESUME


def test_other_settings_cannot_finish_an_open_step(model_dir, stock, tmp_path):
    store, pool = stock
    client = FakeCoordinator(groups=pool.groups)
    planned = lambda: (tmp_path / "batches" / "00000001" / "plan.json").exists()  # noqa: E731
    make_learner(tmp_path, model_dir, store, client, should_stop=planned).run(STEPS)
    other = LearnerConfig.model_validate({"optim": {"lr": 2e-2}})
    with pytest.raises(LocalFault, match="other settings"):
        make_learner(tmp_path, model_dir, store, client, config=other).run(STEPS)
