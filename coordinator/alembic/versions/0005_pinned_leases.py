"""How much better a node's samples are than its peers', and since when its leases are pinned to one version."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        nodes.add_column(sa.Column("luck_milli", INTEGER, nullable=False, server_default="0"))
        nodes.add_column(sa.Column("pinned_ms", INTEGER, nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        nodes.drop_column("luck_milli")
        nodes.drop_column("pinned_ms")
