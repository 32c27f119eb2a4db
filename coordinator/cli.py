"""``assay coordinator``: found a run, serve it, and run it as its operator.

Exit codes: 0 done, 1 refused or failed, 2 bad usage or configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protocol.errors import E_CONFIG, E_NOT_FOUND, E_USAGE, AssayError, LocalFault

if TYPE_CHECKING:
    from coordinator.config import CoordinatorConfig
    from coordinator.database import Database
    from coordinator.locks import FolderLock

app = typer.Typer(
    help="Operate a run: create it, serve it, invite and ban nodes.", no_args_is_help=True, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)
db = typer.Typer(help="The database: check, upgrade, back up, restore.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(db, name="db")


def _node_id(value: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", value) is None:
        raise typer.BadParameter(f"expected 64 hex digits (see assay coordinator nodes), got {value[:80]!r}")
    return value


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the run.")]
Dir = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Directory of the run.")]
def _reason(value: str) -> str:
    if not 3 <= len(value) <= 400:
        raise typer.BadParameter(f"expected 3 to 400 characters, got {len(value)}")
    return value


Reason = Annotated[
    str, typer.Option("--reason", help="Why; it is written to the public log. 3 to 400 characters.", callback=_reason)
]
NodeId = Annotated[
    str, typer.Argument(metavar="NODE_ID", help="64 hex digits, see `assay coordinator nodes`.", callback=_node_id)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def init(
    directory: Directory,
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Hugging Face folder of the first version.")],
    preset: Annotated[str, typer.Option(help="tiny or smollm2.")] = "tiny",
    task: Annotated[str | None, typer.Option(help="Another task than the preset's, for example gsm8k.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Data of the task, if it needs some.")] = None,
    host: Annotated[str, typer.Option(help="Address nodes reach the coordinator at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port they reach it at.")] = 8700,
    name: Annotated[str, typer.Option(help="Name of the run.")] = "",
    max_versions: Annotated[int | None, typer.Option(min=1, help="Versions instead of the preset's number.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the run's tasks and draws repeatable.")] = None,
    store: Annotated[str, typer.Option(metavar="URL", help="dir:PATH or s3://...; default: DIR/store.")] = "",
    calibration: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A record of `assay verifier calibrate`; repeatable.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change the preset, like batch.groups_per_batch=8; repeatable.")
    ] = None,
) -> None:
    """Found a run: keys, signed manifest, database, join link.

    Example: assay coordinator init run --preset tiny --model genesis
    """
    from coordinator.foundation import Founding, found
    from coordinator.preset_settings import with_settings
    from coordinator.presets import preset as preset_called
    from protocol.clock import SystemClock

    founding = Founding(
        preset=with_settings(preset_called(preset, task), assignments or []), model=model, host=host, port=port,
        data=data, name=name, max_versions=max_versions, seed=seed, store_url=store,
        calibrations=tuple(calibration or ()),
    )
    link = found(directory, founding, SystemClock())
    print(f"Run {link.run_id} is founded in {directory}.")
    print(f"Back up {directory / 'keys'}; the root key can be kept offline from now on.")
    print(f"Serve it:  assay coordinator serve {directory}")
    print(f"Train:     assay learner run --config {directory / 'learner.toml'} ... (its --help has an example)")
    print(f"Join it:   assay node join '{link.format()}' --home HOME")


@app.command()
def serve(
    directory: Directory,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Log to a file instead of stderr.")] = None,
) -> None:
    """Serve a run until SIGTERM. Settings: coordinator.toml in DIR, then ASSAY_COORDINATOR_*, then flags.

    Example: assay coordinator serve run --host 0.0.0.0 --port 8700
    """
    from coordinator.app import create_app
    from coordinator.server import listen
    from coordinator.server import serve as serve_forever
    from protocol.logs import setup_logging

    config = _config(directory, host=host, port=port)
    with _serving_lock(config.directory):
        setup_logging(log, config.log_level)
        application = create_app(config)
        with listen(config.host, config.port) as listener:
            serve_forever(application, config, listener, _announce)


@app.command()
def invite(
    directory: Dir = Path(),
    uses: Annotated[int | None, typer.Option(min=1, help="How many nodes may join with it; default: any.")] = None,
    ttl_hours: Annotated[float, typer.Option(min=0.01, help="How long it is valid.")] = 168.0,
    reason: Reason = "invited by the operator",
) -> None:
    """Print a new join link.

    Example: assay coordinator invite --dir run --uses 1
    """
    from coordinator.admin_client import AdminClient

    client = AdminClient(directory)
    reply = client.act("invites", reason=reason, uses=uses, ttl_s=max(1, round(ttl_hours * 3600)))
    print(client.link(reply["token"]))


@app.command()
def ban(
    node_id: NodeId,
    reason: Reason,
    directory: Dir = Path(),
    hours: Annotated[float | None, typer.Option(min=0.01, help="How long; default: for good.")] = None,
) -> None:
    """Ban a node, void its unsettled credit and hand its unconsumed work to others.

    Example: assay coordinator ban NODE_ID --reason "asked for by its owner" --dir run
    """
    from coordinator.admin_client import AdminClient

    expires_in_s = None if hours is None else max(1, round(hours * 3600))
    with _known_node(node_id, directory):
        AdminClient(directory).act("ban", node_id=node_id, reason=reason, expires_in_s=expires_in_s)
    print(f"{node_id} is banned.")


@app.command()
def unban(node_id: NodeId, reason: Reason, directory: Dir = Path()) -> None:
    """Let a node work again.

    Example: assay coordinator unban NODE_ID --reason "disk replaced" --dir run
    """
    from coordinator.admin_client import AdminClient

    with _known_node(node_id, directory):
        AdminClient(directory).act("unban", node_id=node_id, reason=reason)
    print(f"{node_id} may work again.")


@app.command()
def drill(
    node_id: NodeId,
    attack: Annotated[str, typer.Argument(help="best-of-n, int8, stale or edited-answer.")],
    directory: Dir = Path(),
    reason: Reason = "drill of the operator",
) -> None:
    """Enrol a key as a drill: it cheats on purpose, its work never reaches the learner.

    The key need not have registered yet, and stays a drill for good: make one for it (assay node join --home DRILL).

    Example: assay coordinator drill NODE_ID best-of-n --dir run
    """
    from coordinator.admin_client import AdminClient

    AdminClient(directory).act("drills", node_id=node_id, attack=attack, reason=reason)
    print(f"{node_id} is a drill from now on, registered or not: {attack}.")


@app.command()
def nodes(directory: Dir = Path(), as_json: Json = False) -> None:
    """List the nodes of the run.

    Example: assay coordinator nodes --dir run --json
    """
    from coordinator.admin_client import AdminClient

    found = AdminClient(directory).nodes()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'node':<66}{'name':<16}{'state':<10}{'version':>8}{'accepted':>10}{'rejected':>10}{'unclear':>9}  reasons")
    for node in found:
        print(_row(node))


@db.command()
def check(directory: Directory) -> None:
    """Say whether the database is whole and has the schema of this release.

    Example: assay coordinator db check run
    """
    database = _database(directory)
    database.check_whole()
    database.check_schema()
    print("The database is whole and its schema up to date.")


@db.command()
def upgrade(directory: Directory) -> None:
    """Back the database up, then bring its schema to this release's. Stop the coordinator first.

    Example: assay coordinator db upgrade run
    """
    from coordinator.database import backup

    database = _database(directory)
    with _serving_lock(directory):
        if database.is_current():
            print("Nothing to do: the schema is up to date.")
            return
        copy = backup(database.file) if database.file else None
        database.upgrade()
    print(f"Upgraded; the database as it was: {copy}" if copy else "Upgraded.")


@db.command("backup")
def back_up(directory: Directory) -> None:
    """Copy the database (SQLite) while it is in use.

    Example: assay coordinator db backup run
    """
    from coordinator.database import backup

    file = _database(directory).file
    if file is None:
        raise _not_sqlite("backed up")
    print(backup(file))


@db.command()
def restore(
    directory: Directory,
    backup: Annotated[Path | None, typer.Argument(
        metavar="[BACKUP]", help="A copy of coordinator.db; without: another tool has put one back, and it is noted.",
    )] = None,
) -> None:
    """Put a backup of the database back. Stop the coordinator first; the learner then tells it what it lacks.

    The backup is checked before anything is changed, and the database it replaces is kept beside it.

    Example: assay coordinator db restore run run/coordinator.db.20260101T120000000000.backup
    """
    from coordinator.app import open_run
    from coordinator.database import Database
    from coordinator.restoration import note_restored
    from coordinator.restoration import restore as put_back
    from protocol.clock import SystemClock

    database, run, now_ms = Database(_config(directory).database), open_run(directory), SystemClock().now_ms()
    with _serving_lock(directory):
        if backup is None:
            database.check_whole(thorough=True)
            database.check_schema()
            (version, entries), kept = note_restored(database, run, now_ms), None
        elif database.file is None:
            raise _not_sqlite("restored")
        else:
            done = put_back(database.file, backup, run, now_ms)
            version, entries, kept = done.version, done.entries, done.kept
    database.close()
    print(f"Restored: version {'-' if version is None else version}, {entries} entries of the log.")
    if kept is not None:
        print(f"The database it replaces: {kept}")
    print("What was acknowledged since the backup is lost, but for the versions: docs/operator.md, \"Restore\".")


def _not_sqlite(what: str) -> LocalFault:
    return LocalFault(
        E_CONFIG, f"only SQLite databases are {what} by this command", expected="coordinator.db",
        got="another database_url", hint="use the tools of your database, for example pg_dump",
    )


def _config(directory: Path, **flags: Any) -> CoordinatorConfig:
    """Settings of the run in ``directory``. Raises ``E_CONFIG`` when there is none."""
    from coordinator.config import CoordinatorConfig
    from protocol.config import load_config

    directory = directory.resolve()
    if not (directory / "keys" / "coordinator.key").exists():
        raise LocalFault(
            E_CONFIG, f"{directory} holds no run", expected="a folder made by assay coordinator init",
            got="a folder without keys/coordinator.key" if directory.is_dir()
            else "a file" if directory.exists() else "no such folder",
            hint=f"assay coordinator init {directory} --model DIR",
        )
    file = directory / "coordinator.toml"
    config, _ = load_config(
        CoordinatorConfig, file if file.exists() else None, "ASSAY_COORDINATOR_", {"directory": directory, **flags}
    )
    return config


def _serving_lock(directory: Path) -> FolderLock:
    from coordinator.locks import FolderLock
    from coordinator.server import LOCK_FILE

    return FolderLock(directory.resolve() / LOCK_FILE, "assay coordinator")


def _database(directory: Path) -> Database:
    """The database of the run in ``directory``, which must be there."""
    from coordinator.database import Database

    database = Database(_config(directory).database)
    if database.file is not None and not database.file.is_file():
        raise LocalFault(
            E_CONFIG, f"the run in {directory} has no database", expected=database.file, got="no such file",
            hint="put a backup there: assay coordinator db restore DIR BACKUP",
        )
    return database


@contextmanager
def _known_node(node_id: str, directory: Path) -> Iterator[None]:
    """An id that the run does not know is a wrong call."""
    try:
        yield
    except AssayError as error:
        if error.code != E_NOT_FOUND:
            raise
        raise LocalFault(
            E_USAGE, "this run has no such node", expected="the id of a node that registered", got=node_id,
            hint=f"assay coordinator nodes --dir {directory} lists them",
        ) from None


def _announce(url: str) -> None:
    print(f"Serving at {url} (dashboard, API, /openapi.json). Ctrl-C ends it.", flush=True)


def _row(node: dict[str, Any]) -> str:
    reasons = ", ".join(f"{code} x{count}" for code, count in sorted(node["reasons"].items()))
    state = f"{node['state']}{'*' if node['drill'] else ''}"
    return (
        f"{node['id']:<66}{node['name'][:15]:<16}{state:<10}{node['version']:>8}{node['accepted']:>10}"
        f"{node['rejected']:>10}{node['inconclusive']:>9}  {reasons}"
    )


if __name__ == "__main__":
    app()
