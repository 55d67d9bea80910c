"""Functions that run with their owner's rights can be used only by the owner's own triggers."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"

# A role that may execute a function can create a trigger with it, even on its own table. The
# owner's existing triggers do not need this right.
UP = "REVOKE ALL ON FUNCTION saf.cursor_is_one, saf.watermark_is_one FROM PUBLIC"
DOWN = "GRANT EXECUTE ON FUNCTION saf.cursor_is_one, saf.watermark_is_one TO PUBLIC"


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
