"""Cursors and watermarks are found by their newest version; receivers can be notified."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

UP = """
ALTER TABLE saf.cursor
    DROP CONSTRAINT cursor_pkey, ADD PRIMARY KEY (subscription_id, shard, batch);
ALTER TABLE saf.watermark
    DROP CONSTRAINT watermark_pkey, ADD PRIMARY KEY (source, shard, lane, batch);

CREATE FUNCTION saf.notify_inbox() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN NOTIFY saf_inbox; RETURN NULL; END';
CREATE TRIGGER inbox_notify AFTER INSERT ON saf.inbox
    FOR EACH STATEMENT EXECUTE FUNCTION saf.notify_inbox();
ALTER TABLE saf.inbox DISABLE TRIGGER inbox_notify;
"""

DOWN = """
DROP TRIGGER inbox_notify ON saf.inbox;
DROP FUNCTION saf.notify_inbox();
ALTER TABLE saf.cursor
    DROP CONSTRAINT cursor_pkey, ADD PRIMARY KEY (subscription_id, shard);
ALTER TABLE saf.watermark
    DROP CONSTRAINT watermark_pkey, ADD PRIMARY KEY (source, shard, lane);
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
