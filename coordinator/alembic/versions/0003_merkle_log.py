"""The event log becomes a Merkle tree (docs/spec/log.md) instead of a chain of hashes.

Entries keep their order, time, kind and body. One entry more names the last hash of the chain, so that whoever
remembered it can tell that the old history is the one under the tree.
"""

import sqlalchemy as sa
from alembic import op

from protocol import canonical
from protocol.log_entry import LogEntry
from protocol.transparency import grown

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ENTRIES = sa.table(
    "log_entries", sa.column("index", INTEGER), sa.column("kind", sa.String), sa.column("receipt_id", sa.String),
    sa.column("data", sa.LargeBinary),
)
NODES = sa.table(
    "log_nodes", sa.column("level", INTEGER), sa.column("index", INTEGER), sa.column("hash", sa.LargeBinary)
)
EVENTS = sa.table(
    "events", sa.column("seq", INTEGER), sa.column("at_ms", INTEGER), sa.column("kind", sa.String),
    sa.column("body", sa.JSON), sa.column("previous_sha256", sa.String), sa.column("sha256", sa.String),
)


def upgrade() -> None:
    op.create_table(
        "log_entries",
        sa.Column("index", INTEGER, autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=200), nullable=False),
        sa.Column("receipt_id", sa.String(length=200), nullable=True),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("index"),
    )
    op.create_index(op.f("ix_log_entries_receipt_id"), "log_entries", ["receipt_id"], unique=False)
    op.create_table(
        "log_nodes",
        sa.Column("level", INTEGER, autoincrement=False, nullable=False),
        sa.Column("index", INTEGER, autoincrement=False, nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("level", "index"),
    )
    _plant(op.get_bind())
    op.drop_table("events")


def _plant(connection: sa.Connection) -> None:
    nodes: dict[tuple[int, int], bytes] = {}
    last, size = None, 0

    def add(at_ms: int, kind: str, body: dict[str, object]) -> None:
        nonlocal size
        entry = LogEntry(size, at_ms, kind, body)
        row = {"index": size, "kind": kind, "receipt_id": body.get("receipt_id"), "data": entry.data}
        connection.execute(ENTRIES.insert().values(row))
        for level, index, node in grown(lambda level, index: nodes[level, index], size, entry.leaf):
            nodes[level, index] = node
            connection.execute(NODES.insert().values({"level": level, "index": index, "hash": node}))
        size += 1

    for last in connection.execute(sa.select(EVENTS).order_by(EVENTS.c.seq)):
        add(last.at_ms, last.kind, last.body)
    if last is not None:
        add(last.at_ms, "log-rebuilt", {"entries": last.seq, "chain_sha256": last.sha256})


def downgrade() -> None:
    op.create_table(
        "events",
        sa.Column("seq", INTEGER, autoincrement=False, nullable=False),
        sa.Column("at_ms", INTEGER, nullable=False),
        sa.Column("kind", sa.String(length=200), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("previous_sha256", sa.String(length=200), nullable=False),
        sa.Column("sha256", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    connection, previous = op.get_bind(), "0" * 64
    for data in connection.scalars(sa.select(ENTRIES.c.data).order_by(ENTRIES.c.index)):
        entry = LogEntry.from_bytes(data)
        row = {"seq": entry.index + 1, "at_ms": entry.at_ms, "kind": entry.kind, "body": dict(entry.body)}
        row["previous_sha256"] = previous
        previous = canonical.digest(row)
        connection.execute(EVENTS.insert().values(row | {"sha256": previous}))
    op.drop_table("log_nodes")
    op.drop_index(op.f("ix_log_entries_receipt_id"), table_name="log_entries")
    op.drop_table("log_entries")
