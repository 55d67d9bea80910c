"""Marks by which each side notices that it, or the other side, was set back."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"

# Existing marks are from a time in which sources did not remember them.
UP = """
CREATE TABLE saf.acknowledged (
    destination UUID NOT NULL,
    lane TEXT NOT NULL,
    shard SMALLINT NOT NULL,
    batch BIGINT NOT NULL,
    position BIGINT NOT NULL,
    opened_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (destination, lane, shard, batch)
) WITH (fillfactor = 40);
COMMENT ON TABLE saf.acknowledged IS
    'the last that each destination has said to have stored of a shard: one that has less was set \
back, and if one has more, this broker was';
COMMENT ON COLUMN saf.acknowledged.destination IS 'its broker_id';

ALTER TABLE saf.watermark ADD COLUMN acknowledged BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN saf.watermark.acknowledged IS
    'whether the source remembers it too; false of one that nothing has moved, or \
before sources did';

ALTER TABLE saf.parked ADD COLUMN opened_at TIMESTAMP WITH TIME ZONE DEFAULT now();
COMMENT ON COLUMN saf.parked.opened_at IS
    'of its batch; of what is sent again, or has found a route, when that was: tells the mark of a \
lane from another of the same number';

CREATE TABLE saf.timeline (
    singleton BOOLEAN DEFAULT true PRIMARY KEY,
    written xid8 DEFAULT pg_current_xact_id() NOT NULL,
    CONSTRAINT timeline_is_one_row CHECK (singleton)
);
COMMENT ON TABLE saf.timeline IS
    'whose transaction ids the logs have: one row, never updated but by a rebase';
COMMENT ON COLUMN saf.timeline.written IS
    'by which transaction: if it is not the xmin of the row, a dump has brought it here, and the \
logs with it';
INSERT INTO saf.timeline (written)
SELECT CASE WHEN b.system_identifier = c.system_identifier THEN pg_current_xact_id()
            ELSE '3'::xid8 END
FROM saf.broker b, pg_control_system() c;
"""

DOWN = """
DROP TABLE saf.timeline;
ALTER TABLE saf.parked DROP COLUMN opened_at;
ALTER TABLE saf.watermark DROP COLUMN acknowledged;
DROP TABLE saf.acknowledged;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
