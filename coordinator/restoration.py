"""Putting a backup of the database back: checked first, swapped in at once, what it replaces kept under a name.

The log of a restored database is shorter than heads that others may have seen, and draw keys may have been revealed
since the backup. So it begins a new epoch, says ``restored`` in the log, and remembers that it was restored: when the
learner tells it of versions whose batches it does not know, work from before them is given up
(:meth:`coordinator.checkpoints.Checkpoints.set_head`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from coordinator import event_log
from coordinator.database import E_DATABASE, E_DATABASE_SCHEMA, Database, sqlite_url
from coordinator.epochs import Epochs
from coordinator.groups import FIRST_GROUP, head_version, next_number
from coordinator.models import Meta
from coordinator.run import Run
from protocol.disk import sync_directory
from protocol.errors import E_CONFIG, E_NOT_FOUND, E_USAGE, LocalFault

#: Names a row of ``meta`` that is there once a database was restored.
RESTORED: Final = "restored"
#: No run opens as many groups in a second: how far numbers are put on for the time that was lost.
MOST_GROUPS_PER_S: Final = 100
#: What SQLite keeps beside a database: transactions that are not in it yet, and an index of them.
_WAL, _SHM, _JOURNAL = "-wal", "-shm", "-journal"


@dataclass(frozen=True)
class Restored:
    """What was put back."""

    version: int | None  #: newest version it knows; None before the first
    entries: int  #: of its log, with those that restoring added
    kept: Path | None  #: the database it replaced; None when there was none


def was_restored(session: Session) -> bool:
    """Whether this database was ever put back from a backup."""
    return session.get(Meta, RESTORED) is not None


def restore(file: Path, backup: Path, run: Run, now_ms: int) -> Restored:
    """Replace the database ``file`` of ``run`` by a backup. Nobody may be using it.

    A kill at any moment leaves the old database or the new one, never a mixture. The backup stays as it is; one with
    an older schema is brought to this release's.

    Raises:
        LocalFault: ``E_USAGE`` when the backup is no file or is the database itself; ``E_DATABASE_DAMAGED``;
            ``E_DATABASE_SCHEMA`` when it is of a newer release or no database of a coordinator; ``E_CONFIG`` when it
            is another run's; ``E_DATABASE`` when the disk fails. Nothing was changed then.
    """
    if not backup.is_file() or (file.exists() and backup.samefile(file)):
        raise LocalFault(
            E_USAGE, f"{backup} is no backup", expected="a file that assay coordinator db backup made",
            got="the database itself" if backup.is_file() else "no such file",
        )
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}.new")
    try:
        with _disk_faults(f"cannot restore {file}"):
            found = _prepared(draft, backup, run, now_ms)
            kept = _set_aside(file)
            draft.replace(file)
            sync_directory(file.parent)
    finally:
        for ending in ("", _WAL, _SHM, _JOURNAL):
            _beside(draft, ending).unlink(missing_ok=True)
    return Restored(*found, kept)


def note_restored(database: Database, run: Run, now_ms: int) -> tuple[int | None, int]:
    """Make the best of a database that is older than the run: a fresh draw key, an entry in the log, a mark.

    Returns:
        The newest version it knows, and the number of entries of its log.

    Raises:
        LocalFault: ``E_CONFIG`` when it is another run's.
    """
    with database.write() as session:
        _check_run(session, run)
        version, entries = head_version(session), event_log.size(session)
        last = event_log.entries(session, entries - 1, 1)[0].at_ms if entries else now_ms
        first = next_number(session) + MOST_GROUPS_PER_S * (1 + max(0, now_ms - last) // 1000)
        session.merge(Meta(name=FIRST_GROUP, value=str(first).encode()))
        event_log.append(session, now_ms, "restored", {"entries": entries, "version": version})
        Epochs(run).begin_anew(session, now_ms)
        session.merge(Meta(name=RESTORED, value=str(now_ms).encode()))
        return version, event_log.size(session)


def _prepared(draft: Path, backup: Path, run: Run, now_ms: int) -> tuple[int | None, int]:
    """A copy of ``backup`` that is whole, of this run and this release, and durable; version and entries of it."""
    shutil.copyfile(backup, draft)
    draft.chmod(0o600)
    if os.geteuid() == 0:  # for the coordinator's own user
        owner = draft.parent.stat()
        os.chown(draft, owner.st_uid, owner.st_gid)
    if _beside(backup, _WAL).is_file():  # copied from a stopped coordinator as it was
        shutil.copyfile(_beside(backup, _WAL), _beside(draft, _WAL))
    database = Database(sqlite_url(draft))
    try:
        database.check_whole(thorough=True)
        database.check_known_schema()
        database.upgrade()
        found = note_restored(database, run, now_ms)
    finally:
        database.close()
    with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")  # all of it in one file
    with draft.open("rb") as written:
        os.fsync(written.fileno())
    return found


def _check_run(session: Session, run: Run) -> None:
    try:
        first = event_log.entry(session, 0).body.get("run_id")
    except LocalFault as error:
        if error.code != E_NOT_FOUND:
            raise
        raise LocalFault(E_DATABASE_SCHEMA, "this database tells of no run", expected=f"run {run.id}") from None
    if first != run.id:
        raise LocalFault(
            E_CONFIG, "this database is another run's", expected=f"run {run.id}", got=f"run {first}",
            hint="give a backup of this run's coordinator.db",
        )


def _set_aside(file: Path) -> Path | None:
    """Keep a database and its write-ahead log under another name; of its own names only the first is left."""
    if not file.exists():
        kept = None
    else:
        kept = file.with_name(f"{file.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}.replaced")
        if _beside(file, _WAL).exists():
            os.link(_beside(file, _WAL), _beside(kept, _WAL))
        os.link(file, kept)
        sync_directory(file.parent)
    for ending in (_WAL, _SHM, _JOURNAL):
        _beside(file, ending).unlink(missing_ok=True)
    sync_directory(file.parent)  # before a new database takes the name: SQLite would add the old one's log to it
    return kept


def _beside(file: Path, ending: str) -> Path:
    return file.with_name(file.name + ending)


@contextmanager
def _disk_faults(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise LocalFault(
            E_DATABASE, what, got=str(error), hint="nothing was changed; see to free space and permissions"
        ) from None
