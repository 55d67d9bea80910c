"""Pauses and limits; the SQL is in migrations/baseline/limits.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0042"
down_revision = "0041"

REFUSE = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.subscription WHERE paused_at IS NOT NULL) THEN
        RAISE EXCEPTION USING MESSAGE = 'subscriptions are paused, and revision 0041 has no place '
            'for that: resume them with `saf subscription resume`';
    ELSIF EXISTS (SELECT FROM saf.backoff WHERE paused_at IS NOT NULL) THEN
        RAISE EXCEPTION USING MESSAGE = 'destinations are paused, and revision 0041 has no place '
            'for that: resume them with `saf destination resume`';
    ELSIF EXISTS (SELECT FROM saf.subscription WHERE rate IS NOT NULL OR concurrency IS NOT NULL)
    THEN
        RAISE EXCEPTION USING MESSAGE = 'subscriptions have limits, and revision 0040 has no place '
            'for them: remove them with `saf subscription set NAME --rate none --concurrency none`';
    END IF;
END $$;
"""
DROP = """
ALTER TABLE saf.subscription
    DROP COLUMN paused_at, DROP COLUMN paused_by, DROP COLUMN paused_why, DROP COLUMN rate,
    DROP COLUMN concurrency;
ALTER TABLE saf.backoff DROP COLUMN paused_at;
DROP TABLE saf.allotment, saf.seat;
"""


def upgrade() -> None:
    apply(baseline("limits"))


def downgrade() -> None:
    apply(REFUSE)
    apply(DROP)
