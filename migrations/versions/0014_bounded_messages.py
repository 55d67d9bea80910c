"""Bounds of a message, in bytes, on both logs.

Existing rows may be larger, so the constraints apply to new rows. On an empty log, they are valid
immediately. Readers of a log check the sizes of its older rows; see saf.limits.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"

BOUNDED = """
octet_length(to_service) <= 255 AND octet_length(key) <= 1024
AND (pg_column_size(headers || '{}') <= 96 OR octet_length(CAST(headers AS text)) <= 1048576)
"""

# Avoids reading a non-empty log while its table is locked
UP = """
ALTER TABLE saf.{log} ADD CONSTRAINT {log}_bounded CHECK ({bounded}) NOT VALID;
COMMENT ON CONSTRAINT {log}_bounded ON saf.{log} IS
    'in bytes: indexes, COPY and memory have limits in bytes; see saf.limits';
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM saf.{log}) THEN
        ALTER TABLE saf.{log} VALIDATE CONSTRAINT {log}_bounded;
    END IF;
END $$;
"""
DOWN = "ALTER TABLE saf.{log} DROP CONSTRAINT {log}_bounded"

LOGS = ("outbox", "inbox")


def upgrade() -> None:
    for log in LOGS:
        op.execute(UP.format(log=log, bounded=BOUNDED))


def downgrade() -> None:
    for log in LOGS:
        op.execute(DOWN.format(log=log))
