"""Lineages: which incarnation of its broker has sent which numbers of a dialog's end."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

UP = """
ALTER TABLE saf.broker
    ALTER COLUMN incarnation TYPE BIGINT, ALTER COLUMN incarnation SET DEFAULT '1';
COMMENT ON COLUMN saf.broker.incarnation IS
    'raised when this broker is repaired after it was set back: who remembers an older one has to \
compare what it knows. The moment of the repair in microseconds, so that no two repairs after the \
same backup have the same';
ALTER TABLE saf.conversation
    ADD COLUMN lineage JSONB,
    ADD COLUMN far_lineage JSONB,
    ADD CONSTRAINT conversation_lineages
        CHECK (jsonb_typeof(lineage) = 'array' AND jsonb_typeof(far_lineage) = 'array');
COMMENT ON COLUMN saf.conversation.lineage IS
    '[[incarnation, after], ...]: numbers sent above after were said by that incarnation of this \
broker; null as long as it was not set back';
COMMENT ON COLUMN saf.conversation.far_lineage IS
    'that of the other end, as it was last heard';
"""

DOWN = """
ALTER TABLE saf.conversation DROP COLUMN lineage, DROP COLUMN far_lineage;
-- raised by one with each repair
UPDATE saf.broker SET incarnation = least(incarnation, 2);
ALTER TABLE saf.broker
    ALTER COLUMN incarnation TYPE INTEGER, ALTER COLUMN incarnation SET DEFAULT '1';
COMMENT ON COLUMN saf.broker.incarnation IS
    'raised when this broker is repaired after it was set back: who remembers an older one has to \
compare what it knows';
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
