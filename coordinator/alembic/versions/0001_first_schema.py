"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("version", INTEGER, autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(length=200), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("posted_ms", INTEGER, nullable=False),
        sa.Column("rollouts", INTEGER, nullable=False),
        sa.Column("tokens", INTEGER, nullable=False),
        sa.Column("reward_micro", INTEGER, nullable=False),
        sa.Column("lag_milli", INTEGER, nullable=False),
        sa.Column("update", sa.LargeBinary(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("version", INTEGER, autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(length=200), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("state_root", sa.String(length=200), nullable=False),
        sa.Column("beacon", sa.String(length=200), nullable=False),
        sa.Column("diff_bytes", INTEGER, nullable=False),
        sa.Column("anchor_bytes", INTEGER, nullable=False),
        sa.Column("full_bytes", INTEGER, nullable=False),
        sa.Column("published_ms", INTEGER, nullable=False),
        sa.Column("received_ms", INTEGER, nullable=False),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("value", INTEGER, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "drills",
        sa.Column("node_id", sa.String(length=200), nullable=False),
        sa.Column("attack", sa.String(length=200), nullable=False),
        sa.Column("enrolled_ms", INTEGER, nullable=False),
        sa.Column("caught_ms", INTEGER, nullable=True),
        sa.Column("code", sa.String(length=200), nullable=True),
        sa.Column("receipt_id", sa.String(length=200), nullable=True),
        sa.Column("rollouts_before_caught", INTEGER, nullable=True),
        sa.PrimaryKeyConstraint("node_id"),
    )
    op.create_table(
        "epochs",
        sa.Column("id", INTEGER, autoincrement=False, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("key_sha256", sa.String(length=200), nullable=False),
        sa.Column("began_ms", INTEGER, nullable=False),
        sa.Column("ended_ms", INTEGER, nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
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
    op.create_table(
        "groups",
        sa.Column("id", INTEGER, autoincrement=False, nullable=False),
        sa.Column("environment", sa.String(length=200), nullable=False),
        sa.Column("prompt_tokens", sa.JSON(), nullable=False),
        sa.Column("prompt_sha256", sa.String(length=200), nullable=False),
        sa.Column("start_version", INTEGER, nullable=False),
        sa.Column("beacon", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=200), nullable=False),
        sa.Column("cause", sa.String(length=200), nullable=True),
        sa.Column("consumed_version", INTEGER, nullable=True),
        sa.Column("created_ms", INTEGER, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("groups_by_state", "groups", ["state", "id"], unique=False)
    op.create_index(op.f("ix_groups_consumed_version"), "groups", ["consumed_version"], unique=False)
    op.create_table(
        "join_tokens",
        sa.Column("token_sha256", sa.String(length=200), nullable=False),
        sa.Column("label", sa.String(length=200), nullable=False),
        sa.Column("created_ms", INTEGER, nullable=False),
        sa.Column("expires_ms", INTEGER, nullable=False),
        sa.Column("uses_left", INTEGER, nullable=True),
        sa.Column("revoked_ms", INTEGER, nullable=True),
        sa.PrimaryKeyConstraint("token_sha256"),
    )
    op.create_table(
        "meta",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("public_key", sa.String(length=200), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("profile", sa.String(length=200), nullable=False),
        sa.Column("protocol_version", INTEGER, nullable=False),
        sa.Column("state", sa.String(length=200), nullable=False),
        sa.Column("ban_code", sa.String(length=200), nullable=True),
        sa.Column("ban_reason", sa.String(length=400), nullable=True),
        sa.Column("ban_receipt_id", sa.String(length=200), nullable=True),
        sa.Column("ban_until_ms", INTEGER, nullable=True),
        sa.Column("joined_ms", INTEGER, nullable=False),
        sa.Column("last_seen_ms", INTEGER, nullable=False),
        sa.Column("version", INTEGER, nullable=False),
        sa.Column("audited_passes", INTEGER, nullable=False),
        sa.Column("accepted", INTEGER, nullable=False),
        sa.Column("rejected", INTEGER, nullable=False),
        sa.Column("inconclusive", INTEGER, nullable=False),
        sa.Column("tokens", INTEGER, nullable=False),
        sa.Column("dropped", INTEGER, nullable=False),
        sa.Column("forfeited", INTEGER, nullable=False),
        sa.Column("drop_streak", INTEGER, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_nodes_last_seen_ms"), "nodes", ["last_seen_ms"], unique=False)
    op.create_table(
        "node_reasons",
        sa.Column("node_id", sa.String(length=200), nullable=False),
        sa.Column("code", sa.String(length=200), nullable=False),
        sa.Column("count", INTEGER, nullable=False),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.PrimaryKeyConstraint("node_id", "code"),
    )
    op.create_table(
        "units",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("group_id", INTEGER, nullable=False),
        sa.Column("samples", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=200), nullable=False),
        sa.Column("lease_id", sa.String(length=200), nullable=True),
        sa.Column("receipt_id", sa.String(length=200), nullable=True),
        sa.ForeignKeyConstraint(
            ["group_id"],
            ["groups.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_units_group_id"), "units", ["group_id"], unique=False)
    op.create_index("units_by_state", "units", ["state", "id"], unique=False)
    op.create_table(
        "leases",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("unit_id", INTEGER, nullable=False),
        sa.Column("node_id", sa.String(length=200), nullable=False),
        sa.Column("nonce", sa.String(length=200), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=200), nullable=False),
        sa.Column("issued_ms", INTEGER, nullable=False),
        sa.Column("deadline_ms", INTEGER, nullable=False),
        sa.Column("rollouts", INTEGER, nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("sha256", sa.String(length=200), nullable=False),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.ForeignKeyConstraint(
            ["unit_id"],
            ["units.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_leases_unit_id"), "leases", ["unit_id"], unique=False)
    op.create_index("leases_by_deadline", "leases", ["state", "deadline_ms"], unique=False)
    op.create_index("leases_by_node", "leases", ["node_id", "state"], unique=False)
    op.create_index("leases_by_nonce", "leases", ["node_id", "nonce"], unique=False)
    op.create_table(
        "receipts",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("sha256", sa.String(length=200), nullable=False),
        sa.Column("lease_id", sa.String(length=200), nullable=False),
        sa.Column("unit_id", INTEGER, nullable=False),
        sa.Column("node_id", sa.String(length=200), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("commitment", sa.LargeBinary(), nullable=False),
        sa.Column("commitment_sha256", sa.String(length=200), nullable=False),
        sa.Column("bundle_root", sa.String(length=200), nullable=False),
        sa.Column("object_sha256", sa.String(length=200), nullable=False),
        sa.Column("rollouts", INTEGER, nullable=False),
        sa.Column("tokens", INTEGER, nullable=False),
        sa.Column("epoch", INTEGER, nullable=False),
        sa.Column("rate_ppm", INTEGER, nullable=False),
        sa.Column("drawn", sa.Boolean(), nullable=False),
        sa.Column("received_ms", INTEGER, nullable=False),
        sa.Column("state", sa.String(length=200), nullable=False),
        sa.Column("code", sa.String(length=200), nullable=True),
        sa.Column("available_ms", INTEGER, nullable=False),
        sa.Column("claims", INTEGER, nullable=False),
        sa.Column("claimed_by", sa.String(length=200), nullable=True),
        sa.Column("claim_nonce", sa.String(length=200), nullable=True),
        sa.Column("inconclusive", INTEGER, nullable=False),
        sa.Column("rewards", sa.JSON(), nullable=True),
        sa.Column("decided_ms", INTEGER, nullable=True),
        sa.ForeignKeyConstraint(
            ["epoch"],
            ["epochs.id"],
        ),
        sa.ForeignKeyConstraint(
            ["lease_id"],
            ["leases.id"],
        ),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.ForeignKeyConstraint(
            ["unit_id"],
            ["units.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("lease_id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_index(op.f("ix_receipts_epoch"), "receipts", ["epoch"], unique=False)
    op.create_index(op.f("ix_receipts_received_ms"), "receipts", ["received_ms"], unique=False)
    op.create_index("receipts_by_node", "receipts", ["node_id", "state"], unique=False)
    op.create_index("receipts_by_state", "receipts", ["state", "available_ms"], unique=False)
    op.create_table(
        "credits",
        sa.Column("receipt_id", sa.String(length=200), nullable=False),
        sa.Column("node_id", sa.String(length=200), nullable=False),
        sa.Column("tokens", INTEGER, nullable=False),
        sa.Column("state", sa.String(length=200), nullable=False),
        sa.Column("at_ms", INTEGER, nullable=False),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.ForeignKeyConstraint(
            ["receipt_id"],
            ["receipts.id"],
        ),
        sa.PrimaryKeyConstraint("receipt_id"),
    )
    op.create_index("credits_by_node", "credits", ["node_id", "state"], unique=False)
    op.create_table(
        "verdicts",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("sha256", sa.String(length=200), nullable=False),
        sa.Column("receipt_id", sa.String(length=200), nullable=False),
        sa.Column("verifier_id", sa.String(length=200), nullable=False),
        sa.Column("outcome", sa.String(length=200), nullable=False),
        sa.Column("code", sa.String(length=200), nullable=True),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("received_ms", INTEGER, nullable=False),
        sa.ForeignKeyConstraint(
            ["receipt_id"],
            ["receipts.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_index(op.f("ix_verdicts_receipt_id"), "verdicts", ["receipt_id"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_verdicts_receipt_id"), table_name="verdicts")
    op.drop_table("verdicts")
    op.drop_index("credits_by_node", table_name="credits")
    op.drop_table("credits")
    op.drop_index("receipts_by_state", table_name="receipts")
    op.drop_index("receipts_by_node", table_name="receipts")
    op.drop_index(op.f("ix_receipts_received_ms"), table_name="receipts")
    op.drop_index(op.f("ix_receipts_epoch"), table_name="receipts")
    op.drop_table("receipts")
    op.drop_index("leases_by_nonce", table_name="leases")
    op.drop_index("leases_by_node", table_name="leases")
    op.drop_index("leases_by_deadline", table_name="leases")
    op.drop_index(op.f("ix_leases_unit_id"), table_name="leases")
    op.drop_table("leases")
    op.drop_index("units_by_state", table_name="units")
    op.drop_index(op.f("ix_units_group_id"), table_name="units")
    op.drop_table("units")
    op.drop_table("node_reasons")
    op.drop_index(op.f("ix_nodes_last_seen_ms"), table_name="nodes")
    op.drop_table("nodes")
    op.drop_table("meta")
    op.drop_table("join_tokens")
    op.drop_index(op.f("ix_groups_consumed_version"), table_name="groups")
    op.drop_index("groups_by_state", table_name="groups")
    op.drop_table("groups")
    op.drop_table("events")
    op.drop_table("epochs")
    op.drop_table("drills")
    op.drop_table("counters")
    op.drop_table("checkpoints")
    op.drop_table("batches")
