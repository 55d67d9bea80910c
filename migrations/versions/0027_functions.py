"""Functions that run with their owner's rights are for the owner's own triggers alone."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"

# Whoever may execute a function may make a trigger of it, also on a table of one's own. Those that
# the owner has made need no such right.
UP = "REVOKE ALL ON FUNCTION saf.cursor_is_one, saf.watermark_is_one FROM PUBLIC"
DOWN = "GRANT EXECUTE ON FUNCTION saf.cursor_is_one, saf.watermark_is_one TO PUBLIC"


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
