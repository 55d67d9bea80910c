"""Columns for the message type whose handler a lane awaits.

Before, the time of the next attempt encoded the type. These lanes become due, up and down: a
receiver that does not handle the first message lets the lane wait again.
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"

UP = """
UPDATE saf.backoff SET next_attempt_at = now()
WHERE next_attempt_at >= '5000-01-01 00:00:00+00' AND next_attempt_at < '9000-01-01 00:00:00+00';

ALTER TABLE saf.backoff ADD COLUMN awaits_handler BOOLEAN DEFAULT false NOT NULL,
    ADD COLUMN message_type TEXT;
ALTER TABLE saf.backoff ADD CONSTRAINT backoff_awaits_possible CHECK (
    CASE WHEN awaits_handler
         THEN kind = 'key' AND shard IS NOT NULL AND next_attempt_at = '9999-01-01 00:00:00+00'
         ELSE message_type IS NULL END
);
COMMENT ON COLUMN saf.backoff.awaits_handler IS
    'whether the lane waits until a receiver comes that handles its first message';
COMMENT ON COLUMN saf.backoff.message_type IS
    'of that message, if it has one; NULL where the lane waits for something else';
CREATE INDEX backoff_awaits_handler
    ON saf.backoff (subscription_id, hashtextextended(message_type, 0), since)
    WHERE awaits_handler;
"""

DOWN = """
UPDATE saf.backoff SET next_attempt_at = now(), awaits_handler = false, message_type = NULL
WHERE awaits_handler;
DROP INDEX saf.backoff_awaits_handler;
ALTER TABLE saf.backoff DROP CONSTRAINT backoff_awaits_possible,
    DROP COLUMN awaits_handler, DROP COLUMN message_type;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
