"""A source remembers from which batches operators took messages out of lanes."""

from __future__ import annotations

from alembic import op

revision = "0033"
down_revision = "0032"

UP = """
CREATE TABLE saf.taken_out (
    subscription_id INTEGER NOT NULL,
    destination TEXT NOT NULL,
    kind TEXT DEFAULT 'main' NOT NULL,
    subject TEXT DEFAULT '' NOT NULL,
    broker UUID DEFAULT 'ffffffff-ffff-ffff-ffff-ffffffffffff' NOT NULL,
    shard SMALLINT NOT NULL,
    opened_at TIMESTAMP WITH TIME ZONE NOT NULL,
    taken_out_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id, destination, kind, subject, broker, shard, opened_at),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);
COMMENT ON TABLE saf.taken_out IS
    'what people took out of lanes: it may be stored at the destination, whose answer got lost';
COMMENT ON COLUMN saf.taken_out.kind IS
    'of the lane: messages that wait for the same thing, in order; see saf.setaside.lane';
COMMENT ON COLUMN saf.taken_out.subject IS
    'the service, key, shard or conversation that the lane is of';
COMMENT ON COLUMN saf.taken_out.broker IS
    'that the messages of the lane are addressed to; all ones where they are to none';
COMMENT ON COLUMN saf.taken_out.opened_at IS 'as in saf.parked';
"""
DOWN = "DROP TABLE saf.taken_out"


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
