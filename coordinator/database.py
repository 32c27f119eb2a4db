"""One database and its transactions: many readers, one writer at a time, nothing acknowledged before it is on disk."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from protocol.errors import LocalFault, Transient, code

logger = logging.getLogger(__name__)

E_DATABASE = code("E_DATABASE", "the database is busy or failing; nothing was changed")
E_DATABASE_SCHEMA = code("E_DATABASE_SCHEMA", "the database has another schema than this release needs")
E_DATABASE_DAMAGED = code("E_DATABASE_DAMAGED", "the database is damaged: what it holds cannot be relied on")

#: Longest wait for another writer, in seconds.
BUSY_TIMEOUT_S: Final = 10.0
#: What SQLite says of a file that is damaged, or is no database.
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
#: What to do about it.
RESTORE_HINT: Final = "stop the coordinator, then put a backup back: assay coordinator db restore DIR BACKUP"


class Database:
    """A SQLAlchemy engine with the settings that make its promises true.

    SQLite runs in WAL mode with ``synchronous=FULL``: a commit that returned survives a power cut.
    """

    def __init__(self, url: str):
        self.url = url
        self.engine = create_engine(url, connect_args=self._connect_args(), pool_timeout=BUSY_TIMEOUT_S)
        if self.is_sqlite:
            event.listen(self.engine, "connect", _set_pragmas)
            event.listen(self.engine, "begin", _begin)
        self._damage: str | None = None
        self._writing_engine: Engine = self.engine.execution_options(assay_write=True)
        self._writer = threading.Lock()

    @property
    def is_sqlite(self) -> bool:
        """Whether this is a file on this machine."""
        return self.url.startswith("sqlite")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A read-only view of one moment.

        Raises:
            Transient: ``E_DATABASE``; ``E_DATABASE_DAMAGED`` from the first sign of damage on.
        """
        with self._translated(), Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that is committed when the block ends, and rolled back when it raises.

        Raises:
            Transient: ``E_DATABASE`` when another writer holds the database for too long; ``E_DATABASE_DAMAGED`` from
                the first sign of damage on.
        """
        if not self._writer.acquire(timeout=BUSY_TIMEOUT_S):
            raise Transient(E_DATABASE, "another writer holds the database", expected=f"< {BUSY_TIMEOUT_S:g} s")
        try:
            with self._translated(), Session(self._writing_engine, expire_on_commit=False) as session, session.begin():
                session.connection()  # take the lock now, so that all that is read next is what is written upon
                yield session
        finally:
            self._writer.release()

    def upgrade(self) -> None:
        """Bring the schema to this release's."""
        config = _alembic_config()
        with self._writing_engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @property
    def file(self) -> Path | None:
        """The file of an SQLite database; None for a server."""
        return Path(self.engine.url.database or "") if self.is_sqlite else None

    def is_current(self) -> bool:
        """Whether the schema is this release's."""
        return self._revision() == _newest_revision()

    def check_whole(self, *, thorough: bool = False) -> None:
        """Read all of an SQLite database and refuse a damaged one; a server looks after itself.

        Args:
            thorough: look whether indexes and tables agree too, which takes several times as long.

        Raises:
            LocalFault: ``E_DATABASE_DAMAGED``.
            Transient: ``E_DATABASE`` when it cannot be read now.
        """
        if not self.is_sqlite:
            return
        try:
            with self.engine.connect() as connection:
                pragma = f"PRAGMA {'integrity' if thorough else 'quick'}_check(1)"
                found = str(connection.exec_driver_sql(pragma).scalar())
        except (DBAPIError, sqlite3.Error) as error:
            found = _damage_in(error) or ""
            if not found:
                raise Transient(E_DATABASE, f"cannot read {self.file}", got=_words(error)) from None
        if found != "ok":
            raise LocalFault(
                E_DATABASE_DAMAGED, f"{self.file} is damaged", expected="a whole SQLite database",
                got=" ".join(found.split())[:200], hint=RESTORE_HINT,
            )

    def check_schema(self) -> None:
        """Refuse a database of another release.

        Raises:
            LocalFault: ``E_DATABASE_SCHEMA``.
        """
        wanted, found = _newest_revision(), self._revision()
        if found != wanted:
            raise LocalFault(
                E_DATABASE_SCHEMA, f"schema of {self.engine.url.render_as_string()}", expected=wanted,
                got=found or "an empty database",
                hint="assay coordinator init DIR makes one; assay coordinator db upgrade DIR mends an older one",
            )

    def check_known_schema(self) -> None:
        """Refuse a database that :meth:`upgrade` cannot bring to this release's schema.

        Raises:
            LocalFault: ``E_DATABASE_SCHEMA``.
        """
        found = self._revision()
        if found not in known_revisions():
            raise LocalFault(
                E_DATABASE_SCHEMA, f"schema of {self.file}", expected="a schema of this release or an earlier one",
                got=found or "a file without a schema", hint="give a backup of this run's coordinator.db",
            )

    def _revision(self) -> str | None:
        with self._translated(), self.engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def close(self) -> None:
        """Drop the connections."""
        self.engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Faults of the database as ours. Damage is told once, and nothing is read or written from then on."""
        if self._damage is not None:
            raise self._damaged()
        try:
            yield
        except (DBAPIError, sqlite3.Error) as error:
            damage = _damage_in(error)
            if damage is None:
                raise Transient(E_DATABASE, "the database refused", got=_words(error)) from error
            self._note_damage(damage)
            raise self._damaged() from None

    def _note_damage(self, words: str) -> None:
        if self._damage is None:
            self._damage = words
            logger.error("the database is damaged", extra={"code": E_DATABASE_DAMAGED, "detail": words})

    def _damaged(self) -> Transient:
        return Transient(E_DATABASE_DAMAGED, "the database is damaged", got=self._damage, hint=RESTORE_HINT)

    def _connect_args(self) -> dict[str, Any]:
        return {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False} if self.is_sqlite else {}


def sqlite_url(path: Path) -> str:
    """URL of a database file."""
    return f"sqlite:///{path}"


def backup(file: Path) -> Path:
    """Copy a SQLite database that may be in use to a new file beside it, open to the same users.

    Raises:
        LocalFault: ``E_DATABASE`` when it cannot be read or written.
    """
    if not file.is_file():
        raise LocalFault(E_DATABASE, "no such database", got=file)
    copy = file.with_name(f"{file.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}.backup")
    try:
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(file.stat().st_mode)))
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    except (OSError, sqlite3.Error) as error:
        raise LocalFault(E_DATABASE, f"cannot back up {file}", got=str(error)) from None
    return copy


def _damage_in(error: DBAPIError | sqlite3.Error) -> str | None:
    """SQLite's words when a file is damaged; None when something else is the matter."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    extended = getattr(cause, "sqlite_errorcode", None)
    return _words(error) if extended is not None and extended & 0xFF in _DAMAGED else None


def _words(error: DBAPIError | sqlite3.Error) -> str:
    return str(error.orig if isinstance(error, DBAPIError) else error)[:200]


def _set_pragmas(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _begin, not by the driver
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("assay_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


@cache
def known_revisions() -> frozenset[str]:
    """Every schema there ever was, this release's among them."""
    return frozenset(found.revision for found in ScriptDirectory.from_config(_alembic_config()).walk_revisions())


@cache
def _newest_revision() -> str | None:
    return ScriptDirectory.from_config(_alembic_config()).get_current_head()


def _alembic_config() -> AlembicConfig:
    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(__file__).parent / "alembic"))
    return config
