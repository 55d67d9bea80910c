"""Receiving: the service that a subscription reads, and the keys that wait for it."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

UP = """
ALTER TABLE saf.subscription ADD COLUMN service TEXT;
ALTER TABLE saf.subscription ADD CONSTRAINT subscription_service
    CHECK (service IS NULL OR log = 'inbox');
ALTER TABLE saf.subscription ADD FOREIGN KEY (service) REFERENCES saf.service (name);
COMMENT ON COLUMN saf.subscription.service IS
    'whose messages of the inbox it reads; NULL for everybody''s';

ALTER TABLE saf.cursor ADD COLUMN allowance INTEGER;
ALTER TABLE saf.cursor ADD CONSTRAINT cursor_allowance CHECK (allowance > 0);
COMMENT ON COLUMN saf.cursor.allowance IS
    'how many messages are handed out at once after a delivery that failed; NULL for any number';

ALTER TABLE saf.cursor ADD COLUMN until pg_snapshot;
COMMENT ON COLUMN saf.cursor.until IS 'what cuts are cuts of';
ALTER TABLE saf.cursor ADD COLUMN cuts xid8[];
COMMENT ON COLUMN saf.cursor.cuts IS
    'where the next batches of a deep backlog may end; see saf.claim';

ALTER TABLE saf.backoff ADD COLUMN shard SMALLINT;
COMMENT ON COLUMN saf.backoff.shard IS
    'of a lane that holds the messages of one key, for a receiver; NULL for the others';
CREATE INDEX backoff_key ON saf.backoff (subscription_id, next_attempt_at)
    WHERE shard IS NOT NULL;
CREATE INDEX parked_lane ON saf.parked (subscription_id, destination, lane, id);
"""

DOWN = """
DROP INDEX saf.parked_lane;
ALTER TABLE saf.backoff DROP COLUMN shard;
ALTER TABLE saf.cursor DROP COLUMN allowance, DROP COLUMN until, DROP COLUMN cuts;
ALTER TABLE saf.subscription DROP COLUMN service;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    # a subscription would read all messages from now on
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM saf.subscription WHERE service IS NOT NULL) "
        "THEN RAISE EXCEPTION 'saf.subscription has subscriptions of services: remove them first'; "
        "END IF; END $$"
    )
    op.execute(DOWN)
