"""The log as a tree: what the routes hand out is checked as a stranger would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

from coordinator import event_log
from coordinator.database import Database, _alembic_config, sqlite_url
from protocol import canonical
from protocol.errors import PeerFault
from protocol.log_entry import LogEntry, check_root, read_on
from protocol.log_head import LogHead
from protocol.transparency import Peaks, check_consistency, check_entry
from tests.fakes.coordinator import RUN_ID, World
from tests.fakes.whole_log import read_log

#: Last schema with a chain of hashes.
BEFORE = "0002"


@pytest.fixture
def busy(world: World) -> World:
    """A world in which all sorts of things happened."""
    world.node().join().work(2)
    world.verifier.judge()
    world.verifier.judge("fail", "E_REPLAY")
    return world


def key(world: World) -> bytes:
    return world.keys["coordinator"].public_key


def get(world: World, path: str, **query: int) -> dict[str, Any]:
    answer = world.http.get(path, params={name.rstrip("_"): value for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_all(entries: list[LogEntry], head: LogHead) -> None:
    peaks = Peaks()
    read_on(peaks, entries)
    check_root(peaks, head.size, head.root)


def test_everything_that_happens_is_under_the_signed_head(busy: World) -> None:
    entries = read_log(busy.http, RUN_ID, key(busy), page=3)
    assert {entry.kind for entry in entries} >= {
        "invited", "node-registered", "checkpoint", "head", "leased", "epoch-began", "submitted", "verdict", "banned",
    }
    submitted = next(entry for entry in entries if entry.kind == "submitted")
    assert set(submitted.body) == {"receipt_id", "sha256", "commitment_sha256", "node_id", "epoch", "rate_ppm"}
    with busy.coordinator.database.read() as session:
        about = event_log.about(session, submitted.body["receipt_id"])
    assert about == [entry for entry in entries if entry.body.get("receipt_id") == submitted.body["receipt_id"]]
    assert [entry.kind for entry in about][:2] == ["submitted", "verdict"]


def test_every_entry_has_a_proof(busy: World) -> None:
    entries = read_log(busy.http, RUN_ID, key(busy))
    for size in (None, len(entries) - 1):
        for index in range(len(entries) - 1):
            reply = get(busy, "/v1/log/inclusion", index=index, **({} if size is None else {"size": size}))
            head = LogHead.open(reply["head"], RUN_ID, key(busy))
            entry = LogEntry.from_dict(reply["entry"])
            assert entry == entries[index]
            check_entry(entry.leaf, index, head.size, [bytes.fromhex(node) for node in reply["proof"]], head.root)


def test_every_head_leads_to_every_later_one(busy: World) -> None:
    count = len(read_log(busy.http, RUN_ID, key(busy)))
    notes = [busy.http.get("/v1/log/head", params={"size": size}).text for size in range(count + 1)]
    heads = [LogHead.open(note, RUN_ID, key(busy)) for note in notes]
    for old in heads:
        for new in heads[old.size :]:
            reply = get(busy, "/v1/log/consistency", **{"from": old.size, "to": new.size})
            assert LogHead.open(reply["head"], RUN_ID, key(busy)) == new
            check_consistency(
                old.size, old.root, new.size, new.root, [bytes.fromhex(node) for node in reply["proof"]]
            )


def test_a_head_stays_true_while_the_log_grows(busy: World) -> None:
    before = LogHead.open(busy.http.get("/v1/log/head").text, RUN_ID, key(busy))
    busy.restart()
    busy.node("another").join().work(1)
    reply = get(busy, "/v1/log/consistency", **{"from": before.size})
    now = LogHead.open(reply["head"], RUN_ID, key(busy))
    assert now.size > before.size
    check_consistency(before.size, before.root, now.size, now.root, [bytes.fromhex(node) for node in reply["proof"]])


def test_tampering_shows(busy: World) -> None:
    entries = read_log(busy.http, RUN_ID, key(busy))
    head = LogHead.open(busy.http.get("/v1/log/head").text, RUN_ID, key(busy))
    changed = [*entries[:2], LogEntry(2, entries[2].at_ms, entries[2].kind, {}), *entries[3:]]
    for tampered, found in (
        (changed, "E_LOG_ROOT"), (entries[:-1], "E_LOG_ROOT"), (entries[1:], "E_LOG_ENTRY"),
        ([*entries, entries[-1]], "E_LOG_ENTRY"), ([entries[1], entries[0], *entries[2:]], "E_LOG_ENTRY"),
    ):
        with pytest.raises(PeerFault) as caught:
            check_all(tampered, head)
        assert caught.value.code == found


def test_what_is_not_there_is_said(busy: World) -> None:
    count = len(read_log(busy.http, RUN_ID, key(busy)))
    for path in (
        f"/v1/log/head?size={count + 1}", f"/v1/log/inclusion?index={count}", "/v1/log/inclusion?index=3&size=3",
        f"/v1/log/consistency?from={count + 1}", "/v1/log/consistency?from=3&to=2",
        f"/v1/log/consistency?from=1&to={count + 1}",
    ):
        answer = busy.http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "E_NOT_FOUND"), path
    assert get(busy, "/v1/log", **{"from": count}) == {"entries": []}


def test_the_log_of_an_empty_database_has_a_head(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "empty.db"))
    database.upgrade()
    with database.read() as session:
        assert event_log.head(session, RUN_ID).size == 0
    database.close()


def test_a_chain_of_an_earlier_release_becomes_a_tree(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "old.db"))
    config = _alembic_config()

    def migrate(how: Any, revision: str) -> None:
        with database._writing_engine.begin() as connection:
            config.attributes["connection"] = connection
            how(config, revision)

    migrate(command.upgrade, BEFORE)
    previous, rows = "0" * 64, []
    for seq in range(1, 6):
        body = {"receipt_id": f"r{seq}"}
        row = {"seq": seq, "at_ms": seq, "kind": "verdict", "body": body, "previous_sha256": previous}
        previous = canonical.digest(row)
        rows.append(row | {"sha256": previous, "body": canonical.encode(body).decode()})
    with database._writing_engine.begin() as connection:
        for row in rows:
            connection.execute(
                sa.text("INSERT INTO events VALUES (:seq, :at_ms, :kind, :body, :previous_sha256, :sha256)"), row
            )
    migrate(command.upgrade, "head")
    database.check_schema()
    with database.read() as session:
        entries = event_log.entries(session, 0, 100)
        head = event_log.head(session, RUN_ID)
        assert event_log.about(session, "r3") == [entries[2]]
    check_all(entries, head)
    assert [(entry.index, entry.at_ms) for entry in entries] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 5)]
    assert entries[5].body == {"entries": 5, "chain_sha256": previous}
    migrate(command.downgrade, BEFORE)
    with database.engine.connect() as connection:
        chain = connection.execute(sa.text("SELECT seq, sha256 FROM events ORDER BY seq")).all()
    assert [tuple(row) for row in chain[:5]] == [(row["seq"], row["sha256"]) for row in rows]
    database.close()
