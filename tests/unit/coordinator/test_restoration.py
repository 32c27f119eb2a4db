"""A database that is damaged, and one that is put back from a backup."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import cli, event_log, restoration
from coordinator.app import create_app
from coordinator.database import Database, backup, sqlite_url
from coordinator.groups import head_version
from coordinator.locks import FolderLock
from coordinator.models import Epoch, Group
from protocol.errors import AssayError, LocalFault, PeerFault, Transient
from protocol.messages import UpdateReceipt
from tests.fakes.coordinator import FakePrompts, World, empty_database, sha
from tests.unit.coordinator.conftest import MakeWorld


def damage(file: Path) -> None:
    """Overwrite all pages but the first."""
    with file.open("r+b") as pages:
        pages.seek(4096)
        pages.write(b"\xff" * (file.stat().st_size - 4096))


def test_a_damaged_database_is_not_served(world: World) -> None:
    world.transport.stop()
    file = world.directory / "coordinator.db"
    whole = file.read_bytes()
    damage(file)
    with pytest.raises(LocalFault) as caught:
        create_app(world.config, clock=world.clock, store=world.store, prompts=FakePrompts())
    assert caught.value.code == "E_DATABASE_DAMAGED"
    assert "db restore" in (caught.value.hint or "")
    file.write_bytes(b"no database at all")
    with pytest.raises(LocalFault) as caught:
        Database(sqlite_url(file)).check_whole()
    assert caught.value.code == "E_DATABASE_DAMAGED"
    file.write_bytes(whole)
    world.restart()


def test_a_database_that_breaks_while_it_is_served_makes_it_unready_and_is_told_once(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(config={"sweep_s": 0.01})
    world.publish()
    file = world.directory / "coordinator.db"
    world.coordinator.database.engine.dispose()  # nothing is left in the write-ahead log, nor in a cache
    whole = file.read_bytes()
    with caplog.at_level(logging.WARNING):
        damage(file)
        while world.http.get("/readyz").status_code == 200:
            pass
        assert world.http.get("/readyz").json()["code"] == "E_DATABASE_DAMAGED"
        for _ in range(3):
            with pytest.raises(Transient) as caught:
                world.coordinator.sweep()
            assert caught.value.code == "E_DATABASE_DAMAGED"
            assert world.http.get("/v1/status").status_code == 503
        world.transport.stop()
    assert [r.getMessage() for r in caplog.records].count("the database is damaged") == 1
    assert [r.getMessage() for r in caplog.records].count("sweep failed; trying again") <= 1
    assert not [r for r in caplog.records if r.exc_info]
    for ending in ("-wal", "-shm"):
        file.with_name(file.name + ending).unlink(missing_ok=True)
    file.write_bytes(whole)
    world.restart()


def put_back(world: World, copy: Path) -> restoration.Restored:
    """Restore ``copy`` while the coordinator is down, and serve again."""
    world.transport.stop()
    done = restoration.restore(
        world.directory / "coordinator.db", copy, world.coordinator.run, world.clock.now_ms()
    )
    world.app = create_app(world.config, clock=world.clock, store=world.store, prompts=FakePrompts())
    world.transport.start(world.app)
    return done


def test_a_backup_is_put_back_and_what_it_replaces_is_kept(world: World) -> None:
    copy = backup(world.directory / "coordinator.db")
    before = copy.read_bytes()
    world.publish()
    with world.coordinator.database.read() as session:
        key = session.get(Epoch, 0)
    done = put_back(world, copy)
    assert copy.read_bytes() == before
    assert done.version == 0
    with world.coordinator.database.read() as session:
        assert head_version(session) == 0
        assert event_log.size(session) == done.entries
        assert "restored" in [entry.kind for entry in event_log.entries(session, 0, 100)]
        # A key that may have been revealed since draws nothing any more.
        assert key is None or session.get_one(Epoch, 0).ended_ms is not None
        assert session.query(Epoch).filter(Epoch.ended_ms.is_(None)).count() == 1
    assert done.kept is not None
    kept = Database(sqlite_url(done.kept))
    with kept.read() as session:
        assert head_version(session) == 1
    kept.close()


def test_a_write_ahead_log_of_another_database_is_never_added_to_a_backup(world: World) -> None:
    file = world.directory / "coordinator.db"
    copy = backup(file)
    for _ in range(5):
        world.publish()
    wal = file.with_name(file.name + "-wal")
    stale = wal.read_bytes()  # as a kill -9 leaves it
    assert stale
    world.transport.stop()
    wal.write_bytes(stale)
    done = restoration.restore(file, copy, world.coordinator.run, world.clock.now_ms())
    assert not wal.exists()
    assert not file.with_name(file.name + "-shm").exists()
    assert done.kept is not None
    assert done.kept.with_name(done.kept.name + "-wal").read_bytes() == stale
    world.restart()
    assert world.learner.client.head()
    with world.coordinator.database.read() as session:
        assert head_version(session) == 0


def refused(world: World, copy: Path) -> str:
    file = world.directory / "coordinator.db"
    names, content = sorted(world.directory.iterdir()), file.read_bytes()
    with pytest.raises(AssayError) as caught:
        restoration.restore(file, copy, world.coordinator.run, world.clock.now_ms())
    assert (sorted(world.directory.iterdir()), file.read_bytes()) == (names, content)
    return caught.value.code


def test_what_is_no_whole_backup_of_this_run_changes_nothing(world: World, tmp_path: Path) -> None:
    copy = backup(world.directory / "coordinator.db")
    world.transport.stop()
    assert refused(world, tmp_path / "missing") == "E_USAGE"
    assert refused(world, world.directory / "coordinator.db") == "E_USAGE"
    (tmp_path / "text").write_text("no database")
    assert refused(world, tmp_path / "text") == "E_DATABASE_DAMAGED"
    shutil.copyfile(copy, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    assert refused(world, tmp_path / "damaged") == "E_DATABASE_DAMAGED"
    (tmp_path / "rows").write_bytes(empty_database())
    assert refused(world, tmp_path / "rows") == "E_DATABASE_SCHEMA"
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE t (a)").connection.close()
    assert refused(world, tmp_path / "other") == "E_DATABASE_SCHEMA"
    shutil.copyfile(copy, tmp_path / "newer")
    newer = sqlite3.connect(tmp_path / "newer", isolation_level=None)
    newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.close()
    assert refused(world, tmp_path / "newer") == "E_DATABASE_SCHEMA"
    stranger = Database(sqlite_url(tmp_path / "stranger"))
    stranger.upgrade()
    with stranger.write() as session:
        event_log.append(session, 1, "founded", {"run_id": "cd" * 16, "name": "another"})
    stranger.close()
    assert refused(world, tmp_path / "stranger") == "E_CONFIG"
    world.restart()


def test_the_commands_restore_and_check(world: World) -> None:
    copy = backup(world.directory / "coordinator.db")
    world.transport.stop()
    directory, run = str(world.directory), CliRunner()
    with FolderLock(world.directory / "serve.lock", "assay coordinator"):
        served = run.invoke(cli.app, ["db", "restore", directory, str(copy)])
    assert isinstance(served.exception, LocalFault)
    assert served.exception.code == "E_CONFIG"
    done = run.invoke(cli.app, ["db", "restore", directory, str(copy)])
    assert (done.exit_code, "version 0" in done.stdout, ".replaced" in done.stdout) == (0, True, True)
    noted = run.invoke(cli.app, ["db", "restore", directory])  # another tool did it
    assert (noted.exit_code, ".replaced" in noted.stdout) == (0, False)
    assert "whole" in run.invoke(cli.app, ["db", "check", directory]).stdout
    file = world.directory / "coordinator.db"
    whole = file.read_bytes()
    damage(file)
    broken = run.invoke(cli.app, ["db", "check", directory])
    assert isinstance(broken.exception, LocalFault)
    assert broken.exception.code == "E_DATABASE_DAMAGED"
    file.write_bytes(whole)
    world.restart()


def step(world: World) -> None:
    """One version with its batch, as a learner makes it."""
    learner, plan = world.learner, world.learner.plan()
    learner.client.post_batch(plan)
    learner.publish(world.store)
    learner.client.post_update(UpdateReceipt(
        run_id=plan.run_id, version=plan.version, parent_version=plan.parent_version,
        batch_sha256=plan.sign(learner.key).digest, manifest_sha256=learner.manifests[-1].digest,
        config_sha256=sha("config"), metrics_micro={}, issued_at_ms=world.clock.now_ms(),
    ))


def states(world: World) -> list[tuple[int, str, str | None]]:
    with world.coordinator.database.read() as session:
        return [(g.id, g.state, g.cause) for g in session.query(Group).order_by(Group.id)]


def test_work_from_before_versions_whose_batches_are_lost_is_given_up(make_world: MakeWorld) -> None:
    """Its rollouts would be the same again, and the learner has trained on them."""
    world = make_world(batch={"groups_per_batch": 1, "max_lag_versions": 8})
    world.publish()
    node = world.node().join()
    taken = node.leases(2)
    copy = backup(world.directory / "coordinator.db")
    for lease, digest in taken:
        node.finish(lease, digest)
    world.verifier.pass_all()
    step(world)
    put_back(world, copy)
    learner = world.learner
    with pytest.raises(PeerFault) as caught:
        learner.client.publish_head(learner.head().sign(learner.key))
    assert (caught.value.code, caught.value.expected, caught.value.got) == ("E_CHECKPOINT_CHAIN", "<= 0", "1")
    assert caught.value.hint
    assert states(world) == [(0, "open", None)]
    learner.client.publish_checkpoint(learner.manifests[1])
    learner.client.publish_head(learner.head().sign(learner.key))
    assert states(world) == [(0, "cancelled", "restored")]
    node.version = 1
    fresh = node.leases(2)
    assert {lease.start_version for lease, _ in fresh} == {1}
    for lease, digest in fresh:
        node.finish(lease, digest)
    world.verifier.pass_all()
    step(world)
    assert states(world)[-1][1] == "consumed"


def test_work_goes_on_where_no_batch_is_lost(make_world: MakeWorld) -> None:
    world = make_world(batch={"groups_per_batch": 1, "max_lag_versions": 8})
    world.publish()
    node = world.node().join()
    node.work(4)
    world.verifier.pass_all()
    copy = backup(world.directory / "coordinator.db")
    plan = world.learner.plan(1)
    world.learner.client.post_batch(plan)
    world.publish()
    put_back(world, copy)
    world.learner.client.post_batch(plan)
    world.learner.client.publish_checkpoint(world.learner.manifests[1])
    world.learner.client.publish_head(world.learner.head().sign(world.learner.key))
    assert [state for _, state, _ in states(world)] == ["consumed", "admitted"]


def test_numbers_of_groups_that_were_lost_are_not_given_again(world: World) -> None:
    """The learner refuses for good what it trained on, or could not, by number."""
    copy = backup(world.directory / "coordinator.db")
    world.clock.advance(90)
    node = world.node().join()
    lost = {lease.group for lease, _ in node.leases(8)}
    assert lost
    for name in ("once", "twice"):
        put_back(world, copy)
        again = {lease.group for lease, _ in world.node(name).join().leases(8)}
        assert again
        assert min(again) > max(lost) + 90
        lost |= again
        world.clock.advance(5)
