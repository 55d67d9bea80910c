"""An initiator knows the broker of its target, and accepts answers from no other broker."""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"

UP = """
ALTER TABLE saf.conversation ADD COLUMN answered_by UUID;
COMMENT ON COLUMN saf.conversation.answered_by IS
    'of an initiator: the broker that its target is at, as it has answered; it takes no answer of '
    'another one';
ALTER TABLE saf.parked ADD COLUMN source UUID;
COMMENT ON COLUMN saf.parked.source IS 'of what a receiver has set aside, as in the inbox';
"""
DOWN = """
ALTER TABLE saf.parked DROP COLUMN source;
ALTER TABLE saf.conversation DROP COLUMN answered_by;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
