"""How much worse and shorter a node's samples are than its peers'."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        for name in ("worse_milli", "shorter_milli"):
            nodes.add_column(sa.Column(name, INTEGER, nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        for name in ("worse_milli", "shorter_milli"):
            nodes.drop_column(name)
