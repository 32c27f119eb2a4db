"""How much better and longer a node's samples are than its peers', and since when its leases are pinned."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        for name in ("luck_milli", "length_milli"):
            nodes.add_column(sa.Column(name, INTEGER, nullable=False, server_default="0"))
        nodes.add_column(sa.Column("pinned_ms", INTEGER, nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        for name in ("luck_milli", "length_milli", "pinned_ms"):
            nodes.drop_column(name)
