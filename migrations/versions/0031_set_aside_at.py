"""A cursor knows when messages of its open batch were set aside."""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"

UP = """
ALTER TABLE saf.cursor ADD COLUMN set_aside_at TIMESTAMP WITH TIME ZONE[];
COMMENT ON COLUMN saf.cursor.set_aside_at IS
    'when messages of the open batch were set aside; a destination''s mark says the last of these '
    'times, or opened_at';
"""
DOWN = """
ALTER TABLE saf.cursor DROP COLUMN set_aside_at;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
