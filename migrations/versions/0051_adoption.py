"""Adopted outbox tables; the SQL is in migrations/baseline/adoption.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0051"
down_revision = "0050"

REFUSE = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.capture WHERE adopted IS NOT NULL) THEN
        RAISE EXCEPTION USING MESSAGE = 'outbox tables are adopted, and revision 0050 has no '
            'place for them: remove them with `saf capture remove`';
    END IF;
END $$;
"""
BACK = """
ALTER TABLE saf.capture
    DROP CONSTRAINT capture_of_changes,
    DROP COLUMN adopted,
    ALTER COLUMN to_service SET NOT NULL,
    ALTER COLUMN message_type SET NOT NULL,
    ALTER COLUMN key SET NOT NULL;
COMMENT ON COLUMN saf.capture.to_service IS NULL;
COMMENT ON COLUMN saf.capture.message_type IS
    'beginning of the message types: orders for orders.insert, orders.update and orders.delete';
COMMENT ON COLUMN saf.capture.key IS 'column whose text is the key of the messages';
COMMENT ON COLUMN saf.capture.columns IS 'columns in the bodies, in this order';
COMMENT ON COLUMN saf.capture.condition IS
    'SQL expression about old and new; rows for which it is not true are not sent; NULL: none';
"""


def upgrade() -> None:
    apply(baseline("adoption"))


def downgrade() -> None:
    apply(REFUSE)
    apply(BACK)
