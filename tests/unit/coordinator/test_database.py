from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from coordinator import counters
from coordinator.database import Database, backup, sqlite_url
from coordinator.models import Base
from protocol.errors import LocalFault, Transient
from tests.fakes.coordinator import World, empty_database
from tests.unit.coordinator.conftest import MakeWorld


@pytest.fixture
def database(tmp_path: Path) -> Database:
    (tmp_path / "a.db").write_bytes(empty_database())
    return Database(sqlite_url(tmp_path / "a.db"))


def test_the_migrations_make_what_the_models_say(database: Database) -> None:
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    database.close()


def test_an_unknown_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "empty.db"))
    with pytest.raises(LocalFault) as caught:
        database.check_schema()
    assert caught.value.code == "E_DATABASE_SCHEMA"
    assert caught.value.hint
    database.upgrade()
    database.upgrade()
    database.check_schema()
    database.close()


def test_a_transaction_that_fails_leaves_nothing(database: Database) -> None:
    def interrupted() -> None:
        with database.write() as session:
            counters.add(session, "a", 1)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    with database.read() as session:
        assert counters.totals(session) == {}
    with database.write() as session:  # and the next one gets its turn
        counters.add(session, "a", 1)
    database.close()


def test_commits_are_durable_and_readers_do_not_wait(database: Database) -> None:
    with database.engine.connect() as connection:
        settings = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    assert settings == ["wal", 2]
    with database.write() as session:
        counters.add(session, "a", 1)
        with database.read() as other:
            assert counters.totals(other) == {}
    database.close()


def test_a_database_held_by_somebody_else_is_transient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.database.BUSY_TIMEOUT_S", 0.05)
    (tmp_path / "a.db").write_bytes(empty_database())
    database = Database(sqlite_url(tmp_path / "a.db"))
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Transient) as caught, database.write():
        pass
    assert caught.value.code == "E_DATABASE"
    other.execute("ROLLBACK")
    other.close()
    database.close()


def test_a_backup_is_a_whole_database(world: World) -> None:
    world.node().join()
    file = world.directory / "coordinator.db"
    file.chmod(0o600)
    made = backup(file)
    assert made.stat().st_mode == file.stat().st_mode
    copy = Database(sqlite_url(made))
    copy.check_schema()
    with copy.read() as session:
        assert counters.totals(session) == {}
    copy.close()
    with pytest.raises(LocalFault):
        backup(world.directory / "nothing.db")


def test_units_are_handed_out_once_under_a_rush(make_world: MakeWorld) -> None:
    world = make_world(batch={"groups_per_batch": 12})
    world.publish()
    nodes = [world.node(str(i)).join() for i in range(4)]
    taken: list[tuple[int, tuple[int, ...]]] = []

    def rush(number: int) -> None:
        for _ in range(3):
            taken.extend((lease.group, tuple(lease.samples)) for lease, _ in nodes[number].leases(4))

    threads = [threading.Thread(target=rush, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 48
