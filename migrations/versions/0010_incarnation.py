"""The incarnation of a broker, which a repair raises."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"

UP = """
ALTER TABLE saf.broker ADD COLUMN incarnation INTEGER DEFAULT 1 NOT NULL;
COMMENT ON COLUMN saf.broker.incarnation IS
    'raised when this broker is repaired after it was set back: who remembers an older one has to \
compare what it knows';
"""

DOWN = """
ALTER TABLE saf.broker DROP COLUMN incarnation;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
