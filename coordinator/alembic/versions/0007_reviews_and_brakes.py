"""Since when a bundle is under review, and how often a node's bundles were beyond all limits that are known."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    with op.batch_alter_table("receipts") as receipts:
        receipts.add_column(sa.Column("review_ms", INTEGER, nullable=True))
    with op.batch_alter_table("nodes") as nodes:
        nodes.add_column(sa.Column("uncalibrated", INTEGER, nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        nodes.drop_column("uncalibrated")
    with op.batch_alter_table("receipts") as receipts:
        receipts.drop_column("review_ms")
