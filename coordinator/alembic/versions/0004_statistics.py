"""Forced audits, evidence summed up per node, screen reports of the learner, and replicas."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_COUNTS = ("forced_audits", "reward_micro", "suspicion_milli", "suspicion_rollouts")


def upgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        for name in _COUNTS:
            nodes.add_column(sa.Column(name, INTEGER, nullable=False, server_default="0"))
        nodes.add_column(sa.Column("submitted_ms", INTEGER, nullable=True))
    with op.batch_alter_table("receipts") as receipts:
        receipts.add_column(sa.Column("review", sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table("units") as units:
        units.add_column(sa.Column("replicate", sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("replica", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "screens",
        sa.Column("version", INTEGER, autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(length=200), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("received_ms", INTEGER, nullable=False),
        sa.PrimaryKeyConstraint("version"),
    )


def downgrade() -> None:
    op.drop_table("screens")
    with op.batch_alter_table("receipts") as receipts:
        receipts.drop_column("review")
    with op.batch_alter_table("units") as units:
        units.drop_column("replicate")
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("replica")
    with op.batch_alter_table("nodes") as nodes:
        for name in (*_COUNTS, "submitted_ms"):
            nodes.drop_column(name)
