"""The newest version of a cursor or watermark is the first that its index finds."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

UP = """
ALTER TABLE saf.cursor
    DROP CONSTRAINT cursor_pkey, ADD PRIMARY KEY (subscription_id, shard, batch);
ALTER TABLE saf.watermark
    DROP CONSTRAINT watermark_pkey, ADD PRIMARY KEY (source, shard, lane, batch);
"""

DOWN = """
ALTER TABLE saf.cursor
    DROP CONSTRAINT cursor_pkey, ADD PRIMARY KEY (subscription_id, shard);
ALTER TABLE saf.watermark
    DROP CONSTRAINT watermark_pkey, ADD PRIMARY KEY (source, shard, lane);
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
