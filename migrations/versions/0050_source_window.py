"""The window of ids of sources without places; the SQL is in migrations/baseline."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0050"
down_revision = "0049"

REFUSE = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.source_window) THEN
        RAISE EXCEPTION USING MESSAGE = 'queues were read, and revision 0049 has no place for the '
            'ids of their messages: forget them with `saf source forget NAME`';
    END IF;
END $$;
"""
DROP = "DROP TABLE saf.source_window;"


def upgrade() -> None:
    apply(baseline("source_window"))


def downgrade() -> None:
    apply(REFUSE)
    apply(DROP)
