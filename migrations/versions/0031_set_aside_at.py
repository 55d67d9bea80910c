"""A cursor and a watermark know when messages of their shard were set aside."""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"

UP = """
ALTER TABLE saf.cursor ADD COLUMN set_aside_at TIMESTAMP WITH TIME ZONE[];
COMMENT ON COLUMN saf.cursor.set_aside_at IS
    'the last times at which messages of the shard were set aside';
ALTER TABLE saf.watermark ADD COLUMN set_aside_at TIMESTAMP WITH TIME ZONE;
COMMENT ON COLUMN saf.watermark.set_aside_at IS
    'of the shard''s own lane: when the source had last set aside messages of the shard; NULL if '
    'it had not';
"""
DOWN = """
ALTER TABLE saf.watermark DROP COLUMN set_aside_at;
ALTER TABLE saf.cursor DROP COLUMN set_aside_at;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
