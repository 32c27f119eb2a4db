"""Where the swarm hosts of nodes listen."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "peers",
        sa.Column("node_id", sa.String(length=200), nullable=False),
        sa.Column("addresses", sa.JSON(), nullable=False),
        sa.Column("announced_ms", INTEGER, nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"]),
        sa.PrimaryKeyConstraint("node_id"),
    )
    op.create_index("ix_peers_announced_ms", "peers", ["announced_ms"])
