"""A subscription records whether a stream reads it, which keeps its own checkpoint."""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"

UP = """
ALTER TABLE saf.subscription
    ADD COLUMN stream BOOLEAN NOT NULL DEFAULT false,
    ADD CONSTRAINT subscription_stream CHECK (NOT (stream AND service IS NOT NULL));
COMMENT ON COLUMN saf.subscription.stream IS
    'read by a stream, whose checkpoint says how far it is; its cursors say what it has committed';
"""
# Without the column, a forwarder or a receiver could use a stream's subscription
DOWN = """
DELETE FROM saf.subscription WHERE stream;
ALTER TABLE saf.subscription DROP COLUMN stream
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
