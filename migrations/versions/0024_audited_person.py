"""The audit names the user for whom a program, such as the dashboard, has acted."""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"

UP = """
ALTER TABLE saf.audit ADD COLUMN person TEXT;
COMMENT ON COLUMN saf.audit.person IS 'whom a program acted for; NULL: nobody else';
"""
DOWN = "ALTER TABLE saf.audit DROP COLUMN person"


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
