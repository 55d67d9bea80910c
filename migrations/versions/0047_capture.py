"""Captures and backfills; the SQL is in migrations/baseline/capture.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0047"
down_revision = "0046"

REFUSE_CAPTURES = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.capture) THEN
        RAISE EXCEPTION USING MESSAGE = 'tables have captures, and revision 0046 has no place for '
            'them: remove them with `saf capture remove`';
    END IF;
END $$;
"""
DROP = "DROP TABLE saf.backfill, saf.capture"


def upgrade() -> None:
    apply(baseline("capture"))


def downgrade() -> None:
    apply(REFUSE_CAPTURES)
    apply(DROP)
