"""A CHECK rejects rows of a log with impossible transaction ids."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0014"

UP = """
ALTER TABLE saf.{log} ADD CONSTRAINT {log}_possible CHECK (txid < '9223372036854775808'::xid8);
"""

DOWN = """
ALTER TABLE saf.{log} DROP CONSTRAINT {log}_possible;
"""

LOGS = "outbox", "inbox"


def upgrade() -> None:
    for log in LOGS:
        op.execute(UP.format(log=log))


def downgrade() -> None:
    for log in LOGS:
        op.execute(DOWN.format(log=log))
